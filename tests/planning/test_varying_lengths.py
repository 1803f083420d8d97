"""A batch that is much longer than the planned one gets a plan, and memory for its activations, before its forward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.engine import EngineEvents, OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.huggingface.attachment import enable_recompute
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planner import HardwareProfile
from hf_lohan.planning import RunPlan, lay_out
from hf_lohan.testing.models import tiny_batch, tiny_model

SHORT, LONG = 16, 120
MACHINE = {
    "device": {"flops_per_s": 1e9, "memory_bytes": 1 << 34, "shares_cpu": True},
    "h2d_bytes_per_s": 1e10,
    "d2h_bytes_per_s": 1e10,
    "ssd": [{"read_bytes_per_s": 5e9, "write_bytes_per_s": 5e9, "capacity_bytes": 1 << 40}],
    "cpu": {"memory_bytes": 1 << 34, "optimizer_params_per_s": 1e9},
}


def losses_of_run(
    lengths: list[int], folder: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any
) -> tuple[list[float], RunPlan, list[tuple[int, int, int]]]:
    """Train one step with each length, on swapped activations. Return the losses, the plan, and after each step the
    RAM for activations, the bytes on the SSD since the start, and the swapped bytes since the start."""
    model, device = tiny_model("llama"), CpuDevice()
    config = OffloadConfig.load({"activations": "swap", "io_threads": 1, "ssd": str(folder), **settings}).resolve(
        host_memory_bytes=1 << 34, device_memory_bytes=1 << 34, num_cpus=2, default_ssd_path=""
    )
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=False, memory_is_host=True)
    tiers = open_tiers(layout, config, device)
    drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states))
    run = RunPlan(model, layout, config, device, tiers.store.durability)
    monkeypatch.setattr(run, "_measured", lambda _traced, _shape: HardwareProfile.from_mapping(MACHINE))
    events = EngineEvents(
        plan=run.plan_batches,
        step_began=lambda steps: run.step_began(steps.clip_rate, is_as_planned=steps.is_as_planned),
    )
    engine = OffloadEngine(model, layout, tiers, config, events)
    enable_recompute(model, engine)
    losses, memory = [], []
    try:
        optimizer = OffloadAdamW(model.parameters(), engine=engine)
        for seed, length in enumerate(lengths):
            loss = model(**tiny_batch(seed=seed, sequence_length=length)).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            swapper = engine.activations.swapper
            memory.append((tiers.shared_ram.num_bytes, swapper.spilled_bytes, swapper.swapped_bytes))
        engine.wait_for_updates()
    finally:
        engine.close()
    return losses, run, memory


def test_a_longer_batch_is_planned_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [SHORT, SHORT, LONG, SHORT, LONG]
    losses, run, memory = losses_of_run(lengths, tmp_path / "varying", monkeypatch)
    assert run.first is not None and run.now is not None
    assert (run.first.shape.sequence_length, run.now.shape.sequence_length) == (SHORT, LONG)
    assert run.now.plan.prediction.step_s > run.first.plan.prediction.step_s
    ram, _, swapped = zip(*memory, strict=True)
    assert ram[0] == ram[1] < ram[2] == ram[4]
    short_bytes, long_bytes = swapped[0], swapped[2] - swapped[1]
    assert long_bytes == pytest.approx(short_bytes * LONG / SHORT, rel=0.01)  # nothing stays on the device
    assert swapped[4] - swapped[3] == long_bytes
    others, _, _ = losses_of_run(lengths, tmp_path / "recomputed", monkeypatch, activations="recompute")
    assert losses == others


def test_what_a_longer_batch_puts_away_goes_on_to_the_ssd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    budget = {"cpu_memory": "2500KB"}
    lengths = [SHORT, LONG, LONG]
    losses, _, memory = losses_of_run(lengths, tmp_path / "small", monkeypatch, **budget)
    _, spilled, swapped = zip(*memory, strict=True)
    assert 0 < spilled[1] - spilled[0] == spilled[2] - spilled[1]
    assert swapped[1] - swapped[0] == pytest.approx(swapped[0] * LONG / SHORT, rel=0.01)
    others, _, _ = losses_of_run(lengths, tmp_path / "recomputed", monkeypatch, activations="recompute")
    assert losses == others


def test_only_steps_with_batches_of_the_planned_length_are_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed = losses_of_run([SHORT, LONG, LONG, SHORT, LONG], tmp_path / "a", monkeypatch)[1]
    assert len(timed._steps) == 1  # the second of the long steps: the first made the plan, and the last has no end

"""With one backward per step, gradients of bfloat16 weights stay bfloat16 on the host. They need half the bytes and
change no bit.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from clip_norms import CLIPS, LETS_THROUGH
from engines import EngineFactory
from storage_doubles import SlowBackend
from torch import Tensor

from hf_lohan.optim import OffloadAdamW
from hf_lohan.testing.models import tiny_batch, tiny_model

NUM_STEPS = 4
TIGHT, ROOMY = "2MiB", "16MiB"
WAYS: dict[str, dict[str, Any]] = {
    "in_backward": {"hold_gradients": False},
    "defer": {"_clip": "defer"},
    "accepted": {"_clip": "speculate"},
    "redone": {"_clip": "speculate"},
    "serial": {"_schedule": "serial"},
}
MAX_NORMS = {"defer": CLIPS, "accepted": LETS_THROUGH, "redone": CLIPS, "serial": CLIPS}


class Run:
    """A tiny model with an engine that keeps the dtype of gradients or widens them to float32."""

    def __init__(self, build_engine: EngineFactory, folder: Path, *, keeps: bool, way: str, **settings: Any) -> None:
        self.max_norm = MAX_NORMS.get(way, 0.0)
        make = settings.pop("model_factory", partial(tiny_model, "llama"))
        self.model = make().train()
        self.engine = build_engine(
            self.model,
            sums_gradients=not keeps,
            **{"dtype": torch.bfloat16, "ssd": str(folder / f"keeps_{keeps}"), **WAYS[way], **settings},
        )
        self.model.config.dtype = torch.bfloat16
        trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = OffloadAdamW(trained, lr=1e-3, weight_decay=0.1, engine=self.engine)
        self.norms: list[float] = []

    def backward(self, seed: int) -> None:
        self.model(**tiny_batch(seed=seed)).loss.backward()

    def together(self, *seeds: int) -> None:
        def forward_and_backward(seed: int) -> None:
            assert self.engine.defer_backward(self.model(**tiny_batch(seed=seed)).loss)

        self.engine.run_micro_batches([partial(forward_and_backward, seed) for seed in seeds])

    def step(self) -> None:
        if self.max_norm:
            self.norms.append(self.engine.clip_grad_norm(self.max_norm).item())
        self.optimizer.step()
        self.optimizer.zero_grad()

    def train(self, num_steps: int = NUM_STEPS) -> None:
        for number in range(num_steps):
            self.backward(number)
            self.step()

    def records(self) -> dict[tuple[str, str], Tensor]:
        self.engine.wait_for_updates()
        access = self.engine.parameters
        return {
            (part.name, kind): access.read_flat(part.name, kind)
            for block in self.engine.layout.blocks
            for part in block.slices
            for kind in ("param", *(block.master.state_kinds if part.trainable else ()))
        }


def assert_equal(run: Run, other: Run) -> None:
    """Check that norms and all records are bitwise equal."""
    assert run.norms == other.norms
    records, expected = run.records(), other.records()
    assert records.keys() == expected.keys()
    for name, record in records.items():
        assert torch.equal(record, expected[name]), name


RunFactory = Callable[..., tuple[Run, Run]]


@pytest.fixture
def make_runs(build_engine: EngineFactory, tmp_path: Path) -> RunFactory:
    """Return a function that makes a run that keeps dtypes and a run that widens them."""

    def make(way: str = "defer", **settings: Any) -> tuple[Run, Run]:
        kept, widened = (Run(build_engine, tmp_path, keeps=keeps, way=way, **settings) for keeps in (True, False))
        return kept, widened

    return make


def held_chunks(run: Run) -> int:
    plan = run.engine.layout.plan
    shapes = {block.name: block.shape() for block in run.engine.layout.blocks}
    return sum(shapes[name].num_chunks(plan.chunk_numel) for name in plan.held_blocks)


# One backward per step.


@pytest.mark.covering(0)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("cpu_memory", [TIGHT, ROOMY])
def test_records_are_equal(cpu_memory: str, way: str, make_runs: RunFactory) -> None:
    kept, widened = make_runs(way, cpu_memory=cpu_memory, gpu_memory="512KiB", backend=SlowBackend(2e-4))
    for run in (kept, widened):
        run.train()
        assert bool(run.engine.layout.plan.spilled_blocks) == (cpu_memory == TIGHT and way != "in_backward")
    assert_equal(kept, widened)


def test_records_are_equal_if_copies_run_late(build_engine: EngineFactory, tmp_path: Path) -> None:
    device = AsyncDevice(max_delay_s=5e-4)
    kept = Run(build_engine, tmp_path, keeps=True, way="redone", device=device, cpu_memory=TIGHT)
    widened = Run(build_engine, tmp_path, keeps=False, way="redone", cpu_memory=TIGHT)
    for run in (kept, widened):
        run.train()
    assert_equal(kept, widened)
    assert device.num_races == 0


@pytest.mark.covering(0)
@pytest.mark.parametrize("optimizer_state_dtype", ["bfloat16", "int8"])
def test_records_are_equal_with_encoded_moments(optimizer_state_dtype: str, make_runs: RunFactory) -> None:
    kept, widened = make_runs("redone", optimizer_state_dtype=optimizer_state_dtype)
    for run in (kept, widened):
        run.train()
    assert_equal(kept, widened)


def test_held_gradients_take_half_the_memory(make_runs: RunFactory) -> None:
    most_bytes = {}
    for run in make_runs("defer", cpu_memory=ROOMY):
        plan = run.engine.layout.plan
        assert not plan.spilled_blocks
        run.backward(0)
        run.engine.clip_grad_norm(CLIPS)  # a barrier: all gradients have arrived
        most_bytes[run] = run.engine.tiers.gradients.high_water_bytes
        assert most_bytes[run] == held_chunks(run) * plan.buffer_bytes / plan.gradients_per_buffer
    kept_bytes, widened_bytes = most_bytes.values()
    assert kept_bytes == widened_bytes / 2 > 0


def test_kept_dtypes_hold_more_gradients_and_spill_fewer(make_runs: RunFactory) -> None:
    """Besides weights and states, a step writes the planned bytes: two per element of bfloat16 gradients."""
    kept, widened = make_runs("defer", cpu_memory=TIGHT)
    spilled_bytes = {}
    for run in (kept, widened):
        layout = run.engine.layout
        run.train(2)
        run.engine.wait_for_updates()
        before = run.engine.tiers.io.write_bytes
        run.train(2)
        run.engine.wait_for_updates()
        updated = sum(
            layout_record.num_bytes
            for layout_record in layout.records
            if layout_record.block in {block.name for block in layout.blocks if block.state_numel}
        )
        spilled_bytes[run] = (run.engine.tiers.io.write_bytes - before) / 2 - updated
        itemsize = 2 if run is kept else 4
        numel = sum(block.state_numel for block in layout.blocks if block.name in layout.plan.spilled_blocks)
        assert spilled_bytes[run] == numel * itemsize
    assert held_chunks(kept) >= 2 * held_chunks(widened)
    assert 0 < spilled_bytes[kept] < spilled_bytes[widened] / 2


# Several backwards per step, although the engine expected one.


@pytest.mark.covering(0)
@pytest.mark.parametrize("way", ["defer", "accepted", "redone", "serial"])
@pytest.mark.parametrize("cpu_memory", [TIGHT, ROOMY])
@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "unannounced"])
def test_several_backwards_are_summed_in_float32(
    is_announced: bool, cpu_memory: str, way: str, make_runs: RunFactory, caplog: pytest.LogCaptureFixture
) -> None:
    runs = make_runs(way, cpu_memory=cpu_memory, backend=SlowBackend(2e-4))
    with caplog.at_level(logging.WARNING):
        for run in runs:
            for step in range(3):
                num_backwards = 1 + step
                for number in range(num_backwards):
                    if is_announced:
                        run.engine.announce_backward(is_final=number == num_backwards - 1)
                    run.backward(10 * step + number)
                run.step()
    assert_equal(*runs)
    assert sum("set gradient_accumulation_steps" in record.message for record in caplog.records) == 1


def test_parameters_may_lack_a_gradient_in_some_backwards(make_runs: RunFactory) -> None:
    runs = make_runs("redone", cpu_memory=TIGHT)
    for run in runs:
        early = [name for name, _ in run.model.named_parameters() if "layers.1." in name or "layers.2.mlp" in name]
        for step in range(2):
            for number in range(2):
                for name in early:
                    run.model.get_parameter(name).requires_grad_(number == 0)
                run.backward(10 * step + number)
            run.step()
    assert_equal(*runs)


@pytest.mark.covering(0)
@pytest.mark.parametrize("way", ["in_backward", "defer", "redone"])
@pytest.mark.parametrize("cpu_memory", [TIGHT, ROOMY])
def test_micro_batches_run_together_are_summed_in_float32(cpu_memory: str, way: str, make_runs: RunFactory) -> None:
    runs = make_runs(way, cpu_memory=cpu_memory)
    for run in runs:
        run.together(1)
        run.step()
        run.together(2, 3, 4)
        run.step()
        run.backward(5)
        run.step()
        if way != "in_backward":
            run.together(6, 7)
            run.backward(8)
            run.step()
    assert_equal(*runs)


def test_micro_batches_together_after_another_backward_are_refused(make_runs: RunFactory) -> None:
    kept, widened = make_runs("defer")
    kept.backward(1)
    with pytest.raises(RuntimeError, match="set gradient_accumulation_steps before the model is offloaded"):
        kept.together(2, 3)
    kept.optimizer.zero_grad()
    for run in (kept, widened):
        run.together(2, 3)
        run.step()
    assert_equal(kept, widened)


# Blocks of several dtypes.


def some_in_float32() -> Any:
    """The MLPs are bfloat16, all other weights are float32."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        if "mlp" in name:
            parameter.data = parameter.data.bfloat16()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(lambda _module, args: (args[0].bfloat16(),))
        layer.mlp.register_forward_hook(lambda _module, _args, output: output.float())
    return model


def frozen_in_bfloat16() -> Any:
    model = some_in_float32()
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.dtype == torch.float32)
    return model


@pytest.mark.covering(0)
@pytest.mark.parametrize("model_factory", [some_in_float32, frozen_in_bfloat16])
@pytest.mark.parametrize("cpu_memory", [TIGHT, ROOMY])
def test_records_of_blocks_of_several_dtypes_are_equal(
    cpu_memory: str, model_factory: Callable[[], Any], make_runs: RunFactory
) -> None:
    kept, widened = make_runs("redone", cpu_memory=cpu_memory, dtype=None, model_factory=model_factory)
    for run in (kept, widened):
        assert run.engine.layout.plan.gradients_per_buffer == 1
        run.train()
    assert_equal(kept, widened)
    dtypes = {record.dtype for record in kept.engine.layout.spill_records()}
    if model_factory is some_in_float32 and cpu_memory == TIGHT:
        assert dtypes == {"float32", "bfloat16"}
    else:
        assert not dtypes

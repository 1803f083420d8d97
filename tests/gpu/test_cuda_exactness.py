"""Exactness and budgets on CUDA, with real streams, events and pinned memory."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from doubled_device import find_double
from engines import open_engine, resolved

from hf_lohan.device import Device, Lane, device_for
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.testing.models import tiny_batch, tiny_model

NUM_STEPS = 20
NUM_STEPS_ON_DOUBLE = 6
"""The double itself finds races and wrong copies, in any step after the first two."""


@pytest.fixture(autouse=True)
def deterministic_matmuls() -> Any:
    previous = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = previous


def num_steps() -> int:
    return NUM_STEPS if find_double() is None else NUM_STEPS_ON_DOUBLE


def batches(step: int, number: int) -> dict[str, torch.Tensor]:
    return {key: value.cuda() for key, value in tiny_batch(seed=100 * step + number).items()}


def make_model(family: str, *, recompute: bool, **overrides: Any) -> Any:
    model = tiny_model(family, **overrides).train()
    if recompute:
        enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    return model


def offloaded(
    model: Any, folder: Path, *, hold: bool, sums: bool = True, cpu: str = "4MiB", gpu: str = "2MiB", dtype: Any = None
) -> Any:
    config = resolved(folder, memory_bytes=1 << 32, cpu_memory=cpu, gpu_memory=gpu)
    layout = lay_out(model, config, working_dtype=dtype or torch.float32, hold_gradients=hold, sums_gradients=sums)
    engine = open_engine(model, layout, config, device_for("cuda"))
    return engine, OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, engine=engine)


@pytest.mark.covering(1)
@pytest.mark.parametrize("hold", [True, False])
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_vertical_micro_batches_follow_torch(family: str, hold: bool, tmp_path: Path) -> None:
    """The step runs on a side stream, which the threads of the micro-batches must use too."""
    num_micro_batches, overrides = 4, {"output_router_logits": True} if family == "mixtral" else {}
    reference = make_model(family, recompute=True, **overrides).cuda()
    torch_optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1, fused=True)
    model = make_model(family, recompute=True, **overrides)
    engine, optimizer = offloaded(model, tmp_path, hold=hold)

    def forward_and_backward(step: int, number: int) -> torch.Tensor:
        loss = model(**batches(step, number)).loss
        assert engine.defer_backward(loss)
        return loss.detach()

    stream = torch.cuda.Stream()
    for step in range(num_steps() // 2):
        expected = [reference(**batches(step, number)).loss for number in range(num_micro_batches)]
        for loss in expected:
            loss.backward()
        with torch.cuda.stream(stream):
            losses = engine.run_micro_batches(
                [partial(forward_and_backward, step, number) for number in range(num_micro_batches)]
            )
            if hold:
                engine.clip_grad_norm(0.5)
            optimizer.step()
            optimizer.zero_grad()
        if hold:
            torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        torch_optimizer.step()
        torch_optimizer.zero_grad()
        torch.cuda.synchronize()
        assert all(abs(a.item() - b.item()) <= 1e-5 * b.item() for a, b in zip(losses, expected, strict=True))
    worst = max(
        float((engine.parameters.read_parameter(name) - p.detach().cpu()).abs().max())
        for name, p in reference.named_parameters()
    )
    engine.close()
    assert worst < 1e-4


def test_a_repeated_run_is_equal_to_the_bit(tmp_path: Path) -> None:
    """Races of copies would change the weights."""

    def run(folder: Path) -> dict[str, torch.Tensor]:
        model = make_model("llama", recompute=True, num_layers=8)
        engine, optimizer = offloaded(model, folder, hold=True)
        for step in range(num_steps()):
            model(**batches(step, 0)).loss.backward()
            engine.clip_grad_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: engine.parameters.read_parameter(name) for name, _ in model.named_parameters()}
        engine.close()
        return weights

    first = run(tmp_path / "a")
    for round_number in range(3 if find_double() is None else 1):
        again = run(tmp_path / str(round_number))
        assert all(torch.equal(again[name], weight) for name, weight in first.items())


def test_device_memory_stays_within_slots_and_activations(tmp_path: Path) -> None:
    model = make_model("llama", recompute=True, num_layers=24, hidden_size=256)
    engine, optimizer = offloaded(model, tmp_path, hold=True, cpu="32MiB", gpu="12MiB")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for step in range(3):
        model(**batches(step, 0)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    weights_bytes = engine.layout.num_parameters * 4
    peak = torch.cuda.max_memory_allocated() - before
    assert engine.peak_gpu_pool_bytes <= 12 * 2**20
    assert peak < weights_bytes / 4  # gradients and activations of one layer, not of the model
    engine.close()


def test_pinned_memory_at_exact_size_and_copies_in_order() -> None:
    device: Device = device_for("cuda")
    num_bytes = 48 * 2**20  # not a power of two
    host = device.host_empty(num_bytes)
    assert host.numel() == num_bytes
    assert host.data_ptr() % 4096 == 0
    buffer = device.empty(num_bytes)
    host.fill_(7)
    device.copy(Lane.H2D, buffer, host)
    arrived = device.record(Lane.H2D)
    device.wait(Lane.COMPUTE, arrived)
    doubled = buffer * 2
    device.wait(Lane.D2H, device.record(Lane.COMPUTE, doubled))
    arrived.synchronize()
    device.copy(Lane.D2H, host, doubled)
    device.record(Lane.D2H).synchronize()
    assert bool((host == 14).all())

"""The paced device waits instead of computing. Its numbers equal the CPU's, and its times are the configured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import resolved
from paced_device import PacedDevice, SteppedClock
from paced_layers import PacedLinear, pace_layers
from trajectories import SMALL_BUDGETS, arguments, dataset

import hf_lohan
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice, Device, Lane
from hf_lohan.hardware import MeasuringEffort, measure_hardware
from hf_lohan.hardware.rates import MatrixShape
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.planning import trace_blocks
from hf_lohan.testing.models import tiny_model

FLOPS_PER_S = 1e6
LINK_BYTES_PER_S = 1e6
NUM_STEPS = 4
NUM_TOKENS = 2 * 16


def make_device() -> PacedDevice:
    return PacedDevice(link_bytes_per_s=LINK_BYTES_PER_S, flops_per_s=FLOPS_PER_S, clock=SteppedClock())


def paced_model(device: PacedDevice | None) -> Any:
    model = tiny_model("llama")
    pace_layers(model.model.layers, device)
    return model


def train(model: Any, device: Device, folder: Path, *, max_grad_norm: float, accumulation: int, **settings: Any) -> Any:
    """Return a trainer after its last step."""
    config = OffloadConfig.load({**SMALL_BUDGETS, "ssd": str(folder / "store"), **settings})
    is_held = max_grad_norm > 0 or (accumulation > 1 and not config.vertical_micro_batches)
    offload_model(
        model,
        config,
        torch_device="cpu",
        default_ssd_path=folder,
        hold_gradients=is_held,
        sums_gradients=accumulation > 1,
        device=device,
    )
    args = arguments(folder, max_steps=NUM_STEPS, max_grad_norm=max_grad_norm, gradient_accumulation_steps=accumulation)
    trainer = hf_lohan.Trainer(model, args, train_dataset=dataset(), offload=config)
    trainer.train()
    assert trainer.offload_engine.device is device
    return trainer


@pytest.mark.covering(0)
@pytest.mark.parametrize("activations", ["recompute", "swap", "auto"])
def test_gradients_that_arrive_once_are_held_beside_activations(activations: str, tmp_path: Path) -> None:
    """The device has its own memory, so the plan uses the rest of RAM for copies."""
    trainer = train(
        tiny_model("llama"),
        make_device(),
        tmp_path,
        max_grad_norm=0.5,
        accumulation=1,
        activations=activations,
        cpu_memory="12MiB",
    )
    layout = trainer.offload_engine.layout
    assert layout.is_split and bool(layout.plan.held_blocks) == (activations == "recompute")
    assert bool(layout.held_gradients()) == (activations != "recompute")
    assert layout.plan.cpu_pool_bytes + layout.activation_bytes + layout.resident_bytes <= 12 << 20
    trainer.offload_engine.close()


@pytest.mark.parametrize(("activations", "num_products"), [("keep", 3), ("recompute", 4)])
def test_a_step_takes_the_time_of_its_products(activations: str, num_products: int, tmp_path: Path) -> None:
    device = make_device()
    model = paced_model(device)
    began_s = device.clock.now_s()
    products = [module for module in model.modules() if isinstance(module, PacedLinear)]
    flops = num_products * 2 * NUM_TOKENS * sum(product.weight.numel() for product in products)
    trainer = train(model, device, tmp_path, max_grad_norm=0.0, accumulation=1, activations=activations)
    assert device.paced_flops == NUM_STEPS * flops
    assert device.paced_s == pytest.approx(NUM_STEPS * flops / FLOPS_PER_S)
    trainer.offload_engine.wait_for_updates()
    assert device.clock.now_s() >= began_s + device.paced_s
    assert device.num_waits["MainThread"] < device.num_waits.total()
    trainer.offload_engine.close()


def test_a_plan_counts_the_flops_of_paced_layers() -> None:
    models = tiny_model("llama"), paced_model(None)
    true, paced = (trace_blocks(model, batch_size=2, sequence_length=16).profile.layers for model in models)
    assert [layer.flops for layer in paced] == [layer.flops for layer in true]
    for layer in paced:  # a plan can keep the output of each product
        assert {operation.name for operation in layer.operations} >= {f"lohan_paced.mm#{number}" for number in range(7)}


def test_a_lane_copies_one_after_the_other_at_the_rate_of_the_link() -> None:
    device = make_device()
    clock, began_s = device.clock, device.clock.now_s()
    source, target = device.host_empty(4096).fill_(3), device.empty(4096).zero_()
    events = []
    for _ in range(3):
        device.copy(Lane.H2D, target, source)
        events.append(device.record(Lane.H2D))
    device.copy(Lane.D2H, source, target)
    assert clock.now_s() == began_s
    device.record(Lane.D2H).synchronize()
    assert clock.now_s() == pytest.approx(began_s + 4096 / LINK_BYTES_PER_S)
    events[2].synchronize()
    assert clock.now_s() == pytest.approx(began_s + 3 * 4096 / LINK_BYTES_PER_S)
    events[0].synchronize()
    assert device.num_waits == {"MainThread": 2}
    device.note_reached()
    assert device.timeline.totals()["h2d"].busy_s == pytest.approx(3 * 4096 / LINK_BYTES_PER_S)


def test_lanes_wait_for_each_other_without_blocking_the_host() -> None:
    device = make_device()
    clock, began_s = device.clock, device.clock.now_s()
    source, target = device.host_empty(4096), device.empty(4096)
    device.take_flops(2 * FLOPS_PER_S)
    computed = device.record(Lane.COMPUTE)
    device.wait(Lane.D2H, computed)
    device.copy(Lane.D2H, source, target)
    copied = device.record(Lane.D2H)
    device.wait(Lane.COMPUTE, copied)
    device.take_flops(FLOPS_PER_S)
    assert clock.now_s() == began_s
    copied.synchronize()
    assert clock.now_s() == pytest.approx(began_s + 2 + 4096 / LINK_BYTES_PER_S)
    device.stamp(Lane.COMPUTE).at_s()
    assert clock.now_s() == pytest.approx(began_s + 3 + 4096 / LINK_BYTES_PER_S)


def test_the_paced_device_is_measured_as_one_that_does_not_share_the_cpu(tmp_path: Path) -> None:
    config = resolved(tmp_path, **SMALL_BUDGETS)
    effort = MeasuringEffort(budget_s=0.1, scratch_bytes=1 << 20)
    shapes = [MatrixShape(8, 8, 8)]
    for device, has_its_own_cores in ((make_device(), True), (CpuDevice(), False)):
        measured = measure_hardware(config, device, matrix_shapes=shapes, dtype=torch.float32, effort=effort)
        assert measured.device.shares_cpu is not has_its_own_cores

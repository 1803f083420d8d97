"""Measuring a CUDA device leaves the device usable for a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from doubled_device import find_double

from hf_lohan.config import OffloadConfig
from hf_lohan.device import device_for
from hf_lohan.hardware import AttentionShape, MatrixShape, MeasuringEffort, examine_machine, measure_hardware

SHAPES = [
    MatrixShape(2048, 2048, 2048, count=2),
    MatrixShape(2048, 2048, 5632),
    MatrixShape(256, 512, 512, num_matrices=4),
]
ATTENTION = AttentionShape(num_heads=8, num_tokens=2048, key_dim=64, value_dim=64)
MEASURED: dict[str, Any] = {"matrix_shapes": SHAPES, "attention": ATTENTION, "dtype": torch.bfloat16}


def make_config(folder: Path) -> OffloadConfig:
    return OffloadConfig.load({"ssd": str(folder)}).resolve(
        host_memory_bytes=1 << 32, device_memory_bytes=1 << 32, num_cpus=4, default_ssd_path=str(folder)
    )


class CardRates(NamedTuple):
    flops_per_s: float
    bytes_per_s: float


def rates_of_the_card() -> tuple[CardRates, CardRates]:
    """Return bounds (slowest, fastest) of the measured rates. The double has a lower bound, because its kernels run on
    the CPU. A rate above the upper bound would mean that only enqueueing was measured."""
    card = torch.cuda.get_device_properties(0)
    clocks_per_s = 1e3 * getattr(card, "clock_rate", 3e6)
    fastest = CardRates(card.multi_processor_count * clocks_per_s * 16384, 1e14)
    return (CardRates(1e12, 1e10) if find_double() is None else CardRates(1e8, 1e7)), fastest


def test_a_profile_of_the_device(tmp_path: Path) -> None:
    device = device_for("cuda")
    rng_before = torch.cuda.get_rng_state()
    profile = measure_hardware(
        make_config(tmp_path), device, **MEASURED, effort=MeasuringEffort(budget_s=1.0, scratch_bytes=16 << 20)
    )
    assert not profile.device.shares_cpu
    assert profile.device.name == torch.cuda.get_device_name()
    assert 0 < profile.device.memory_bytes <= torch.cuda.get_device_properties(0).total_memory
    slowest, fastest = rates_of_the_card()
    assert slowest.flops_per_s < profile.device.flops_per_s < fastest.flops_per_s
    assert slowest.flops_per_s < (profile.device.attention_flops_per_s or 0) < fastest.flops_per_s
    assert slowest.bytes_per_s < (profile.device.memory_bytes_per_s or 0) < fastest.bytes_per_s
    assert 1e8 < profile.h2d_bytes_per_s < 1e12
    assert 1e8 < profile.d2h_bytes_per_s < 1e12
    assert torch.equal(torch.cuda.get_rng_state(), rng_before)
    assert list(tmp_path.iterdir()) == []


def test_pools_can_be_pinned_after_measuring(tmp_path: Path) -> None:
    """Measuring must unpin its memory, because a pinned address cannot be pinned again."""
    device = device_for("cuda")
    effort = MeasuringEffort(budget_s=0.0, scratch_bytes=16 << 20)
    for _ in range(3):
        measure_hardware(make_config(tmp_path), device, **MEASURED, effort=effort)
        device.host_empty(effort.copy_bytes)
        device.host_empty(effort.io_buffer_bytes)
    assert device.describe()["pinned_host_memory"]


def test_measuring_keeps_no_device_memory(tmp_path: Path) -> None:
    """The run could not reuse cached memory of these sizes."""
    device = device_for("cuda")
    effort = MeasuringEffort(budget_s=0.0, scratch_bytes=16 << 20)
    reserved_bytes = []
    for _ in range(2):  # the first also allocates permanent workspaces of libraries
        measure_hardware(make_config(tmp_path), device, **MEASURED, effort=effort)
        reserved_bytes.append(torch.cuda.memory_reserved())
        torch.cuda.empty_cache()
        assert reserved_bytes[-1] == torch.cuda.memory_reserved()
    assert reserved_bytes[0] == reserved_bytes[1]


def test_facts_of_the_machine(tmp_path: Path) -> None:
    facts = examine_machine(make_config(tmp_path), device_for("cuda"))
    assert facts.device_type == "cuda"
    assert facts.device_name == torch.cuda.get_device_name()
    assert facts.is_pinned
    assert facts.gpudirect_problem != "there is no GPU"

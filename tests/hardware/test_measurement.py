"""Measuring a whole profile: complete, within its bounds, and without side effects on the run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import HardwareProfile
from hf_lohan.device import CpuDevice, available_host_memory_bytes
from hf_lohan.hardware import AttentionShape, MatrixShape, MeasuringEffort, measure_hardware
from hf_lohan.hardware.machine import cpu_name
from hf_lohan.hardware.measurement import with_present_room

SHAPES = [MatrixShape(64, 32, 16), MatrixShape(64, 16, 16, count=2, num_matrices=2)]
ATTENTION = AttentionShape(num_heads=4, num_tokens=300, key_dim=16, value_dim=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_everything_is_measured(
    config: OffloadConfig, tiny_effort: MeasuringEffort, tmp_path: Path, dtype: torch.dtype
) -> None:
    measured = measure_hardware(
        config, CpuDevice(), matrix_shapes=SHAPES, dtype=dtype, attention=ATTENTION, effort=tiny_effort
    )
    rates = {name: value for name, value in flat(measured.to_mapping()).items() if name.endswith("_per_s")}
    assert len(rates) == 3 + 3 + 2 * 2 + 3 + 2
    assert min(rates.values()) > 0
    assert measured.device.shares_cpu
    assert measured.device.name == cpu_name()
    assert [ssd.path for ssd in measured.ssd] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert measured.ssd[1].capacity_bytes == 1 << 30
    assert 0 < measured.cpu.memory_bytes <= 1 << 50
    assert HardwareProfile.from_mapping(measured.to_mapping()) == measured
    assert list(tmp_path.iterdir()) == []


def flat(values: object, path: str = "") -> dict[str, float]:
    match values:
        case dict():
            parts = values.items()
        case list():
            parts = enumerate(values)
        case _:
            return {path: values}  # type: ignore[dict-item]
    return {name: value for key, part in parts for name, value in flat(part, f"{path}.{key}").items()}


def test_measuring_keeps_the_runs_random_numbers_and_threads(
    config: OffloadConfig, tiny_effort: MeasuringEffort
) -> None:
    before, num_threads = torch.get_rng_state(), torch.get_num_threads()
    assert num_threads != config.cpu_threads
    with torch.no_grad():
        measure_hardware(
            config, CpuDevice(), matrix_shapes=SHAPES, dtype=torch.float32, attention=ATTENTION, effort=tiny_effort
        )
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.get_num_threads() == num_threads


def test_attention_is_measured_only_for_models_that_have_it(
    config: OffloadConfig, tiny_effort: MeasuringEffort
) -> None:
    measured = measure_hardware(config, CpuDevice(), matrix_shapes=SHAPES, dtype=torch.float32, effort=tiny_effort)
    assert measured.device.attention_flops_per_s is None
    assert measured.device.compute_s(6e9, 2e9) == 6e9 / measured.device.flops_per_s


def test_device_memory_is_returned_at_the_end(
    config: OffloadConfig, tiny_effort: MeasuringEffort, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, order = CpuDevice(), []
    monkeypatch.setattr(device, "empty", lambda num_bytes: order.append("taken") or torch.empty(num_bytes).byte())
    monkeypatch.setattr(device, "give_back_unused", lambda: order.append("given back"))
    measure_hardware(config, device, matrix_shapes=SHAPES, dtype=torch.float32, effort=tiny_effort)
    assert order[-1] == "given back" and order.count("given back") == 1


def test_threads_are_restored_after_an_error(config: OffloadConfig, tiny_effort: MeasuringEffort) -> None:
    num_threads = torch.get_num_threads()
    with pytest.raises(ValueError, match="give at least one"):
        measure_hardware(config, CpuDevice(), matrix_shapes=[], dtype=torch.float32, effort=tiny_effort)
    assert torch.get_num_threads() == num_threads


def test_measuring_keeps_within_the_runs_budgets(config: OffloadConfig) -> None:
    small = replace(config, cpu_memory=3 << 20, gpu_memory=2 << 20)
    effort = MeasuringEffort().within(small)
    assert effort.io_buffer_bytes <= small.cpu_memory
    assert 2 * effort.copy_bytes <= small.cpu_memory
    assert 3 * 16 * effort.update_numel <= small.cpu_memory
    assert effort.product_bytes <= small.gpu_memory
    assert 3 * effort.activation_bytes <= small.gpu_memory
    assert MeasuringEffort().within(replace(config, cpu_memory=1 << 40, gpu_memory=1 << 40)) == MeasuringEffort()


def test_free_memory_and_space_are_updated(config: OffloadConfig, profile: HardwareProfile, tmp_path: Path) -> None:
    class Device(CpuDevice):
        def total_memory_bytes(self) -> int:
            return 12345

    now = with_present_room(profile, config, Device())
    assert now.device == replace(profile.device, memory_bytes=12345)
    assert now.cpu.memory_bytes == pytest.approx(available_host_memory_bytes(), rel=0.5)
    assert [ssd.path for ssd in now.ssd] == [str(tmp_path / "a"), str(tmp_path / "b")]
    assert now.ssd[1].capacity_bytes == 1 << 30
    assert now.ssd_read_bytes_per_s == profile.ssd_read_bytes_per_s

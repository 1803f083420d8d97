"""Small efforts, configs and profiles for measurements."""

from __future__ import annotations

from pathlib import Path

import pytest
from planned_models import TINY_EFFORT

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import CpuProfile, DeviceProfile, HardwareProfile, SsdProfile
from hf_lohan.hardware import MeasuringEffort


@pytest.fixture
def tiny_effort() -> MeasuringEffort:
    """An effort of milliseconds and at most 1 MiB of each kind."""
    return TINY_EFFORT


@pytest.fixture
def config(tmp_path: Path) -> OffloadConfig:
    """A resolved config with two directories that do not exist."""
    ssd = [str(tmp_path / "a"), {"path": str(tmp_path / "b"), "capacity": 1 << 30}]
    return OffloadConfig.load({"ssd": ssd, "cpu_threads": 1, "_io_threads": 2}).resolve(
        host_memory_bytes=1 << 28, device_memory_bytes=1 << 28, num_cpus=2, default_ssd_path="unused"
    )


@pytest.fixture
def profile() -> HardwareProfile:
    """A profile with two drives."""
    return HardwareProfile(
        device=DeviceProfile(flops_per_s=1.5e14, memory_bytes=24 << 30, memory_bytes_per_s=9e11, name="some GPU"),
        h2d_bytes_per_s=2.1e10,
        d2h_bytes_per_s=2.2e10,
        duplex_bytes_per_s=3.5e10,
        ssd=tuple(
            SsdProfile(path=path, read_bytes_per_s=7e9, write_bytes_per_s=4e9, capacity_bytes=1 << 40)
            for path in ("/mnt/a", "/mnt/b")
        ),
        ssd_together_read_bytes_per_s=1.3e10,
        ssd_together_write_bytes_per_s=8e9,
        ssd_mixed_bytes_per_s=9e9,
        cpu=CpuProfile(memory_bytes=256 << 30, optimizer_params_per_s=2e9, checksum_bytes_per_s=1e11),
    )

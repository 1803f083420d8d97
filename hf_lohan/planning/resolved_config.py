"""A configuration as this machine resolves it."""

from __future__ import annotations

from pathlib import Path

from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device, available_host_memory_bytes
from hf_lohan.threads import usable_cpus


def resolved_here(config: OffloadConfig, device: Device, default_ssd_path: str | Path) -> OffloadConfig:
    """Every `auto` filled in for this process and `device`. Raises ConfigError for budgets that cannot be."""
    return config.resolve(
        host_memory_bytes=available_host_memory_bytes(),
        device_memory_bytes=device.total_memory_bytes(),
        num_cpus=usable_cpus(),
        default_ssd_path=str(default_ssd_path),
    )

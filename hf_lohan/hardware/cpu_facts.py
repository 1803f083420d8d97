"""The CPU's name and what units it has, as the kernel tells."""

from __future__ import annotations

import platform
from functools import cache
from pathlib import Path

from hf_lohan.device import Device

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's names for bfloat16 units: Intel's, Intel's and AMD's, and Arm's."""


def cpu_name() -> str:
    """Such as "AMD Ryzen 9 7950X 16-Core Processor"; the architecture where the kernel does not tell."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def bf16_units() -> tuple[str, ...]:
    """Those of `BF16_FLAGS` that this CPU has."""
    info = _cpu_info()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(flag for flag in BF16_FLAGS if flag in flags)


def device_name(device: Device) -> str:
    """The device's own name, or the CPU's."""
    return cpu_name() if device.torch_device.type == "cpu" else str(device.describe()["name"])


@cache
def _cpu_info() -> dict[str, str]:
    """The first CPU's lines."""
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}

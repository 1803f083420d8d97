"""The machine as a run finds it: device, threads, memory, and what stands between them and the hardware."""

from __future__ import annotations

import importlib.util
import os
import platform
from dataclasses import dataclass

import psutil

from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device, available_host_memory_bytes
from hf_lohan.hardware.container_limits import container_limits
from hf_lohan.hardware.cpu_facts import bf16_units, cpu_name, device_name
from hf_lohan.threads import usable_cpus

_PINNED_TRIAL_BYTES = 16 << 20
_NVIDIA_FS = "/proc/driver/nvidia-fs/version"


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """What the verdicts on everything but the drives go by."""

    device_type: str
    """"cpu" or "cuda"."""
    device_name: str
    device_memory_bytes: int
    """Free now."""
    is_pinned: bool
    """Host memory for copies can be pinned; False on a CPU, which needs none."""
    gpudirect_problem: str
    """Why drives cannot reach the device's memory on their own; "" if they can."""
    cpu_name: str
    bf16_units: tuple[str, ...]
    usable_cpus: int
    cpu_quota: float | None
    cpu_threads: int
    """The config's, resolved."""
    omp_num_threads: str | None
    """The environment variable."""
    load: float
    """Threads that wanted a CPU, averaged over the last minute."""
    is_wsl: bool
    memory_bytes: int
    available_memory_bytes: int
    memory_limit_bytes: int | None
    """Of the container."""
    cpu_memory: int
    """The config's budget, resolved."""


def examine_machine(config: OffloadConfig, device: Device) -> MachineFacts:
    """The facts, with a resolved config. Takes no time to speak of."""
    assert isinstance(config.cpu_threads, int) and isinstance(config.cpu_memory, int)
    limits = container_limits()
    return MachineFacts(
        device_type=device.torch_device.type,
        device_name=device_name(device),
        device_memory_bytes=device.total_memory_bytes(),
        is_pinned=_is_pinned(device),
        gpudirect_problem=gpudirect_problem(device),
        cpu_name=cpu_name(),
        bf16_units=bf16_units(),
        usable_cpus=usable_cpus(),
        cpu_quota=limits.num_cpus,
        cpu_threads=config.cpu_threads,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        load=os.getloadavg()[0],
        is_wsl="microsoft" in platform.uname().release.lower(),
        memory_bytes=int(psutil.virtual_memory().total),
        available_memory_bytes=available_host_memory_bytes(),
        memory_limit_bytes=limits.memory_bytes,
        cpu_memory=config.cpu_memory,
    )


def gpudirect_problem(device: Device) -> str:
    """Why GPUDirect Storage cannot be used; "" if it can."""
    if device.torch_device.type == "cpu":
        return "there is no GPU"
    if importlib.util.find_spec("kvikio") is None:
        return "kvikio is not installed"
    if not os.path.exists(_NVIDIA_FS):
        return "the kernel module nvidia-fs is not loaded"
    return ""


def _is_pinned(device: Device) -> bool:
    device.host_empty(_PINNED_TRIAL_BYTES)
    return bool(device.describe().get("pinned_host_memory", False))

"""Facts about the machine: device, threads, memory and limits of a container."""

from __future__ import annotations

import os
import platform
import threading
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import psutil

from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import HardwareProfile
from hf_lohan.device import (
    Device,
    GpuLink,
    LinkKind,
    available_host_memory_bytes,
    control_groups,
    host_memory_limit_bytes,
    links_between_gpus,
)
from hf_lohan.hardware.direct_io import why_no_direct_io
from hf_lohan.hardware.paths import text_of
from hf_lohan.threads import usable_cpus

BF16_FLAGS = ("amx_bf16", "avx512_bf16", "bf16")
"""Linux's names for bfloat16 units of Intel, of Intel and AMD, and of Arm."""
_SAMPLE_INTERVAL_S = 0.05
_PINNED_TRIAL_BYTES = 16 << 20


def cpu_quota() -> float | None:
    """Return this process's CPU seconds per second, or None without a limit. This is the lowest limit of its control
    groups and their parents. It may be less than the number of visible CPUs."""
    former = "cpu.cfs_quota_us", "cpu.cfs_period_us"
    quotas = [_quota(folder, *(former if is_former else ("cpu.max",))) for folder, is_former in control_groups("cpu")]
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(folder: Path, *names: str) -> float | None:
    """Return CPU seconds per second, from files with the CPU time per period and the period."""
    words = [word for name in names for word in text_of(folder / name).split()]
    is_limit = len(words) == 2 and words[0].isdigit() and int(words[0]) > 0
    return int(words[0]) / int(words[1]) if is_limit else None


def cpu_name() -> str:
    """Return the CPU's name, such as "AMD Ryzen 9 7950X 16-Core Processor", or the architecture if it has no name."""
    return _cpu_info().get("model name") or platform.processor() or platform.machine()


def bf16_units() -> tuple[str, ...]:
    info = _cpu_info()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return tuple(flag for flag in BF16_FLAGS if flag in flags)


def device_name(device: Device) -> str:
    """Return the device's name, or the CPU's name for a CPU device."""
    return cpu_name() if device.torch_device.type == "cpu" else str(device.describe()["name"])


@cache
def _cpu_info() -> dict[str, str]:
    first = text_of("/proc/cpuinfo").split("\n\n")[0]
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


@dataclass(frozen=True, kw_only=True, slots=True)
class MachineFacts:
    """The facts, except those about drives, on which the verdicts of `lohan doctor` depend."""

    device_type: str
    """"cpu" or "cuda"."""
    device_name: str
    device_memory_bytes: int
    """Free memory of the device."""
    is_pinned: bool
    """Whether host memory for copies can be pinned. False on a CPU device, which makes no copies."""
    gpu_links: tuple[GpuLink, ...] = ()
    """The links of all pairs of GPUs."""
    gpudirect_problem: str
    """Why GPUDirect Storage cannot be used; "" if it can."""
    gpudirect_rates: str = ""
    """For each SSD path, the mechanism of GPUDirect Storage, its measured rates, and the rates through host memory."""
    bf16_units: tuple[str, ...]
    usable_cpus: int
    cpu_quota: float | None
    cpu_threads: int
    omp_num_threads: str | None
    load: float
    """Number of runnable threads, averaged over the last minute."""
    is_wsl: bool
    memory_bytes: int
    available_memory_bytes: int
    memory_limit_bytes: int | None
    cpu_memory: int


def examine_machine(config: ResolvedConfig, device: Device) -> MachineFacts:
    """Collect the facts in a short time. ``config`` must be resolved."""
    problem, rates = why_no_direct_io(device, [ssd.path for ssd in config.ssd])
    return MachineFacts(
        device_type=device.torch_device.type,
        device_name=device_name(device),
        device_memory_bytes=device.total_memory_bytes(),
        is_pinned=_is_pinned(device),
        gpu_links=tuple(links_between_gpus()),
        gpudirect_problem=problem,
        gpudirect_rates=rates,
        bf16_units=bf16_units(),
        usable_cpus=usable_cpus(),
        cpu_quota=cpu_quota(),
        cpu_threads=config.cpu_threads,
        omp_num_threads=os.environ.get("OMP_NUM_THREADS"),
        load=os.getloadavg()[0],
        is_wsl="microsoft" in platform.uname().release.lower(),
        memory_bytes=int(psutil.virtual_memory().total),
        available_memory_bytes=available_host_memory_bytes(),
        memory_limit_bytes=host_memory_limit_bytes(),
        cpu_memory=config.cpu_memory,
    )


def with_gpu_link(hardware: HardwareProfile, num_gpus: int | None = None) -> HardwareProfile:
    """Return the profile with the link between the first ``num_gpus`` GPUs of this machine, by default between all. If
    links are of several kinds, the profile gets the slowest kind. A link that the profile has is kept. The link stays
    unknown if the machine has fewer GPUs, or if the driver does not answer for every pair."""
    if hardware.gpu_link or hardware.device.shares_cpu:
        return hardware
    links = [link for link in links_between_gpus() if num_gpus is None or link.second < num_gpus]
    kinds = {link.kind for link in links}
    is_known = bool(links) and LinkKind.UNKNOWN not in kinds
    if not is_known or (num_gpus is not None and len(links) < num_gpus * (num_gpus - 1) // 2):
        return hardware
    slowest = next(kind for kind in (LinkKind.NONE, LinkKind.PCIE, LinkKind.NVLINK) if kind in kinds)
    return replace(hardware, gpu_link=_GPU_LINKS[slowest])


_GPU_LINKS = {LinkKind.NVLINK: "nvlink", LinkKind.PCIE: "pcie", LinkKind.NONE: "none"}


def _is_pinned(device: Device) -> bool:
    device.host_empty(_PINNED_TRIAL_BYTES)
    return bool(device.describe().get("pinned_host_memory", False))


def anonymous_memory_bytes() -> int:
    """Return RssAnon of this process, which the budgets limit. RSS would also count page cache. If the kernel does not
    report RssAnon, return the resident set without shared pages."""
    for line in text_of("/proc/self/status").splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    info = psutil.Process().memory_info()
    return int(info.rss - getattr(info, "shared", 0))


class AnonymousMemoryPeak:
    """Samples anonymous memory on a thread from `start` to `stop`, and keeps the highest value."""

    def __init__(self) -> None:
        self.peak_bytes = 0
        self._recent_peak_bytes = 0
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        if self._thread is None:
            self._stopped.clear()
            self._thread = threading.Thread(target=self._run, name="lohan-memory-peak", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        if self._thread is not None:
            self._stopped.set()
            self._thread.join()
            self._thread = None
            self.sample()

    def _run(self) -> None:
        while not self._stopped.wait(_SAMPLE_INTERVAL_S):
            self.sample()

    def sample(self) -> None:
        now_bytes = anonymous_memory_bytes()
        self.peak_bytes = max(self.peak_bytes, now_bytes)
        self._recent_peak_bytes = max(self._recent_peak_bytes, now_bytes)

    def take_recent_peak(self) -> int:
        """Return the highest value since the last call, including the current value."""
        self.sample()
        recent_peak_bytes, self._recent_peak_bytes = self._recent_peak_bytes, 0
        return recent_peak_bytes

"""Reads and writes a run's files through host memory, or without host memory with the annex `gpu_direct`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_lohan.annexes import find_annex
from hf_lohan.config import ResolvedConfig
from hf_lohan.device import Device, DeviceHasher
from hf_lohan.files import FileBackend


@dataclass(frozen=True)
class DirectIo:
    """Reads and writes files in host memory. The annex has a subclass for device memory."""

    backend: FileBackend = field(default_factory=FileBackend)
    hasher: DeviceHasher | None = None
    """None if the files are read and written in host memory alone."""

    def register(self, memory: Sequence[Tensor]) -> None:
        """Pin memory to which many reads go, such as slots."""

    def close(self) -> None:
        """Release all resources. Called after all files are closed."""


def open_direct_io(config: ResolvedConfig, device: Device) -> DirectIo:
    """Open direct I/O if the settings ask for it. Raises ConfigError if `gpu_direct` is true and cannot be used."""
    annex = find_annex("gpu_direct")
    opened: DirectIo | None = annex.open_direct_io(config, device) if annex is not None else None
    return opened or DirectIo()


def uses_direct_io(config: ResolvedConfig, device: Device) -> bool:
    """Return whether a run moves device memory to and from its files, as `open_direct_io` decides. This may run a
    trial."""
    annex = find_annex("gpu_direct")
    return annex is not None and bool(annex.uses_direct_io(config, device))


def why_no_direct_io(device: Device, folders: Sequence[str]) -> tuple[str, str]:
    """Return the reason why device memory cannot go straight to the drives (or ""), and the rates of the trial in each
    of these folders."""
    annex = find_annex("gpu_direct")
    if annex is None:
        return "the annex gpu_direct is not installed", ""
    problem, trials = annex.why_not(device, folders)
    return problem, "; ".join(f"{trial.folder}: {trial}" for trial in trials if not problem)

"""Host memory allocated at its exact size.

Torch's pinned allocator rounds every size up to a power of two, which may be 1.8 times a pool's size. So host buffers
are mappings that `CudaDevice` pins, either anonymous or of a file in RAM that several ranks share.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor


class _Mapping(mmap.mmap):
    """A mapping that calls a function before it is unmapped."""

    before_unmap: Callable[[], object] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.before_unmap()


def mapped_empty(num_bytes: int, *, before_unmap: Callable[[], object] | None = None) -> Tensor:
    """Allocate a page-aligned uint8 tensor [num_bytes] in an anonymous mapping. A page takes RAM from its first use on.

    When the last reference to the memory is gone, `before_unmap` is called, and then the memory is unmapped.
    """
    if num_bytes <= 0:
        raise ValueError(f"cannot allocate {num_bytes} bytes of host memory; allocate at least 1")
    # The mapping is private, because the kernel does not count shared mappings (mmap's default) as anonymous memory.
    return _tensor_over(_Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), before_unmap)


def mapped_file(fd: int, num_bytes: int, *, before_unmap: Callable[[], object] | None = None) -> Tensor:
    """Map a file in RAM that other processes map too. See `mapped_empty`. The caller may close ``fd`` afterwards."""
    return _tensor_over(_Mapping(fd, num_bytes, flags=mmap.MAP_SHARED), before_unmap)


def _tensor_over(mapping: _Mapping, before_unmap: Callable[[], object] | None) -> Tensor:
    if before_unmap is not None:
        mapping.before_unmap = before_unmap
    if hasattr(mmap, "MADV_DONTFORK"):
        # A forked data loader must not copy the pools, and direct I/O must not use pages that a child shares.
        mapping.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Large pages need fewer page table lookups, and direct I/O pins them faster.
        with suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def available_host_memory_bytes() -> int:
    """Return the bytes of RAM that this process may still allocate on the machine, within the limits of its control
    groups (of a container or a cluster's job)."""
    available = int(psutil.virtual_memory().available)
    for folder, limit, used_name, cached in _limits():
        if (used := _read_int(folder / used_name)) is not None:
            available = min(available, max(0, limit - used + _cached_bytes(folder / "memory.stat", cached)))
    return available


def host_memory_limit_bytes() -> int | None:
    """Return the lowest limit of this process's control groups and their parents; None if there is none."""
    return min((limit for _, limit, _, _ in _limits() if limit < _NO_LIMIT_BYTES), default=None)


_NO_LIMIT_BYTES = 1 << 60
"""Version 1 of control groups reports a larger number if there is no limit."""
_CGROUPS = Path("/sys/fs/cgroup")
_OWN_CGROUPS = Path("/proc/self/cgroup")
_Names = tuple[tuple[str, ...], str, tuple[str, ...]]
_NAMES: _Names = ("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")
_FORMER_NAMES: _Names = (
    ("memory.limit_in_bytes",),
    "memory.usage_in_bytes",
    ("total_inactive_file", "total_active_file"),
)
"""Names of the files with limits and use, and names of the entries in `memory.stat` for cached files, which the kernel
can free. `_NAMES` is for version 2 of control groups, and `_FORMER_NAMES` for version 1."""


def control_groups(controller: str) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of this process's control groups with a controller, such as "memory", and of these groups'
    parents. With each, yield whether the group is of version 1. A container may show its own group as the root."""
    lines = ["0::/"]
    with suppress(OSError):
        lines = _OWN_CGROUPS.read_text(errors="replace").splitlines() or lines
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = _CGROUPS / controller if controllers else _CGROUPS
        own = root / path.lstrip("/")
        yield from ((folder, bool(controllers)) for folder in (own, *own.parents) if folder.is_relative_to(root))


def _limits() -> Iterator[tuple[Path, int, str, tuple[str, ...]]]:
    """Yield each memory limit of a control group of this process, with the group's folder and the names of the files
    that have its used and its cached bytes."""
    for folder, is_former in control_groups("memory"):
        limits, used, cached = _FORMER_NAMES if is_former else _NAMES
        numbers = (_read_int(folder / name) for name in limits)
        yield from ((folder, limit, used, cached) for limit in numbers if limit is not None)


def _cached_bytes(file: Path, names: Sequence[str]) -> int:
    with suppress(OSError, ValueError):
        numbers = dict(line.split(maxsplit=1) for line in file.read_text().splitlines())
        return sum(int(numbers.get(name, 0)) for name in names)
    return 0


def _read_int(file: Path) -> int | None:
    try:
        return int(file.read_text().strip())  # version 2 has "max" without a limit, which is a ValueError
    except (OSError, ValueError):
        return None

"""Host memory taken at its exact size.

Torch's own pinned allocator rounds every block up to a power of two (up to 1.8 times too much for a pool), so host
buffers are mappings instead, anonymous or of a file in RAM that several ranks share; a device that profits from pinning
registers them (`CudaDevice`).
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from torch import Tensor


class _Mapping(mmap.mmap):
    """A mapping that tells somebody before it is unmapped."""

    before_unmap: Callable[[], object] = staticmethod(lambda: None)

    def __del__(self) -> None:
        self.before_unmap()


def mapped_empty(num_bytes: int, *, before_unmap: Callable[[], object] | None = None) -> Tensor:
    """A page-aligned uint8 tensor [num_bytes] over an anonymous mapping: no page is resident before it is touched.

    `before_unmap` is called when nobody refers to the memory any more, while it is still there.
    """
    if num_bytes <= 0:
        raise ValueError(f"host memory of {num_bytes} bytes was asked for; ask for at least 1 byte")
    # Private: shared mappings, mmap's default, are not counted as the anonymous memory that they are.
    return _tensor_over(_Mapping(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), before_unmap)


def mapped_file(fd: int, num_bytes: int, *, before_unmap: Callable[[], object] | None = None) -> Tensor:
    """As `mapped_empty`, over a file in RAM that other processes map, too. `fd` may be closed after this."""
    return _tensor_over(_Mapping(fd, num_bytes, flags=mmap.MAP_SHARED), before_unmap)


def _tensor_over(mapping: _Mapping, before_unmap: Callable[[], object] | None) -> Tensor:
    if before_unmap is not None:
        mapping.before_unmap = before_unmap
    if hasattr(mmap, "MADV_DONTFORK"):
        # A forked data loader would get copies of the pools, and private pages must not be shared under direct I/O.
        mapping.madvise(mmap.MADV_DONTFORK)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        # Everything here is streamed through: fewer, larger pages are found faster, and pinned faster for direct I/O.
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(mapping, dtype=torch.uint8)


def available_host_memory_bytes() -> int:
    """RAM this process may still take: the machine's available memory, or less where a container limits it."""
    available = int(psutil.virtual_memory().available)
    for limit_file, used_file in _CGROUP_FILES:
        limit, used = _read_int(limit_file), _read_int(used_file)
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


_CGROUP_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)


def _read_int(path: str) -> int | None:
    try:
        return int(Path(path).read_text().strip())  # cgroup v2 says "max" where there is no limit: not an int
    except (OSError, ValueError):
        return None

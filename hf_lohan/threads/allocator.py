"""The C library's allocator: what a step frees, the next one takes again, without a page fault for each 4 KiB."""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc allows no larger one. Larger tensors are mapped and unmapped each time."""
_KEPT_BYTES = 256 << 20
"""Freed memory at the heap's end beyond this goes back to the system."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def keep_freed_memory() -> bool:
    """Have glibc keep some of what is freed: gradients and activations come and go on a CPU, and clearing fresh pages
    for them takes up to a twentieth of a step. Says whether it does; not where the user chose otherwise, or another C
    library or allocator is in charge."""
    if sys.platform != "linux" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept)

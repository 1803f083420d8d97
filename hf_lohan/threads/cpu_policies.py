"""Policies for a model that computes on the CPU, on the same cores as our threads. With a GPU none of them matters.

Each was measured on two cores: torch's team of threads as `accelerate launch` left it (OMP_NUM_THREADS=1), a second
team beside the model's, and glibc giving back what the next step takes again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator

import torch

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""glibc allows no larger one. Larger tensors are mapped and unmapped each time."""
_KEPT_BYTES = 256 << 20
"""Freed memory at the heap's end beyond this goes back to the system."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def usable_cpus() -> int:
    """Number of CPUs this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_compute_threads(num_threads: int) -> None:
    """Make torch's CPU kernels use `num_threads`, saying so where that undoes a launcher's setting."""
    if torch.get_num_threads() == num_threads:
        return
    logger.info(
        "torch runs its CPU kernels on %d threads now, not %d (OMP_NUM_THREADS=%s): the optimizer needs the cores",
        num_threads,
        torch.get_num_threads(),
        os.environ.get("OMP_NUM_THREADS", "unset"),
    )
    torch.set_num_threads(num_threads)


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


_here = threading.local()
_starting = threading.Lock()


@contextlib.contextmanager
def number_of_threads_kept() -> Iterator[None]:
    """What a thread sets for itself also holds for threads that come after it: take that back. One at a time, or what
    others set meanwhile would be taken for what was there, and a sum come out in another order."""
    with _starting:
        of_others = torch.get_num_threads()
        try:
            yield
        finally:
            torch.set_num_threads(of_others)


def start_thread(target: Callable[[], None], name: str, *, beside_kernels: bool) -> threading.Thread:
    """Start a daemon thread. ``beside_kernels``: a model's kernels run on the same cores. Then this thread runs its own
    ones alone, until it calls `use_all_cores`: with a second team there are more threads than cores, and OpenMP lets
    those that compute sleep after each kernel instead of looking out for the next."""
    has_begun, may_go_on = threading.Event(), threading.Event()

    def run() -> None:
        if beside_kernels:
            run_kernels_alone()
            _here.runs_alone = True
        has_begun.set()
        may_go_on.wait()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        with number_of_threads_kept():
            thread.start()
            has_begun.wait()
    finally:
        may_go_on.set()
    return thread


def use_all_cores() -> None:
    """From here on the calling thread's kernels run on as many threads as those of a thread that begins now: for large
    ones, and for those whose result depends on how many there are, as that of a sum does."""
    if getattr(_here, "runs_alone", False):
        _here.runs_alone = False
        of_others = list[int]()
        thread = threading.Thread(target=lambda: of_others.append(torch.get_num_threads()))
        with _starting:  # else it may see what one that begins has set for itself
            thread.start()
            thread.join()
        torch.set_num_threads(of_others[0])


def run_kernels_alone() -> None:
    """The calling thread's kernels run on it alone."""
    torch.get_num_threads()  # before its first use a thread forgets what it was told
    torch.set_num_threads(1)

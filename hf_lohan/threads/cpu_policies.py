"""Policies for a model that computes on the CPU, and so shares cores with our threads. With a GPU they have no effect.

Each avoids a slowdown that was measured on two cores: `accelerate launch` sets OMP_NUM_THREADS=1, a second OpenMP team
competes with the model's, and glibc frees memory that the next step allocates again.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeVar

import torch

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_LARGEST_MMAP_THRESHOLD_BYTES = 32 << 20
"""Limit of glibc's heap. Larger tensors are mapped and unmapped each time."""
_KEPT_BYTES = 256 << 20
"""Freed bytes that glibc keeps at the end of the heap."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES", "LD_PRELOAD")


def usable_cpus() -> int:
    """Return the number of CPUs on which this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def set_compute_threads(num_threads: int) -> None:
    """Set the number of threads of torch's CPU kernels, and log a change."""
    if torch.get_num_threads() == num_threads:
        return
    logger.info(
        "torch now runs CPU kernels on %d threads instead of %d (OMP_NUM_THREADS=%s), because the optimizer needs the "
        "cores",
        num_threads,
        torch.get_num_threads(),
        os.environ.get("OMP_NUM_THREADS", "unset"),
    )
    torch.set_num_threads(num_threads)


def keep_freed_memory() -> bool:
    """Make glibc keep some freed memory. Returns whether it does. Clearing new pages for gradients and activations
    takes up to 5% of a step on a CPU. The user's settings and other C libraries or allocators are not changed."""
    if sys.platform != "linux" or any(name in os.environ for name in _SETTINGS):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
    return bool(kept)


def return_freed_memory() -> None:
    """Have glibc return all freed memory once. Call this after work such as loading. The freed memory is between memory
    in use, in gaps that are too small for later allocations."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


_here = threading.local()
_starting = threading.Lock()


@contextlib.contextmanager
def number_of_threads_kept() -> Iterator[None]:
    """Restore the number of kernel threads for later threads after the context, because a thread that sets its own
    number also sets the number of later threads. Without the lock, concurrent callers could save each other's temporary
    number, which would change the order of sums. The calling thread may have another number."""
    with _starting:
        num_threads = _in_new_thread(torch.get_num_threads)
        try:
            yield
        finally:
            _in_new_thread(partial(torch.set_num_threads, num_threads))


def _in_new_thread(work: Callable[[], _Result]) -> _Result:
    results = list[_Result]()
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def start_thread(target: Callable[[], None], name: str, *, beside_kernels: bool) -> threading.Thread:
    """Start a daemon thread. ``beside_kernels``: a model's kernels run on the same cores, so this thread runs its
    kernels without a team until it calls `use_all_cores`. With two teams there are more threads than cores, and OpenMP
    threads sleep after each kernel instead of spinning."""
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
    """Let the calling thread's kernels use torch's default number of threads again. This is for large kernels, and for
    kernels whose result depends on the number of threads, such as sums."""
    if getattr(_here, "runs_alone", False):
        _here.runs_alone = False
        with _starting:  # avoids reading a temporary number
            torch.set_num_threads(_in_new_thread(torch.get_num_threads))


def run_kernels_alone() -> None:
    """Make the calling thread's kernels run only on this thread."""
    torch.get_num_threads()  # initializes the thread, which would later overwrite the number
    torch.set_num_threads(1)

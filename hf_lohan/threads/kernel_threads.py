"""CPU threads: as many as the affinity mask allows, whatever a launcher exported.

`accelerate launch` and `torchrun` set OMP_NUM_THREADS=1, which would run the CPU optimizer on a single core.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

import torch

from hf_lohan.threads.task_threads import TaskThreads

logger = logging.getLogger(__name__)

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")


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


_here = threading.local()


def start_thread(target: Callable[[], None], name: str, *, beside_kernels: bool) -> threading.Thread:
    """Start a daemon thread. ``beside_kernels``: a model's kernels run on the same cores. Then this thread runs its own
    ones alone, until it calls `use_all_cores`: with a second team there are more threads than cores, and OpenMP lets
    those that compute sleep after each kernel instead of looking out for the next."""
    of_others = torch.get_num_threads()
    has_begun, may_go_on = threading.Event(), threading.Event()

    def run() -> None:
        if beside_kernels:
            _run_kernels_alone()
            _here.runs_alone = True
        has_begun.set()
        may_go_on.wait()
        target()

    thread = threading.Thread(target=run, name=name, daemon=True)
    try:
        thread.start()
        has_begun.wait()
    finally:  # what a thread sets for itself also holds for threads that come after it: take that back
        torch.set_num_threads(of_others)
        may_go_on.set()
    return thread


def use_all_cores() -> None:
    """From here on the calling thread's kernels run on as many threads as those of a thread that begins now: for large
    ones, and for those whose result depends on how many there are, as that of a sum does."""
    if getattr(_here, "runs_alone", False):
        _here.runs_alone = False
        of_others = list[int]()
        thread = threading.Thread(target=lambda: of_others.append(torch.get_num_threads()))
        thread.start()
        thread.join()
        torch.set_num_threads(of_others[0])


class KernelThreads:
    """Threads that each run torch's CPU kernels alone: what is more than one kernel can be done part by part, without
    having all threads meet after each. They end with this object, if it is not closed before."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        of_others = torch.get_num_threads()
        has_begun = threading.Semaphore(0)

        def begin() -> None:
            _run_kernels_alone()
            has_begun.release()

        try:
            self._threads = TaskThreads(num_threads, "lohan-kernels", begin=begin)
            for _ in range(num_threads):
                has_begun.acquire()
        finally:  # as in `start_thread`
            torch.set_num_threads(of_others)

    def map(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """What `work` makes of each part; where it fails, the first error, once all are done."""
        results: dict[int, _Result] = {}
        errors: dict[int, BaseException] = {}
        done: SimpleQueue[None] = SimpleQueue()

        def run(index: int, part: _Part) -> None:
            try:
                results[index] = work(part)
            except BaseException as error:
                errors[index] = error
            done.put(None)

        for index, part in enumerate(parts):
            self._threads.put(partial(run, index, part))
        for _ in parts:
            done.get()
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(parts))]

    def close(self) -> None:
        """Return when what runs has ended, and the threads too: the interpreter must not go away under a kernel."""
        self._threads.close()


def _run_kernels_alone() -> None:
    torch.get_num_threads()  # before its first use a thread forgets what it was told
    torch.set_num_threads(1)

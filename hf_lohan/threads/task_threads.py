"""Threads for tasks: many short ones in the order they come, or parts of one that each run torch's kernels alone."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hf_lohan.threads.cpu_policies import number_of_threads_kept, run_kernels_alone
from hf_lohan.threads.forks import Owner

_Part = TypeVar("_Part")
_Result = TypeVar("_Result")
_Task = Callable[[], object]
_Tasks = queue.SimpleQueue[_Task | None]


class TaskThreads:
    """An executor without futures, of which making and settling one costs more than the Python around a megabyte's
    transfer. Runs tasks in the order they come. They must not raise; what becomes of them is theirs to tell. The
    threads end with this object at the latest. A forked child has none of them, and does nothing."""

    def __init__(self, num_threads: int, name: str, *, begin: _Task = lambda: None) -> None:
        """Each thread calls ``begin`` before its first task."""
        self._owner = Owner()
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._tasks, begin), name=f"{name}_{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, task: _Task) -> None:
        """Run ``task`` when a thread is free."""
        self._tasks.put(task)

    def close(self) -> None:
        """Run what was put before, and end the threads. A second time does nothing."""
        if not self._owner.is_here:
            return
        self._end()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _end(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def __del__(self) -> None:
        if self._owner.is_here:
            self._end()


def _run(tasks: _Tasks, begin: _Task) -> None:
    """A function, so that a thread does not keep alive the object that ends it."""
    begin()
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # what it holds need not wait for the next one to come


class KernelThreads:
    """Threads that each run torch's CPU kernels alone: what is more than one kernel can be done part by part, without
    having all threads meet after each. They end with this object, if it is not closed before."""

    def __init__(self, num_threads: int) -> None:
        self.num_threads = num_threads
        has_begun = threading.Semaphore(0)

        def begin() -> None:
            run_kernels_alone()
            has_begun.release()

        with number_of_threads_kept():
            self._threads = TaskThreads(num_threads, "lohan-kernels", begin=begin)
            for _ in range(num_threads):
                has_begun.acquire()

    def map(self, work: Callable[[_Part], _Result], parts: Sequence[_Part]) -> list[_Result]:
        """What `work` makes of each part; where it fails, the first error, once all are done."""
        results: dict[int, _Result] = {}
        errors: dict[int, BaseException] = {}
        done: queue.SimpleQueue[None] = queue.SimpleQueue()

        def run(index: int, part: _Part) -> None:
            try:
                results[index] = work(part)
            except BaseException as error:
                errors[index] = error
            done.put(None)

        for index, part in enumerate(parts):
            self._threads.submit(partial(run, index, part))
        for _ in parts:
            done.get()
        if errors:
            raise errors[min(errors)]
        return [results[index] for index in range(len(parts))]

    def close(self) -> None:
        """Return when what runs has ended, and the threads too: the interpreter must not go away under a kernel."""
        self._threads.close()

"""Threads for many short tasks, and threads that run the kernels of one task in parts."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from hf_lohan.threads.cpu_policies import number_of_threads_kept, run_kernels_alone
from hf_lohan.threads.forks import Owner

_Part = TypeVar("_Part")
_Output = TypeVar("_Output")
_Task = Callable[[], object]
_Tasks = queue.SimpleQueue[_Task | None]


class TaskThreads:
    """An executor without futures, because a future costs more time than the Python code of a transfer of 1 MB. Tasks
    start in order of submission, and must not raise. The threads end at the latest when this object is deleted. In a
    forked process `close` does nothing."""

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
        """Run all submitted tasks, and end the threads. A second call does nothing."""
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
    # This is not a method, because a bound method would keep the `TaskThreads` object alive.
    begin()
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # frees the task's memory before the next task


class KernelThreads:
    """Threads that run torch's CPU kernels independently. Each thread runs a sequence of kernels on its part, so
    threads do not wait for each other after each kernel. The threads end at the latest when this object is deleted."""

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

    def map(self, work: Callable[[_Part], _Output], parts: Sequence[_Part]) -> list[_Output]:
        """Return the results of `work` for all parts. Raises the first part's error after all are done."""
        results: dict[int, _Output] = {}
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
        """Wait for all work, and end the threads, so that the interpreter does not end during a kernel."""
        self._threads.close()

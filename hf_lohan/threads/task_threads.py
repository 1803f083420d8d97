"""Threads for many short tasks: an executor without futures, of which making and settling one costs more than the
Python around a megabyte's transfer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

Task = Callable[[], object]
_Tasks = queue.SimpleQueue[Task | None]


class TaskThreads:
    """Runs tasks in the order they come. They must not raise; what becomes of them is theirs to tell. The threads end
    with this object at the latest."""

    def __init__(self, num_threads: int, name: str, *, begin: Task = lambda: None) -> None:
        """Each thread calls ``begin`` before its first task."""
        self._tasks: _Tasks = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=_run, args=(self._tasks, begin), name=f"{name}_{index}", daemon=True)
            for index in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, task: Task) -> None:
        """Run ``task`` when a thread is free."""
        self._tasks.put(task)

    def close(self) -> None:
        """Run what was put before, and end the threads. A second time does nothing."""
        self._end()
        for thread in self._threads:
            thread.join()
        self._threads = []

    def _end(self) -> None:
        for _ in self._threads:
            self._tasks.put(None)

    def __del__(self) -> None:
        self._end()


def _run(tasks: _Tasks, begin: Task) -> None:
    """A function, so that a thread does not keep alive the object that ends it."""
    begin()
    while True:
        task = tasks.get()
        if task is None:
            return
        task()
        del task  # what it holds need not wait for the next one to come

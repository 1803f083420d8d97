"""A thread that runs commands in order until one fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import TypeVar

from hf_lohan.threads.cpu_policies import start_thread
from hf_lohan.threads.failures import FirstFailure, raised_anew
from hf_lohan.threads.forks import Owner

Command = Callable[[], object]
_Result = TypeVar("_Result")
CHECK_INTERVAL_S = 1.0
"""While waiting for a thread, check this often (in seconds) that it is still running."""


class WorkThread:
    """Runs commands one after the other. After a failure it runs no more commands, and every `barrier` raises the
    failure."""

    def __init__(self, name: str, failure: FirstFailure, *, beside_kernels: bool = False) -> None:
        """`failure` may be shared with other threads, and any failure stops this thread. `beside_kernels`: see
        `start_thread`."""
        self._failure = failure
        self._idle: Callable[[], bool] = lambda: False
        self._commands: queue.SimpleQueue[Command | threading.Event | None] = queue.SimpleQueue()
        self._name = name
        self._beside_kernels = beside_kernels
        self._thread: threading.Thread | None = None
        self._owner = Owner()

    def start(self, idle: Callable[[], bool] = lambda: False) -> None:
        """Start the thread. While no command waits, it calls `idle` until that returns False."""
        self._idle = idle
        self._thread = start_thread(self._run, self._name, beside_kernels=self._beside_kernels)

    def submit(self, command: Command) -> None:
        """Run `command` after all earlier commands."""
        self._commands.put(command)

    def barrier(self) -> None:
        """Wait until all submitted commands have run. Raises the failure, if any."""
        reached = threading.Event()
        self._refuse_if_ended()
        self._commands.put(reached)
        while not reached.wait(CHECK_INTERVAL_S):
            self._refuse_if_ended()
        if self._failure.error is not None:
            raise raised_anew(self._failure.error)

    def call(self, command: Callable[[], _Result]) -> _Result:
        """Run `command` after all earlier commands, and return its result. Raises the failure, if any."""
        results: list[_Result] = []
        self.submit(lambda: results.append(command()))
        self.barrier()
        return results[0]

    def close(self) -> None:
        """Run all submitted commands, and end the thread. Does nothing in a forked process."""
        if not self._owner.is_here:
            return
        assert self._thread is not None, "the thread was never started"
        self._commands.put(None)
        self._thread.join()

    def _refuse_if_ended(self) -> None:
        if not self._owner.is_here:
            raise RuntimeError("this is a forked child of the training process; use the model in the training process")
        if self._thread is None or not self._thread.is_alive():
            raise RuntimeError("the engine is closed; load the model again")

    def _run(self) -> None:
        while True:
            command = self._next()
            if command is None:
                return
            if isinstance(command, threading.Event):
                command.set()
            elif self._failure.error is None:
                self._try(command)
            del command  # frees the command's memory before the next command

    def _next(self) -> Command | threading.Event | None:
        while self._commands.empty() and self._failure.error is None:
            if not self._try(self._idle):
                break
        return self._commands.get()

    def _try(self, work: Callable[[], _Result]) -> _Result | None:
        try:
            return work()
        except BaseException as error:
            self._failure.record_error(error)
            return None

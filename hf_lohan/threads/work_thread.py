"""A thread that does what it is told, in order, until something fails."""

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
_LOOK_S = 1.0
"""How often who waits for the thread looks whether it is still there."""


class WorkThread:
    """Runs commands one after the other. After a failure it runs none any more, and every `barrier` raises it."""

    def __init__(self, name: str, failure: FirstFailure, *, beside_kernels: bool = False) -> None:
        """`failure`: also that of others, after which the thread is not to go on; `beside_kernels`: see
        `start_thread`."""
        self._failure = failure
        self._idle: Callable[[], bool] = lambda: False
        self._commands: queue.SimpleQueue[Command | threading.Event | None] = queue.SimpleQueue()
        self._name = name
        self._beside_kernels = beside_kernels
        self._thread: threading.Thread | None = None
        self._owner = Owner()

    def start(self, idle: Callable[[], bool] = lambda: False) -> None:
        """`idle` is called when no command waits, until it says that it has nothing left to do."""
        self._idle = idle
        self._thread = start_thread(self._run, self._name, beside_kernels=self._beside_kernels)

    def submit(self, command: Command) -> None:
        """Run `command` after those before it."""
        self._commands.put(command)

    def barrier(self) -> None:
        """Wait until all commands so far have run. Raises what failed."""
        reached = threading.Event()
        self._refuse_if_ended()
        self._commands.put(reached)
        while not reached.wait(_LOOK_S):
            self._refuse_if_ended()
        if self._failure.error is not None:
            raise raised_anew(self._failure.error)

    def call(self, command: Callable[[], _Result]) -> _Result:
        """Run `command` after those before it, and return what it returns. Raises what failed."""
        results: list[_Result] = []
        self.submit(lambda: results.append(command()))
        self.barrier()
        return results[0]

    def close(self) -> None:
        """Run what was put before, and end. In a forked child: do nothing."""
        if not self._owner.is_here:
            return
        assert self._thread is not None, "it was never started"
        self._commands.put(None)
        self._thread.join()

    def _refuse_if_ended(self) -> None:
        if not self._owner.is_here:
            raise RuntimeError("this is a forked child of the process that trains; use the model in that one")
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
            del command  # what it holds need not wait for the next one to come

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

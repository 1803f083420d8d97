"""Several micro-batches' forwards in step: each in a thread of its own, of which one runs at a time."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

from hf_lohan.micro_batches.sequence_numbers import SequenceNumbers

Position: TypeAlias = tuple[int, ...]
"""How far a micro-batch has come; whoever is least far runs next."""

_LOOK_S = 1.0
"""An interrupt may take away the word that a thread is over: then it shows this much later."""


class _Abandoned(BaseException):
    """Raised in the other micro-batches when one has failed. No `Exception`: nobody is to catch it."""


class Lockstep:
    """Runs functions in threads that hand on the turn by `pass_on`. At equal positions the last function goes first.

    Threads and not generators, since what torch knows of a forward (modes, hooks for what is saved, autocast) belongs
    to its thread. What each records for autograd is numbered on across all of them: the backward, which runs the
    highest number first, undoes all of them together in reverse order, so at equal positions the first function's comes
    first.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]], contexts: Sequence[AbstractContextManager[Any]]) -> None:
        """``contexts``: entered by each function's thread around it."""
        self._functions = functions
        self._contexts = contexts
        self._turns = [threading.Semaphore(0) for _ in functions]
        self._waiting: dict[int, Position] = dict.fromkeys(range(len(functions)), ())
        self._numbers = SequenceNumbers()
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._threads: set[int] = set()
        self._left: set[int] = set()
        """Whose function is over, or will never be called."""
        self._leaving: SimpleQueue[None] = SimpleQueue()
        self.running = -1
        """Whose turn it is."""

    @property
    def num_functions(self) -> int:
        return len(self._functions)

    def run(self) -> list[Any]:
        """Once. What the functions return. Raises what the first one to fail raised; the others then end at their next
        turn, as they do when an interrupt arrives here."""
        results: list[Any] = [None] * len(self._functions)
        threads = [
            threading.Thread(
                target=contextvars.copy_context().run,
                args=(self._run_one, number, results),
                name=f"lohan-micro-batch-{number}",
                daemon=True,
            )
            for number in range(len(self._functions))
        ]
        try:
            for thread in threads:
                thread.start()
            self._wake_next()
            while not self._has_ended.wait(_LOOK_S):  # an interrupt that came just before the wait shows behind it
                pass
        except BaseException as error:
            self._abandon(error)
        for number, thread in enumerate(threads):
            self._join(number, thread)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # its traceback holds what the forwards left
        return results

    def pass_on(self, position: Position) -> None:
        """The running function has come to ``position``: let it wait until nobody else is less far."""
        number = self.running
        self._waiting[number] = position
        self._numbers.leave()
        if self._wake_next() != number:
            self._await_turn(number)

    @property
    def is_here(self) -> bool:
        """Whether this is one of its threads."""
        return threading.get_ident() in self._threads

    # The threads.

    def _run_one(self, number: int, results: list[Any]) -> None:
        self._threads.add(threading.get_ident())
        try:
            with self._contexts[number]:
                self._await_turn(number)
                results[number] = self._functions[number]()
                self._numbers.leave()
        except _Abandoned:
            pass
        except BaseException as error:
            self._abandon(error)
        try:
            self._wake_next()
        finally:
            self._left.add(number)
            self._leaving.put(None)

    def _await_turn(self, number: int) -> None:
        self._turns[number].acquire()
        if self._error is not None:
            raise _Abandoned
        self._numbers.enter()

    def _wake_next(self) -> int | None:
        """Give the turn away; returns to whom."""
        if self._error is not None:
            return None
        if not self._waiting:
            self._has_ended.set()
            return None
        number = min(self._waiting, key=lambda number: (self._waiting[number], -number))
        del self._waiting[number]
        last, self.running = self.running, number
        if number != last:
            self._turns[number].release()
        return number

    def _abandon(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for turn in self._turns:
            turn.release()
        self._has_ended.set()

    def _join(self, number: int, thread: threading.Thread) -> None:
        """Not to be interrupted: what a thread that runs on does to the model, nobody could undo."""
        # `Thread.join` alone takes a thread for ended when it was interrupted itself (Python 3.10 to 3.12).
        while thread.ident is not None and (number not in self._left or thread.is_alive()):
            try:
                while number not in self._left:
                    with suppress(Empty):
                        self._leaving.get(timeout=_LOOK_S)
                thread.join()
            except KeyboardInterrupt as error:
                self._abandon(error)

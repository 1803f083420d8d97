"""Runs functions in threads that take turns, one at a time."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias

import torch

from hf_lohan.compat.torch_private import sequence_number, without_modes

Position: TypeAlias = tuple[int, ...]
"""Progress of a micro-batch. The micro-batch with the lowest position runs next."""

_POLL_S = 1.0
"""Seconds between checks for ended threads. A KeyboardInterrupt may lose the message that a thread has ended."""
_NUM_VIEWS = 256
"""Number of views that one call makes to raise a sequence number."""


class _AbandonedError(BaseException):
    """Ends the other micro-batches after one has failed. It is not an `Exception`, so that no forward catches it."""


class Lockstep:
    """Runs functions in threads that end their turn in `pass_on`. If positions are equal, the last function runs first.

    Functions have threads because torch keeps a forward's modes, saved-tensor hooks and autocast state by thread. All
    threads share one sequence of autograd's node numbers. A backward runs the node with the highest number first, so
    it runs all functions together in reverse order. If positions are equal, it runs the first function's nodes first.
    """

    def __init__(self, functions: Sequence[Callable[[], Any]], contexts: Sequence[AbstractContextManager[Any]]) -> None:
        """``contexts`` has a context for each function, which the function's thread enters."""
        self._functions = functions
        self._contexts = contexts
        self._turns = [threading.Semaphore(0) for _ in functions]
        self._waiting: dict[int, Position] = dict.fromkeys(range(len(functions)), ())
        self._numbers = SequenceNumbers()
        self._error: BaseException | None = None
        self._has_ended = threading.Event()
        self._threads: set[int] = set()
        self._left: set[int] = set()
        """Functions that have returned or will not be called."""
        self._leaving: SimpleQueue[None] = SimpleQueue()
        self.running = -1
        """The index of the running function."""

    @property
    def num_functions(self) -> int:
        return len(self._functions)

    def run(self) -> list[Any]:
        """Run the functions once and return their results. Raises the first error, after which the other functions end
        at their next turn. An interrupt ends all functions in the same way."""
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
            while not self._has_ended.wait(_POLL_S):  # an interrupt just before a wait is raised only after the wait
                pass
        except BaseException as error:
            self._abandon(error)
        for number, thread in enumerate(threads):
            self._join(number, thread)
        if self._error is not None:
            try:
                raise self._error
            finally:
                self._error = None  # the error's traceback refers to the forwards' tensors
        return results

    def pass_on(self, position: Position) -> None:
        """Set the running function's position, and wait until no other function has a lower position."""
        number = self.running
        self._waiting[number] = position
        self._numbers.leave()
        if self._wake_next() != number:
            self._await_turn(number)

    @property
    def is_here(self) -> bool:
        """Whether the caller runs in a thread of this lockstep."""
        return threading.get_ident() in self._threads

    # The threads.

    def _run_one(self, number: int, results: list[Any]) -> None:
        self._threads.add(threading.get_ident())
        try:
            with self._contexts[number]:
                self._await_turn(number)
                results[number] = self._functions[number]()
                self._numbers.leave()
        except _AbandonedError:
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
            raise _AbandonedError
        self._numbers.enter()

    def _wake_next(self) -> int | None:
        """Wake the function with the lowest position, and return its index."""
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
        """Wait for a thread in spite of interrupts, because a running thread could change the model after the call."""
        # An interrupted `Thread.join` regards the thread as ended (Python 3.10 to 3.12).
        while thread.ident is not None and (number not in self._left or thread.is_alive()):
            try:
                while number not in self._left:
                    with suppress(Empty):
                        self._leaving.get(timeout=_POLL_S)
                thread.join()
            except KeyboardInterrupt as error:
                self._abandon(error)


class SequenceNumbers:
    """Threads take turns, and this numbers their autograd nodes as if one thread recorded all nodes.

    Each thread has a counter, and autograd's backward runs the ready node with the highest number first. A counter
    cannot be set, but each recorded node increases it. A temporary view increases it in under a microsecond.
    """

    def __init__(self) -> None:
        self._next = 0
        self._source = torch.zeros((), requires_grad=True)

    def leave(self) -> None:
        """End the calling thread's turn."""
        with _recording():
            self._next = self._number()

    def enter(self) -> None:
        """Begin the calling thread's turn. Raises its counter above the numbers of all earlier turns."""
        with _recording():
            missing = self._next - self._number()
            while missing > 0:
                torch.atleast_1d([self._source] * min(missing, _NUM_VIEWS))
                missing -= _NUM_VIEWS

    def _number(self) -> int:
        node = self._source.view(1).grad_fn
        assert node is not None
        return sequence_number(node)


@contextlib.contextmanager
def _recording() -> Iterator[None]:
    """Record for autograd within this context, hidden from the modes of the forward in progress."""
    with torch.enable_grad(), without_modes():
        yield

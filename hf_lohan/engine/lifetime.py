"""Closes an engine: with its model, or at the interpreter's exit, in the process that made it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
import threading
from typing import Protocol
from weakref import WeakSet

from hf_lohan.threads import Owner

logger = logging.getLogger(__name__)

_CLOSING = "lohan-close"


class ClosableEngine(Protocol):
    def close(self) -> None: ...


class Lifetime:
    """The lifetime of one engine. A forked child has a copy of the engine without its threads, and shares its files: it
    closes nothing."""

    def __init__(self) -> None:
        self._owner = Owner()
        self._has_begun = False
        self._is_over = False

    def close_at_exit(self, engine: ClosableEngine) -> None:
        """The engine is complete. Close it at the interpreter's exit: a thread that is within torch then would abort
        the process."""
        self._has_begun = True
        _open_engines.add(engine)

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child."""
        return not self._owner.is_here

    @property
    def is_over(self) -> bool:
        return self._is_over

    def end_life(self) -> bool:
        """Returns whether the engine is to be closed now."""
        has_to_close = not (self._is_over or self.is_forked)
        self._is_over = True
        return has_to_close

    def check(self) -> None:
        """Raises RuntimeError in a forked child."""
        if self.is_forked:
            raise RuntimeError(
                "the model was offloaded by the process that this one was forked from, and only that one can use it; "
                "move the call there, or start this process by 'spawn' and load its own model"
            )

    def end_unowned(self, engine: ClosableEngine) -> None:
        """Close the engine on a new thread. For `__del__`, which may run on any thread with any lock held."""
        if not self._has_begun or self._is_over or self.is_forked or sys.is_finalizing():
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is about to exit, and closes it
            threading.Thread(target=_close, args=(engine,), name=_CLOSING).start()


_open_engines: WeakSet[ClosableEngine] = WeakSet()


def wait_until_closed() -> None:
    """Wait for engines that are being closed because their model was deleted."""
    for thread in threading.enumerate():
        if thread.name == _CLOSING and thread is not threading.current_thread():
            thread.join()


def _close(engine: ClosableEngine) -> None:
    try:
        engine.close()
    except Exception as error:
        logger.warning("the last step of a deleted model may not be committed: %s", error)


@atexit.register
def _close_open_engines() -> None:
    for engine in list(_open_engines):
        engine.close()

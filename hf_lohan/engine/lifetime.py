"""How long an engine lives: as long as its model, in the process that made it."""

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


class Closable(Protocol):
    def close(self) -> None: ...


class Lifetime:
    """One engine's. A forked child has a copy of the engine, but none of its threads, and shares its files: it leaves
    all as it is."""

    def __init__(self) -> None:
        self._owner = Owner()
        self._has_begun = False
        self._is_over = False

    def close_at_exit(self, engine: Closable) -> None:
        """The engine is whole. It is closed at the interpreter's end at the latest: a thread that is inside torch when
        the interpreter goes away takes the process down with an abort."""
        self._has_begun = True
        _open_engines.add(engine)

    @property
    def is_elsewhere(self) -> bool:
        """Whether this is a forked child."""
        return not self._owner.is_here

    @property
    def is_over(self) -> bool:
        return self._is_over

    def end(self) -> bool:
        """Returns whether there is something to close now."""
        has_to_close = not (self._is_over or self.is_elsewhere)
        self._is_over = True
        return has_to_close

    def check(self) -> None:
        """Raises RuntimeError in a forked child."""
        if self.is_elsewhere:
            raise RuntimeError(
                "the model is offloaded by the process that this one was forked from, and only that one can use it; "
                "move the call there, or start this process by 'spawn' and load a model of its own"
            )

    def end_unowned(self, engine: Closable) -> None:
        """Nobody has the engine or its model any more. Call it from `__del__`, which may run on any thread, with any
        lock held: the engine is closed on a thread of its own."""
        if not self._has_begun or self._is_over or self.is_elsewhere or sys.is_finalizing():
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is about to end, and closes what is open
            threading.Thread(target=_close, args=(engine,), name=_CLOSING).start()


_open_engines: WeakSet[Closable] = WeakSet()


def wait_until_closed() -> None:
    """Wait for engines that are being closed because nobody has them any more."""
    for thread in threading.enumerate():
        if thread.name == _CLOSING and thread is not threading.current_thread():
            thread.join()


def _close(engine: Closable) -> None:
    try:
        engine.close()
    except Exception as error:
        logger.warning("the last step of a model that was dropped may not be committed: %s", error)


@atexit.register
def _close_all() -> None:
    for engine in list(_open_engines):
        engine.close()

"""Closes an engine with its model or at the interpreter's exit, but only in the process that made the engine."""

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
    """The lifetime of one engine. A forked child closes nothing, because its copy of the engine has no threads and
    shares the files."""

    def __init__(self) -> None:
        self._owner = Owner()
        self._has_begun = False
        self.is_over = False

    def close_at_exit(self, engine: ClosableEngine) -> None:
        """Close the complete engine at the interpreter's exit. A thread that runs in torch at exit would abort the
        process."""
        self._has_begun = True
        _open_engines.add(engine)

    @property
    def is_forked(self) -> bool:
        """Whether this is a forked child."""
        return not self._owner.is_here

    def end_life(self) -> bool:
        """End the lifetime, and return whether the caller must close the engine."""
        has_to_close = not (self.is_over or self.is_forked)
        self.is_over = True
        return has_to_close

    def check(self) -> None:
        """Raise RuntimeError in a forked child."""
        if self.is_forked:
            raise RuntimeError(
                "the parent of this forked process offloaded the model, and only the parent can use it; move the call "
                "to the parent, or start this process with 'spawn' and load a model in it"
            )

    def end_unowned(self, engine: ClosableEngine) -> None:
        """Close the engine on a new thread, for `__del__`, whose thread may hold any lock."""
        if not self._has_begun or self.is_over or self.is_forked or sys.is_finalizing():
            return
        with contextlib.suppress(RuntimeError):  # the interpreter is exiting, and closes the engine
            threading.Thread(target=_close, args=(engine,), name=_CLOSING).start()


_open_engines: WeakSet[ClosableEngine] = WeakSet()


def wait_until_closed() -> None:
    """Wait until engines of deleted models are closed."""
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

"""One failure that several threads have to be told of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class FirstFailure:
    """What went wrong first, of several threads of which none can go on without the others."""

    def __init__(self, told: Callable[[BaseException], None] = lambda _error: None) -> None:
        """`told` is told of it, on the thread that notes it."""
        self.error: BaseException | None = None
        self._told = told

    def record_error(self, error: BaseException) -> None:
        """From any thread."""
        if self.error is None:
            self.error = error
            self._told(error)


def raised_anew(error: _Error) -> _Error:
    """An exception like ``error``, which is its cause. One object that several threads raise would collect all their
    tracebacks, and each would change what the others see as its context."""
    args = error.args
    if isinstance(error, OSError) and error.filename is not None:
        args = (*args, error.filename)
    fresh = type(error).__new__(type(error), *args)  # without what the class makes of its own arguments
    if isinstance(fresh, OSError):
        OSError.__init__(fresh, *args)
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error
    return fresh

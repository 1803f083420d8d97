"""A failure that ends the work of several threads."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


class FirstFailure:
    """The first error of several threads. No thread can continue without the others."""

    def __init__(self, on_error: Callable[[BaseException], None] = lambda _error: None) -> None:
        """`on_error` is called on the thread that records the first error."""
        self.error: BaseException | None = None
        self._on_error = on_error

    def record_error(self, error: BaseException) -> None:
        """Record an error, from any thread. Only the first one is kept."""
        if self.error is None:
            self.error = error
            self._on_error(error)


def raised_anew(error: _Error) -> _Error:
    """Return a copy of ``error`` with ``error`` as its cause. If several threads raised the same object, it would
    collect all their tracebacks, and the threads would overwrite its context."""
    args = error.args
    if isinstance(error, OSError) and error.filename is not None:
        args = (*args, error.filename)
    fresh = type(error).__new__(type(error), *args)  # skips the class's own `__init__`
    if isinstance(fresh, OSError):
        OSError.__init__(fresh, *args)
    fresh.__dict__.update(error.__dict__)
    fresh.__cause__ = error
    return fresh

"""One failure that several threads have to be told of."""

from __future__ import annotations

from typing import TypeVar

_Error = TypeVar("_Error", bound=BaseException)


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

"""Temporarily replaces attributes of other libraries' modules, classes and objects."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

_MISSING = object()


@contextmanager
def replaced(owner: Any, **values: Any) -> Iterator[None]:
    """In this context, attributes of ``owner`` have these values."""
    before = {name: vars(owner).get(name, _MISSING) for name in values}
    try:
        for name, value in values.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is _MISSING:  # ``owner`` has the attribute of its class, or none
                with suppress(AttributeError):  # an earlier value could not be set, so this value was not
                    delattr(owner, name)
            else:
                setattr(owner, name, value)

"""Temporary names for modules that are not ported yet."""

from typing import Any


class _Any(type):
    def __getattr__(cls, name: str) -> Any:
        return name


class Kind(metaclass=_Any): ...


class Channel(metaclass=_Any): ...


PayloadReader = Any
Handler = Any

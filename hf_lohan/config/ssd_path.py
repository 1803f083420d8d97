"""The directories that hold the store, and how much of each may be used."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from hf_lohan.config.errors import ConfigError, refuse_unknown_keys
from hf_lohan.config.value_checks import AUTO, check_size

_UNSET_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")
_EXPECTED = "give a directory, a list of directories, a list of {path, capacity}, or 'auto'"


@dataclass(frozen=True, slots=True)
class SsdPath:
    """A directory on an SSD and the bytes that may be used there.

    ``~`` and environment variables in ``path`` are expanded and the result is made absolute. Raises
    ConfigError for an unset variable, an unknown user, or a capacity that is not a size.
    """

    path: str
    """Absolute path of the directory; it is created when the store is."""

    capacity: int | Literal["auto"] = AUTO
    """Most bytes that the store may occupy there; "auto" is the free space of the file system."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", _absolute(self.path))
        object.__setattr__(self, "capacity", check_size("ssd capacity", self.capacity))


def ssd_paths(value: object) -> tuple[SsdPath, ...] | Literal["auto"]:
    """The setting ``ssd`` in any of its spellings, as a tuple of `SsdPath`, or "auto". Raises ConfigError."""
    if value == AUTO:
        return AUTO
    entries = value if isinstance(value, list | tuple) else (value,)
    if not entries:
        raise ConfigError(f"ssd: {value!r} names no directory; {_EXPECTED}")
    paths = tuple(_ssd_path(entry) for entry in entries)
    seen: set[str] = set()
    for ssd in paths:
        place = os.path.realpath(ssd.path)
        if place in seen:
            raise ConfigError(f"ssd: the directory {ssd.path!r} is named twice; name each directory once")
        seen.add(place)
    return paths


def _ssd_path(entry: object) -> SsdPath:
    match entry:
        case SsdPath():
            return entry
        case str() | os.PathLike():
            return SsdPath(os.fspath(entry))
        case Mapping():
            refuse_unknown_keys(entry, ("path", "capacity"), what="key of an ssd entry")
            if "path" in entry:
                return SsdPath(entry["path"], entry.get("capacity", AUTO))
    raise ConfigError(f"ssd: {entry!r} is not allowed; {_EXPECTED}")


def _absolute(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"ssd: {path!r} is not a path; {_EXPECTED}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"ssd: {path!r} is not a path; {_EXPECTED}")
    expanded = os.path.expandvars(text)
    if unset := _UNSET_VARIABLE.search(expanded):
        raise ConfigError(
            f"ssd: the environment variable {unset[0]} in {text!r} is not set; set it or write the directory out"
        )
    expanded = os.path.expanduser(expanded)
    if expanded.startswith("~"):
        raise ConfigError(f"ssd: {text!r} names an unknown home directory; write the directory out")
    return os.path.abspath(expanded)

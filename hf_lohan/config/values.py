"""Checks of settings. Each takes a setting's name and value, and returns the value to store or raises ConfigError."""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal, TypeVar

import yaml

from hf_lohan.costs.collectives import COLLECTIVE_VALUES, Collectives, collectives_of_word
from hf_lohan.costs.quantization import Quantization
from hf_lohan.wording import UNIT_BYTES

AUTO: Literal["auto"] = "auto"
Checked = TypeVar("Checked")
_SECTOR_BYTES = 4096
"""O_DIRECT transfers whole sectors, so a budget or an I/O piece has at least one sector."""
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_EXPECTED_SIZE = 'write bytes as a whole number or a size such as "24GiB", "24GB" or "512 MiB"'
_MAX_DIGITS = 40
_MAX_BYTES = 1 << 60
_MAX_NUMBER = (1 << 31) - 1
_URL = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)
_UNSET_VARIABLE = re.compile(r"\$(?:\w+|\{[^}]*\})")
_EXPECTED_PATHS = "give a directory, a list of directories, a list of {path, capacity}, or 'auto'"


class ConfigError(ValueError):
    """A setting that is misspelt or has a value that is not allowed. Its message is one line."""


class _Loader(yaml.SafeLoader):
    """Loader that refuses repeated keys and reads 10:30 as text. In YAML 1.1, 10:30 is the number 630."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[str] = set()
        for key, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(
                        "while reading a table", node.start_mark, f"found the key {key.value!r} twice", key.start_mark
                    )
                seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def number(self, node: yaml.ScalarNode) -> Any:
        """Return the number, or the text if it has a colon or too many digits. Checks of settings refuse the text."""
        if ":" in node.value or len(node.value) > _MAX_DIGITS:
            return self.construct_scalar(node)
        is_whole = node.tag == "tag:yaml.org,2002:int"
        return self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.number)
_Loader.add_constructor("tag:yaml.org,2002:float", _Loader.number)


def read_yaml(file: str, what: str, error_type: type[ValueError] = ConfigError) -> Any:
    """Return the content of a YAML file, called ``what`` in errors. Raises ``error_type`` if it cannot be read."""
    if os.path.exists(file) and not os.path.isfile(file) and not os.path.isdir(file):
        raise error_type(f"the {what} {file!r} is a pipe or a device; give the path of a YAML file")
    try:
        with open(file, encoding="utf-8") as stream:
            return yaml.load(stream, _Loader)
    except OSError as error:
        raise error_type(f"cannot read the {what} {file!r}: {error.strerror}; give the path of a YAML file") from None
    except RecursionError:
        raise error_type(f"the {what} {file!r} is nested too deeply; write 'key: value' lines") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        problem = " ".join(str(error).split())
        raise error_type(f"the {what} {file!r} is not YAML: {problem}") from None


def refuse_unknown_keys(keys: Iterable[object], known: Iterable[str], *, what: str) -> None:
    """Raise ConfigError for the first of ``keys`` that is not in ``known``, and suggest the nearest known key. ``what``
    is the kind of key for the message, such as "offload setting"."""
    known_keys = list(known)
    for key in keys:
        if key in known_keys:
            continue
        nearest = difflib.get_close_matches(str(key).lower(), known_keys, n=1, cutoff=0.4)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else "."
        raise ConfigError(f"unknown {what} {key!r}{hint} Known: {', '.join(known_keys)}")


def parse_bytes(value: object) -> int:
    """Return the number of bytes of a size: an int, or a number with a unit ("1.5GiB", "24GB") in upper or lower case.
    Fractions of a byte are dropped. Raises ConfigError for other values, and for "24G", which may mean GB or GiB."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return _at_most(value, _MAX_BYTES, "is more than any memory has")
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise ConfigError(f"{value[:_MAX_DIGITS]!r}... is not a size; {_EXPECTED_SIZE}")
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{value!r} is not a size; {_EXPECTED_SIZE}")
    number, unit = match.groups()
    unit_bytes = UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        raise ConfigError(f"{value!r} has the unknown unit {unit!r}; {_EXPECTED_SIZE}")
    return _at_most(int(Decimal(number) * unit_bytes), _MAX_BYTES, "is more than any memory has")


def _at_most(value: int, most: int, what: str) -> int:
    """Return ``value``. Raises ConfigError if it is larger than ``most``."""
    if value <= most:
        return value
    text = str(value) if value.bit_length() < 64 else f"a number of {value.bit_length()} bits"
    raise ConfigError(f"{text} {what}; give at most {most}")


def check_size(name: str, value: object) -> int | Literal["auto"]:
    """Return a size in bytes or "auto". Raises ConfigError if ``value`` is not a size of at least one sector."""
    if value == AUTO:
        return AUTO
    try:
        num_bytes = parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}, or 'auto'") from None
    if num_bytes < _SECTOR_BYTES:
        raise ConfigError(
            f"{name}: {value!r} means {num_bytes} bytes, less than one sector ({_SECTOR_BYTES}); "
            "did you forget the unit, as in '24GiB'?"
        )
    return num_bytes


def check_piece_size(name: str, value: object) -> int | Literal["auto"]:
    """Return a size in bytes or "auto". Raises ConfigError if ``value`` is not a whole number of sectors."""
    num_bytes = check_size(name, value)
    if num_bytes != AUTO and num_bytes % _SECTOR_BYTES:
        raise ConfigError(f"{name}: {value!r} must be a multiple of {_SECTOR_BYTES} bytes; use e.g. '8MiB'")
    return num_bytes


def or_auto(
    check: Callable[[str, object], Checked], words: str = ", or 'auto'"
) -> Callable[[str, object], Checked | Literal["auto"]]:
    """Return a check that accepts "auto", and otherwise calls ``check``. ``words`` end the error for other values."""

    def check_or_auto(name: str, value: object) -> Checked | Literal["auto"]:
        if value == AUTO:
            return AUTO
        try:
            return check(name, value)
        except ConfigError as error:
            raise ConfigError(f"{error}{words}") from None

    return check_or_auto


def check_number(name: str, value: object, *, most: int = _MAX_NUMBER) -> int:
    """Return ``value`` if it is a whole number from 1 to ``most``. Raises ConfigError if not."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        try:
            return _at_most(value, most, "is too many")
        except ConfigError as error:
            raise ConfigError(f"{name}: {error}") from None
    shown = f"{value[:_MAX_DIGITS]!r}..." if isinstance(value, str) and len(value) > _MAX_DIGITS else repr(value)
    raise ConfigError(f"{name}: {shown} is not allowed; give a whole number of at least 1")


def check_chunk(name: str, value: object, *, unit: str = "tokens") -> int | Literal["auto", False]:
    """Return ``value`` if it is "auto", False or a whole number of ``unit``. Raises ConfigError if not."""
    return False if value is False else or_auto(check_number, f" ({unit}), auto or false")(name, value)


_DURATION = re.compile(r"(\d+(?:\.\d+)?) *(s|min|h)")
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def check_interval(name: str, value: object) -> int | str:
    """Return ``value`` if it is a number of steps, a time such as "10min", or "auto". Raises ConfigError if not."""
    if isinstance(value, str) and interval_s(value):
        return value
    return or_auto(check_number, " (steps), a time such as '30s', '10min' or '1h', or 'auto'")(name, value)


def interval_s(value: int | str) -> float | None:
    """Return the seconds of a time such as "10min", or None for a number of steps."""
    found = _DURATION.fullmatch(value) if isinstance(value, str) else None
    return float(found[1]) * _SECONDS[found[2]] or None if found else None


def check_seconds(name: str, value: object) -> int | float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf:
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; give a number of seconds above 0")


def check_share(name: str, value: object) -> float:
    if isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1:
        return float(value)
    raise ConfigError(f"{name}: {value!r} is not allowed; give a number from 0 to 1")


def check_flag(name: str, value: object) -> bool:
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; give true or false")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    if isinstance(value, str) and value in allowed:
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; choose {' or '.join(map(repr, allowed))}")


def check_collectives(name: str, value: object) -> Collectives:
    """Convert a string, a table or a `Collectives` to a `Collectives`. Raises ConfigError."""
    match value:
        case Collectives():
            return value
        case "exact" | "quantized":
            return collectives_of_word(value)
        case Mapping():
            refuse_unknown_keys(value, COLLECTIVE_VALUES, what=f"key of {name}")
            try:
                return Collectives.of_setting(value)
            except ValueError as error:
                raise ConfigError(str(error)) from None
    raise ConfigError(
        f"{name}: {value!r} is not allowed; give 'exact', 'quantized', or a table of forward, backward, gradients and "
        "within"
    )


def check_quantize(name: str, value: object) -> Quantization:
    """Convert a string, a table or a `Quantization` to a `Quantization`. Raises ConfigError."""
    try:
        return Quantization.parse(value)
    except ValueError as error:
        raise ConfigError(str(error)) from None


@dataclass(frozen=True, slots=True)
class SsdPath:
    """A directory on an SSD and its capacity. Raises ConfigError for a capacity that is not a size."""

    path: str
    """Absolute path of the directory. It is created with the store."""

    capacity: int | Literal["auto"] = AUTO
    """Maximum size of the store in the directory, in bytes. "auto" is the free space of the file system."""

    names_ranks: bool = False
    """Whether `{local_rank}` and `{node}`, which only a user's path may have, are replaced by a rank's indices."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", os.path.abspath(self.path))
        object.__setattr__(self, "capacity", check_size("ssd capacity", self.capacity))


def check_ssd(_name: str, value: object) -> tuple[SsdPath, ...] | Literal["auto"]:
    """Convert `ssd`, which is a path or a list of paths or tables, to a tuple of `SsdPath`. "auto" stays unchanged.

    ``~`` and environment variables are expanded. Raises ConfigError, such as for an unset variable or an unknown user.
    """
    if value == AUTO:
        return AUTO
    entries = value if isinstance(value, list | tuple) else (value,)
    if not entries:
        raise ConfigError(f"ssd: {value!r} names no directory; {_EXPECTED_PATHS}")
    paths = tuple(_ssd_path(entry) for entry in entries)
    seen: dict[str, str] = {}
    for ssd in paths:
        place = os.path.realpath(ssd.path)
        if place in seen:
            raise ConfigError(f"ssd: the directory {ssd.path!r} is named twice; name each directory once")
        seen[place] = ssd.path
    for place, path in seen.items():
        outer = next((outer for outer in seen if outer != place and os.path.commonpath([outer, place]) == outer), None)
        if outer is not None:
            raise ConfigError(f"ssd: {path!r} is in {seen[outer]!r}; name directories that are not inside each other")
    return paths


def _ssd_path(entry: object) -> SsdPath:
    match entry:
        case SsdPath():
            return entry
        case str() | os.PathLike():
            return _given_path(entry)
        case Mapping():
            told = {key: entry[key] for key in entry if key != "paths_of_ranks"}  # a run's `lohan/config.json` has it
            refuse_unknown_keys(told, ("path", "capacity"), what="key of an ssd entry")
            if "path" in entry:
                return _given_path(entry["path"], entry.get("capacity", AUTO))
    raise ConfigError(f"ssd: {entry!r} is not allowed; {_EXPECTED_PATHS}")


def _given_path(path: object, capacity: Any = AUTO) -> SsdPath:
    expanded = _expanded(path)
    return SsdPath(expanded, capacity, names_ranks="{local_rank}" in expanded or "{node}" in expanded)


def _expanded(path: object) -> str:
    if not isinstance(path, str | os.PathLike):
        raise ConfigError(f"ssd: {path!r} is not a path; {_EXPECTED_PATHS}")
    text = os.fspath(path)
    if not isinstance(text, str) or not text.strip() or "\0" in text:
        raise ConfigError(f"ssd: {path!r} is not a path; {_EXPECTED_PATHS}")
    if _URL.match(text):
        raise ConfigError(f"ssd: {text!r} is a URL; give a directory of this machine, on an SSD")
    expanded = os.path.expandvars(text)
    if unset := _UNSET_VARIABLE.search(expanded):
        raise ConfigError(
            f"ssd: the environment variable {unset[0]} in {text!r} is not set; set it or write the directory out"
        )
    expanded = os.path.expanduser(expanded)
    if expanded.startswith("~"):
        raise ConfigError(f"ssd: {text!r} names an unknown home directory; write the directory out")
    return expanded

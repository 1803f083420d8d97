"""Byte sizes as people write them: "24GiB" is 24 * 2**30 bytes, "24GB" is 24 * 10**9."""

from __future__ import annotations

import re
from decimal import Decimal

from hf_lohan.config.errors import ConfigError

_BINARY_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")
_DECIMAL_UNITS = ("KB", "MB", "GB", "TB", "PB")
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY_UNITS, start=1)},
    **{unit.lower(): 1000**power for power, unit in enumerate(_DECIMAL_UNITS, start=1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)", re.ASCII | re.IGNORECASE)
_EXPECTED = 'write bytes as a whole number or a size such as "24GiB", "24GB" or "512 MiB"'


def parse_bytes(value: object) -> int:
    """The number of bytes that ``value`` stands for: an int, or a number with a unit ("1.5GiB", "24GB").

    Units are read without regard to case; a part of a byte is dropped. Raises ConfigError for anything else,
    for negative sizes and for "24G", which could mean either unit.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if match is None:
        raise ConfigError(f"{value!r} is not a size; {_EXPECTED}")
    number, unit = match.groups()
    unit_bytes = _UNIT_BYTES.get(unit.lower())
    if unit_bytes is None:
        raise ConfigError(f"{value!r} has the unknown unit {unit!r}; {_EXPECTED}")
    return int(Decimal(number) * unit_bytes)


def format_bytes(num_bytes: float) -> str:
    """``num_bytes`` for reading, in binary units with at most two decimals: 1536 -> "1.5 KiB"."""
    size, unit = float(abs(num_bytes)), "B"
    for larger_unit in _BINARY_UNITS:
        if round(size, 2) < 1024:
            break
        size, unit = size / 1024, larger_unit
    sign = "-" if num_bytes < 0 else ""
    return f"{sign}{size:.2f}".rstrip("0").rstrip(".") + f" {unit}"

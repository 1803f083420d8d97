"""One check per kind of value: it takes the setting's name for its message and returns what to store."""

from __future__ import annotations

from typing import Literal

from hf_lohan.config.byte_sizes import parse_bytes
from hf_lohan.config.errors import ConfigError

AUTO: Literal["auto"] = "auto"
SECTOR_BYTES = 4096
"""O_DIRECT moves whole sectors, so no budget or piece can be smaller than one."""


def check_size(name: str, value: object) -> int | Literal["auto"]:
    """A size of at least one sector, or "auto". Raises ConfigError."""
    if value == AUTO:
        return AUTO
    try:
        num_bytes = parse_bytes(value)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}, or 'auto'") from None
    if num_bytes < SECTOR_BYTES:
        raise ConfigError(
            f"{name}: {value!r} means {num_bytes} bytes, less than one sector ({SECTOR_BYTES}); "
            "did you forget the unit, as in '24GiB'?"
        )
    return num_bytes


def check_piece_size(name: str, value: object) -> int | Literal["auto"]:
    """A size that is a whole number of sectors, or "auto". Raises ConfigError."""
    num_bytes = check_size(name, value)
    if num_bytes != AUTO and num_bytes % SECTOR_BYTES:
        raise ConfigError(f"{name}: {value!r} must be a multiple of {SECTOR_BYTES} bytes; use e.g. '8MiB'")
    return num_bytes


def check_count(name: str, value: object) -> int | Literal["auto"]:
    """A whole number of at least 1, or "auto". Raises ConfigError."""
    if value == AUTO:
        return AUTO
    try:
        return check_number(name, value)
    except ConfigError as error:
        raise ConfigError(f"{error}, or 'auto'") from None


def check_number(name: str, value: object) -> int:
    """A whole number of at least 1. Raises ConfigError."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; give a whole number of at least 1")


def check_flag(name: str, value: object) -> bool:
    """True or False. Raises ConfigError."""
    if isinstance(value, bool):
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; give true or false")


def check_choice(name: str, value: object, allowed: tuple[str, ...]) -> str:
    """One of the ``allowed`` words. Raises ConfigError."""
    if isinstance(value, str) and value in allowed:
        return value
    raise ConfigError(f"{name}: {value!r} is not allowed; choose {' or '.join(map(repr, allowed))}")

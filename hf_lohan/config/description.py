"""A config as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hf_lohan.config.byte_sizes import format_bytes

_SIZES = frozenset({"gpu_memory", "cpu_memory", "io_piece_bytes"})


def describe(settings: Mapping[str, Any]) -> str:
    """One line per setting, sizes in human units; a second SSD gets a line of its own."""
    width = max(map(len, settings))
    return "\n".join(["offload config", *(f"  {name:<{width}}  {text}" for name, text in setting_rows(settings))])


def setting_rows(settings: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """(name, value) for reading; a second SSD has a row of its own, without a name."""
    for name, value in settings.items():
        for row, text in enumerate(_texts(name, value)):
            yield "" if row else name, text


def _texts(name: str, value: Any) -> list[str]:
    if name == "ssd" and isinstance(value, list):
        return [f"{ssd['path']} ({_capacity(ssd['capacity'])})" for ssd in value]
    return [format_bytes(value) if name in _SIZES and isinstance(value, int) else str(value)]


def _capacity(capacity: int | str) -> str:
    return f"at most {format_bytes(capacity)}" if isinstance(capacity, int) else "free space"

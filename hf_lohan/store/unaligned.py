"""Any range of bytes over storage that moves whole units only: through a buffer, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

MoveUnits = Callable[[int, Tensor], None]
"""Moves an aligned uint8 buffer ``[num_bytes]`` from or to the units from a byte offset on."""


@dataclass(frozen=True, slots=True)
class Units:
    """A row of units of ``unit_bytes``, the last of which may be short: ``total_bytes`` in all."""

    unit_bytes: int
    total_bytes: int


class _Window(NamedTuple):
    """Bytes ``low:high`` of the range, staged in the units from ``start`` on that hold them."""

    low: int
    high: int
    start: int
    staged: Tensor

    @property
    def payload(self) -> Tensor:
        return self.staged[self.low - self.start : self.high - self.start]


def read_range(start: int, out: Tensor, bounce: Tensor, units: Units, read: MoveUnits) -> None:
    """Fill ``out`` (uint8 ``[num_bytes]``, any address) with the bytes from ``start`` on."""
    for window in _windows(start, start + out.numel(), bounce, units):
        read(window.start, window.staged)
        out[window.low - start : window.high - start].copy_(window.payload)


def write_range(
    start: int, source: Tensor, bounce: Tensor, units: Units, read: MoveUnits, write: MoveUnits
) -> None:
    """Put ``source`` (uint8 ``[num_bytes]``, any address) at byte ``start``; its neighbours stay."""
    for window in _windows(start, start + source.numel(), bounce, units):
        for edge in _partial_units(window, units):
            read(window.start + edge, window.staged[edge : edge + units.unit_bytes])
        window.payload.copy_(source[window.low - start : window.high - start])
        write(window.start, window.staged)


def _windows(start: int, stop: int, bounce: Tensor, units: Units) -> Iterator[_Window]:
    unit_bytes = units.unit_bytes
    assert bounce.numel() >= unit_bytes, f"a bounce buffer has at least one unit of {unit_bytes} bytes"
    capacity_bytes = bounce.numel() // unit_bytes * unit_bytes
    if start == stop:
        return
    for first in range(start // unit_bytes * unit_bytes, stop, capacity_bytes):
        low, high = max(start, first), min(stop, first + capacity_bytes)
        last = min(first + -(-(high - first) // unit_bytes) * unit_bytes, units.total_bytes)
        yield _Window(low, high, first, bounce[: last - first])


def _partial_units(window: _Window, units: Units) -> set[int]:
    """Where in ``staged`` the units begin that are not overwritten as a whole."""
    partial = set()
    if window.low > window.start:
        partial.add(0)
    if window.high < window.start + window.staged.numel():
        partial.add((window.staged.numel() - 1) // units.unit_bytes * units.unit_bytes)
    return partial

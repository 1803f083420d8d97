"""Any range of bytes over storage that moves whole sectors only: through a buffer, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from torch import Tensor

from hf_lohan.storage.buffers import SECTOR_BYTES

MoveSectors = Callable[[int, Tensor], None]
"""Moves an aligned uint8 buffer ``[num_bytes]`` from or to the sectors from a byte offset on."""


class _Window(NamedTuple):
    """Bytes ``low:high`` of the range, staged in the sectors from ``start`` on that hold them."""

    low: int
    high: int
    start: int
    staged: Tensor

    @property
    def payload(self) -> Tensor:
        return self.staged[self.low - self.start : self.high - self.start]


def read_range(start: int, out: Tensor, bounce: Tensor, read: MoveSectors) -> None:
    """Fill ``out`` (uint8 ``[num_bytes]``, any address) with the bytes from ``start`` on."""
    for window in _windows(start, start + out.numel(), bounce):
        read(window.start, window.staged)
        out[window.low - start : window.high - start].copy_(window.payload)


def write_range(start: int, source: Tensor, bounce: Tensor, read: MoveSectors, write: MoveSectors) -> None:
    """Put ``source`` (uint8 ``[num_bytes]``, any address) at byte ``start``; its neighbours stay."""
    for window in _windows(start, start + source.numel(), bounce):
        for edge in _partial_sectors(window):
            read(window.start + edge, window.staged[edge : edge + SECTOR_BYTES])
        window.payload.copy_(source[window.low - start : window.high - start])
        write(window.start, window.staged)


def _windows(start: int, stop: int, bounce: Tensor) -> Iterator[_Window]:
    assert bounce.numel() >= 2 * SECTOR_BYTES, "a bounce buffer has at least two sectors"
    capacity_bytes = bounce.numel() // SECTOR_BYTES * SECTOR_BYTES
    for first in range(start // SECTOR_BYTES * SECTOR_BYTES, stop, capacity_bytes):
        low, high = max(start, first), min(stop, first + capacity_bytes)
        num_sectors = -(-(high - first) // SECTOR_BYTES)
        yield _Window(low, high, first, bounce[: num_sectors * SECTOR_BYTES])


def _partial_sectors(window: _Window) -> set[int]:
    """Where in ``staged`` the sectors lie that are not overwritten as a whole."""
    partial = set()
    if window.low > window.start:
        partial.add(0)
    if window.high < window.start + window.staged.numel():
        partial.add(window.staged.numel() - SECTOR_BYTES)
    return partial

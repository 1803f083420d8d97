"""Host memory lent last in, first out: what a forward puts away, its backward takes back in reverse order."""

from __future__ import annotations

import threading
from collections import deque

import torch
from torch import Tensor

from hf_lohan.device.base import Device

CACHE_LINE_BYTES = 64


class IntervalStack:
    """Places [start, stop) in a row of ``capacity`` units. Nothing fragments as long as what was pushed last is freed
    first; what is freed out of order counts again once all above it is free.

    `free` may be called from anywhere, also from a destructor that runs in the middle of `push`.
    """

    def __init__(self, capacity: int, granularity: int = 1) -> None:
        self.capacity = capacity
        self.granularity = granularity
        self.high_water = 0
        self._places: list[tuple[int, int]] = []
        self._freed: deque[int] = deque()
        self._dead: set[int] = set()
        self._lock = threading.Lock()

    def push(self, length: int) -> int | None:
        """The start of a place for ``length`` units, None if there is no room. Raises ValueError for less than one."""
        if length < 1:  # the next place would begin where this one does, and `free` could not tell them apart
            raise ValueError(f"a place of {length} units was asked for: ask for at least 1")
        with self._lock:
            self._collect()
            start = self._places[-1][1] if self._places else 0
            stop = start + -(-length // self.granularity) * self.granularity
            if stop > self.capacity:
                return None
            self._places.append((start, stop))
            self.high_water = max(self.high_water, stop)
            return start

    def free(self, start: int) -> None:
        """Give the place back that begins at ``start``."""
        self._freed.append(start)

    @property
    def in_use(self) -> int:
        """Units up to the last place that is not free."""
        with self._lock:
            self._collect()
            return self._places[-1][1] if self._places else 0

    def _collect(self) -> None:
        while self._freed:
            self._dead.add(self._freed.popleft())
        while self._places and self._places[-1][0] in self._dead:
            self._dead.discard(self._places.pop()[0])


class HostStack:
    """One piece of the device's host memory, taken at construction, lent as an `IntervalStack`."""

    def __init__(self, device: Device, num_bytes: int) -> None:
        self._memory = device.host_empty(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._places = IntervalStack(num_bytes, CACHE_LINE_BYTES)

    @property
    def num_bytes(self) -> int:
        return self._places.capacity

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were ever in use at once."""
        return self._places.high_water

    @property
    def bytes_in_use(self) -> int:
        return self._places.in_use

    def push(self, num_bytes: int) -> tuple[int, Tensor] | None:
        """A place (to be given back with `free`) and its bytes, uint8 [num_bytes]; None if there is no room."""
        start = self._places.push(num_bytes)
        return None if start is None else (start, self._memory[start : start + num_bytes])

    def free(self, start: int) -> None:
        """Give a place back; see `IntervalStack.free`."""
        self._places.free(start)

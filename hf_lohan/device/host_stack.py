"""Host memory as a stack, because a backward frees in reverse order what its forward allocated. Memory with a longer
life is allocated from the other end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device.base import Device
from hf_lohan.device.lanes import Event

CACHE_LINE_BYTES = 64


class IntervalStack:
    """Allocates intervals [start, stop) of ``capacity`` units as a stack. An interval that is freed out of order
    becomes available when all intervals above it are free.

    `free` takes no lock, so a destructor may call it while `push` runs.
    """

    def __init__(self, capacity: int, granularity: int = 1) -> None:
        self.capacity = capacity
        self.granularity = granularity
        self.high_water = 0
        self._intervals: list[tuple[int, int]] = []
        self._freed: deque[int] = deque()
        self._out_of_order: set[int] = set()
        self._lock = threading.Lock()

    def push(self, length: int, *, leave: int = 0) -> int | None:
        """Allocate ``length`` units and return their start, or None if fewer than ``leave`` units would remain free.
        Raises ValueError for less than one unit."""
        if length < 1:  # an empty interval and the next one would have the same start, which identifies them
            raise ValueError(f"cannot allocate an interval of {length} units; allocate at least 1")
        with self._lock:
            self._collect()
            start = self._intervals[-1][1] if self._intervals else 0
            stop = start + -(-length // self.granularity) * self.granularity
            if stop > self.capacity - leave:
                return None
            self._intervals.append((start, stop))
            self.high_water = max(self.high_water, stop)
            return start

    def free(self, start: int) -> None:
        """Free the interval that begins at ``start``."""
        self._freed.append(start)

    @property
    def in_use(self) -> int:
        """Number of units up to the last interval in use."""
        with self._lock:
            self._collect()
            return self._intervals[-1][1] if self._intervals else 0

    def _collect(self) -> None:
        while self._freed:
            self._out_of_order.add(self._freed.popleft())
        while self._intervals and self._intervals[-1][0] in self._out_of_order:
            self._out_of_order.discard(self._intervals.pop()[0])


@dataclass(frozen=True, slots=True)
class HostRead:
    """A numbered copy from the stack's memory. Copies run in the order of their numbers."""

    number: int
    event: Event


@dataclass(eq=False)
class TopPlace:
    """Memory at the top of a `HostStack`. `bytes` is a uint8 tensor."""

    bytes: Tensor
    _stack: HostStack = field(repr=False)
    _start: int = field(repr=False)

    def view(self, dtype: torch.dtype, numel: int, *, start_byte: int = 0) -> Tensor:
        """View `numel` elements of `dtype` from `start_byte` on."""
        return self.bytes[start_byte : start_byte + numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Return the memory to the stack."""
        self._stack._top.free(self._start)


class HostStack:
    """A part of the device's host memory with an `IntervalStack` at each end.

    Copies use the bottom (`push`), and the host reads and writes the top (`push_top`). Neither waits for free memory,
    so no end can block the other. Callers use another tier if the memory is full.
    """

    def __init__(self, device: Device, num_bytes: int = 0) -> None:
        self._device = device
        # Held to allocate memory. `IntervalStack.free` needs no lock.
        self._lock = threading.Lock()
        self._marks: dict[str, int] = {}
        self._reads: deque[HostRead] = deque()
        self._high_water_bytes = 0
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._memory = self._device.host_empty(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._bottom = IntervalStack(num_bytes, CACHE_LINE_BYTES)
        self._top = IntervalStack(num_bytes // CACHE_LINE_BYTES * CACHE_LINE_BYTES, CACHE_LINE_BYTES)

    def reallocate(self, num_bytes: int) -> None:
        """Replace the memory. No part of it may be allocated."""
        with self._lock:
            assert not self._bytes_in_use, "the memory is in use"
            for read in self._reads:
                read.event.synchronize()
            self._reads.clear()
            self._allocate(0)  # frees the old memory first, so the stack is empty if the next call fails
            self._allocate(num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._bottom.capacity

    @property
    def high_water_bytes(self) -> int:
        """Largest number of bytes that were in use at once, at both ends together."""
        return self._high_water_bytes

    @property
    def bytes_in_use(self) -> int:
        """Bytes in use at the bottom."""
        return self._bottom.in_use

    @property
    def top_bytes_in_use(self) -> int:
        return self._top.in_use

    @property
    def _bytes_in_use(self) -> int:
        return self._bottom.in_use + self._top.in_use

    def push(self, num_bytes: int) -> tuple[int, Tensor] | None:
        """Allocate at the bottom. Returns the start, which `free` needs, and the memory, uint8 [num_bytes], or None if
        there is no room. The caller enqueues copies to the memory after earlier copies from it."""
        with self._lock:
            start = self._bottom.push(num_bytes, leave=self._top.in_use)
            self._note_use()
            self._forget_old_reads()
        return None if start is None else (start, self._memory[start : start + num_bytes])

    def free(self, start: int, read: HostRead | None = None) -> None:
        """Free memory at the bottom, as `IntervalStack.free` does. ``read`` is a copy from it that may still run."""
        if read is not None:
            self._reads.append(read)
        self._bottom.free(start)

    def push_top(self, num_bytes: int, *, leave: int = 0) -> TopPlace | None:
        """Allocate memory at the top that the host may write to. Returns None if it would reach the bottom's memory, or
        the first ``leave`` bytes, which the bottom will need. May wait for a copy from memory that was freed."""
        with self._lock:
            offset = self._top.push(num_bytes, leave=max(self._bottom.in_use, leave))
            if offset is None:
                return None
            self._note_use()
            self._forget_old_reads()
            read = self._reads.popleft() if self._reads else None
        if read is not None:
            read.event.synchronize()
        start = self._top.capacity - offset - -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
        return TopPlace(self._memory[start : start + num_bytes], self, offset)

    def _note_use(self) -> None:
        self._high_water_bytes = max(self._high_water_bytes, self._bytes_in_use)

    def _forget_old_reads(self) -> None:
        """Keep only the last copy. When it is done, all earlier copies are done."""
        while len(self._reads) > 1:
            first, second = self._reads.popleft(), self._reads.popleft()
            self._reads.append(first if first.number > second.number else second)

    @property
    def marks(self) -> Mapping[str, int]:
        """Bytes that were in use at the bottom at each mark of the last forward."""
        return self._marks

    def mark(self, name: str) -> None:
        """Record the bytes in use at the bottom."""
        self._marks[name] = self._bottom.in_use

    def forget_marks(self) -> None:
        """Forget all marks, for another forward."""
        self._marks = {}

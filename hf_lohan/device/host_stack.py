"""Host memory lent last in, first out: what a forward puts away, its backward takes back in reverse order. What comes
meanwhile and stays longer is lent from the other end."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device.base import Device, Event

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

    def push(self, length: int, *, leave: int = 0) -> int | None:
        """The start of a place for ``length`` units, None if there is no room, but for the last ``leave``. Raises
        ValueError for less than one."""
        if length < 1:  # the next place would begin where this one does, and `free` could not tell them apart
            raise ValueError(f"a place of {length} units was asked for: ask for at least 1")
        with self._lock:
            self._collect()
            start = self._places[-1][1] if self._places else 0
            stop = start + -(-length // self.granularity) * self.granularity
            if stop > self.capacity - leave:
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


@dataclass(frozen=True, slots=True)
class HostRead:
    """A copy that read a place. Of two, the one with the larger number was enqueued later, on the same lane."""

    number: int
    event: Event


@dataclass(eq=False)
class TopPlace:
    """A place at the top of a `HostStack`. `bytes` is a uint8 tensor."""

    bytes: Tensor
    _stack: HostStack = field(repr=False)
    _start: int = field(repr=False)

    def view(self, dtype: torch.dtype, numel: int, *, start_byte: int = 0) -> Tensor:
        """The first `numel` elements from `start_byte` on, as `dtype`."""
        return self.bytes[start_byte : start_byte + numel * dtype.itemsize].view(dtype)

    def release(self) -> None:
        """Its contents belong to somebody else from here on."""
        self._stack._top.free(self._start)


class HostStack:
    """One piece of the device's host memory, lent from both ends, each as an `IntervalStack`.

    From the bottom for copies (`push`), from the top for what the host itself writes and reads (`push_top`). Nobody
    ever waits for room: who finds none goes elsewhere. So neither end can hold up the other, or whoever waits for it.
    """

    def __init__(self, device: Device, num_bytes: int = 0) -> None:
        self._device = device
        # Held while a place is looked for, not where one is given back: see `IntervalStack.free`.
        self._lock = threading.Lock()
        self._marks: dict[str, int] = {}
        self._reads: deque[HostRead] = deque()
        self._allocate(num_bytes)

    def _allocate(self, num_bytes: int) -> None:
        self._memory = self._device.host_empty(num_bytes) if num_bytes else torch.empty(0, dtype=torch.uint8)
        self._bottom = IntervalStack(num_bytes, CACHE_LINE_BYTES)
        self._top = IntervalStack(num_bytes // CACHE_LINE_BYTES * CACHE_LINE_BYTES, CACHE_LINE_BYTES)
        self._high_water_bytes = 0

    def reallocate(self, num_bytes: int) -> None:
        """Take other memory than before. Call it only while nothing is lent."""
        with self._lock:
            assert not self._bytes_lent, "something lies in the memory that would be replaced"
            self._allocate(num_bytes)

    @property
    def num_bytes(self) -> int:
        return self._bottom.capacity

    @property
    def high_water_bytes(self) -> int:
        """The most bytes that were ever in use at once, at both ends."""
        return self._high_water_bytes

    @property
    def bytes_in_use(self) -> int:
        """At the bottom."""
        return self._bottom.in_use

    @property
    def top_bytes_in_use(self) -> int:
        return self._top.in_use

    @property
    def _bytes_lent(self) -> int:
        return self._bottom.in_use + self._top.in_use

    def push(self, num_bytes: int) -> tuple[int, Tensor] | None:
        """A place (to be given back with `free`) and its bytes, uint8 [num_bytes]; None if there is no room. Copies
        that use it are enqueued behind those that used it before."""
        with self._lock:
            start = self._bottom.push(num_bytes, leave=self._top.in_use)
            self._note_use()
            self._forget_old_reads()
        return None if start is None else (start, self._memory[start : start + num_bytes])

    def free(self, start: int, read: HostRead | None = None) -> None:
        """Give a place back; see `IntervalStack.free`. ``read``: a copy from it that may be under way."""
        if read is not None:
            self._reads.append(read)
        self._bottom.free(start)

    def push_top(self, num_bytes: int, *, leave: int = 0) -> TopPlace | None:
        """A place that the host may write to; None if there is none above what is lent at the bottom, and above the
        ``leave`` bytes there that will be needed. What waits is a copy of before, which waits for nobody."""
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
        self._high_water_bytes = max(self._high_water_bytes, self._bytes_lent)

    def _forget_old_reads(self) -> None:
        """All but the last: one that is done says that those before it are."""
        while len(self._reads) > 1:
            one, other = self._reads.popleft(), self._reads.popleft()
            self._reads.append(one if one.number > other.number else other)

    # What a forward needs of the bottom.

    @property
    def marks(self) -> Mapping[str, int]:
        """Bytes that were in use at the bottom, by where the forward was then."""
        return self._marks

    def mark(self, where: str) -> None:
        """Note what is in use at the bottom."""
        self._marks[where] = self._bottom.in_use

    def forget_marks(self) -> None:
        """Another forward begins."""
        self._marks = {}

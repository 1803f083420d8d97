"""Where weights come from: one block's parameters into one slot."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from torch import Tensor

from hf_lohan.device import Buffer, BufferPool, Device, Event, Lane
from hf_lohan.model import Block, ranges
from hf_lohan.store import RecordRead
from hf_lohan.timeline import LOADS_WAIT
from hf_lohan.updates import Delivery
from hf_lohan.weights.slot_ring import Slot


class Arrival(Protocol):
    """Weights on their way into a slot."""

    def when_ended(self, ended: Callable[[BaseException | None], None]) -> None:
        """Call ``ended`` once the copies of all of them are enqueued on the H2D lane, or with what made that
        impossible; at once, or on another thread."""


class WeightSource(Protocol):
    """Answers "these weights, into this slot". Nobody else knows where a block's weights lie, or in how many parts."""

    def load(self, block: Block, slot: Slot) -> Arrival:
        """Called by one thread, one load after the other. Raises what makes it impossible."""


class RecordReader(Protocol):
    """Reads part of a record into aligned host memory."""

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead: ...


class LocalWeights:
    """A `WeightSource`: this process's store, and what updates still have in RAM. Reads go through staging buffers, or
    into the slot itself where the device's memory is the host's."""

    def __init__(
        self,
        device: Device,
        store: RecordReader,
        staging: BufferPool,
        deliver: Callable[[Block, Tensor, Event | None], Delivery],
    ) -> None:
        """``deliver`` says what comes from updates, and sees that it does; nothing is copied before its event."""
        self._device = device
        self._store = store
        self._staging = staging
        self._deliver = deliver
        self._copying: deque[tuple[Event, Buffer]] = deque()

    def load(self, block: Block, slot: Slot) -> Arrival:
        """Read and copy what is to be read; what comes from updates may still come."""
        delivery = self.deliver(block, slot)
        self.read_rest(block, slot, delivery)
        return delivery

    def deliver(self, block: Block, slot: Slot) -> Delivery:
        """The first half of a load: what comes from updates is on its way. What the H2D lane copies to the slot from
        here on comes behind its last use."""
        with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=block.name):
            return self._deliver(block, slot.weights[: block.numel], slot.last_use)

    def read_rest(self, block: Block, slot: Slot, delivery: Delivery) -> None:
        """The second half: read and copy what is not delivered."""
        parts = [part for whole in delivery.ranges_to_read() for part in self._cut(block, *whole)]
        try:
            with self._device.timeline.task(LOADS_WAIT, "for the SSD", block=block.name):
                if self._device.memory_is_host:
                    self._read_into(block, slot, parts)
                else:
                    self._read_and_copy(block, slot, parts)
        except BaseException:
            with contextlib.suppress(Exception):  # while others write into the slot, nobody may take it
                delivery.wait()
            raise

    def read_through(self, block: Block, slot: Slot, memory: Tensor) -> None:
        """The second half where nothing is delivered: read all of the block into ``memory`` [block.numel], which is
        page-aligned, and copy it from there. When this raises, nobody writes to ``memory`` any more, and copies out of
        it may be under way."""
        reads: list[tuple[RecordRead, int, int]] = []
        try:
            with self._device.timeline.task(LOADS_WAIT, "for the SSD", block=block.name):
                for start, stop in self._cut(block, 0, block.numel):
                    read = self._store.read(block.name, "param", start, memory[start:stop], is_urgent=True)
                    reads.append((read, start, stop))
                for read, start, stop in reads:
                    read.wait()
                    self._device.copy(Lane.H2D, slot.weights[start:stop], memory[start:stop])
        except BaseException:
            for read, _, _ in reads:  # the others still write into the memory
                with contextlib.suppress(Exception):
                    read.arrive()
            raise

    def _cut(self, block: Block, start: int, stop: int) -> Iterator[tuple[int, int]]:
        chunk_numel = self._staging.buffer_bytes // block.master.working_dtype.itemsize
        for first, last in ranges(stop - start, chunk_numel):
            yield start + first, start + last

    def _read_into(self, block: Block, slot: Slot, parts: Sequence[tuple[int, int]]) -> None:
        reads: list[RecordRead] = []
        try:
            for start, stop in parts:
                view = slot.weights[start:stop]
                reads.append(self._store.read(block.name, "param", start, view, is_urgent=True))
            for read in reads:
                read.wait()
        except BaseException:
            for read in reads:  # the others still write into the slot
                with contextlib.suppress(Exception):
                    read.arrive()
            raise

    def _read_and_copy(self, block: Block, slot: Slot, parts: Sequence[tuple[int, int]]) -> None:
        reading: deque[tuple[RecordRead, Buffer, int, int]] = deque()
        dtype = block.master.working_dtype

        def copy_one() -> None:
            read, buffer, start, stop = reading[0]
            read.wait()
            reading.popleft()
            self._device.copy(Lane.H2D, slot.weights[start:stop], buffer.view(dtype, stop - start))
            self._copying.append((self._device.record(Lane.H2D), buffer))

        try:
            for start, stop in parts:
                while self._staging.num_free == 0:
                    if not self._copying:
                        copy_one()
                    event, buffer = self._copying.popleft()
                    event.synchronize()
                    buffer.release()
                buffer = self._staging.acquire()
                view = buffer.view(dtype, stop - start)
                read = self._store.read(block.name, "param", start, view, is_urgent=True)
                reading.append((read, buffer, start, stop))
            while reading:
                copy_one()
        except BaseException:
            while reading:  # the others still write into their buffers
                read, buffer, _, _ = reading.popleft()
                with contextlib.suppress(Exception):
                    read.arrive()
                buffer.release()
            raise

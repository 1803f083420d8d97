"""Loads a block's parameters into a slot, from this process's store and from updates in RAM."""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from hf_lohan.costs.record_traffic import PARAM
from hf_lohan.device import Buffer, BufferPool, Device, Event, Lane
from hf_lohan.model import Block, ranges
from hf_lohan.store import RecordRead
from hf_lohan.timeline import LOADS_WAIT
from hf_lohan.updates import Delivery, OnDelivered
from hf_lohan.weights.slot_ring import Slot


class RowLoads(ABC):
    """Loads rows of a table of embeddings that has no slot (the annex `embedding_rows`). The computing thread uses
    it."""

    num_bytes: int
    """Bytes of rows that were copied to the device."""

    @abstractmethod
    def embed(self, block: Block, leaf: Tensor | None, ids: Tensor, padding_idx: int | None) -> Tensor:
        """Return `F.embedding` of ``ids`` and the block's table. ``leaf`` gets the gradient, as a sparse tensor of the
        table's shape; None if no gradient is needed. Raises IndexError for ids outside the table."""

    @abstractmethod
    def close(self) -> None: ...


class RecordReader(Protocol):
    """Reads part of a record into aligned host memory."""

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead: ...


@dataclass(eq=False)
class _Load:
    """The load of one block."""

    block: Block
    slot: Slot
    end: Callable[[BaseException | None], None]
    has_waited: bool = False
    """Whether nothing used the slot any more when the load began, so that a drive may fill it."""
    num_reading: int = 0
    is_whole: bool = False
    """Whether all reads are requested."""
    error: BaseException | None = None

    def end_if_done(self) -> None:
        if self.is_whole and not self.num_reading:
            self.end(self.error)


@dataclass(frozen=True, eq=False)
class _SliceRead:
    """A read of elements [start, stop) of a block."""

    load: _Load
    read: RecordRead
    buffer: Buffer | None
    """The staging buffer; None if the read goes straight to the slot."""
    start: int
    stop: int
    kind: str = PARAM
    """Kind of the record. Elements of codes and scales are bytes."""


class Decoder:
    """Decodes packed weights into slots, in the order of the H2D lane. One loader uses it, block by block."""

    def __init__(
        self, device: Device, blocks: Sequence[Block], codes_bytes: int, *, between_devices: bool = False
    ) -> None:
        """``blocks``: the blocks with packed weights. ``codes_bytes``: largest number of bytes of codes that are passed
        at a time. ``between_devices``: whether other devices also send packed weights."""
        self._device = device
        self._scales = device.empty(max(block.scales_bytes for block in blocks))
        self._codes_bytes = codes_bytes
        is_direct = device.memory_is_host and not between_devices
        self._codes = None if is_direct else device.empty(codes_bytes)

    def take_scales(self, start: int, scales: Tensor) -> None:
        """Enqueue a copy of a block's scales from byte ``start`` on. Its codes follow."""
        self._device.copy(Lane.H2D, self._scales[start : start + scales.numel()], scales)

    def load(
        self, block: Block, weights: Tensor, fetched: Tensor, bring: Callable[[Tensor, Tensor], object] | None = None
    ) -> None:
        """Enqueue the copies and the decoding of a whole block, from ``fetched`` [block.fetched_numel] in host memory
        to ``weights`` [block.numel]. ``bring(target, source)`` enqueues a copy from the host; by default
        `Device.copy`."""
        bring = bring or partial(self._device.copy, Lane.H2D)
        for part in block.fetched_parts(0, block.fetched_numel):
            content = fetched[part.first : part.last]
            if part.kind == PARAM:
                bring(weights[: content.numel()], content)
            elif part.kind == "scales":
                bring(self._scales[: content.nbytes], content.view(torch.uint8))
            else:
                codes = content.view(torch.uint8)
                for start, stop in ranges(codes.numel(), self._codes_bytes):
                    self.decode(block, weights, start, codes[start:stop], bring)

    def decode(
        self,
        block: Block,
        weights: Tensor,
        start: int,
        codes: Tensor,
        bring: Callable[[Tensor, Tensor], object] | None = None,
    ) -> None:
        """Enqueue the decoding of a block's codes from byte ``start`` on into ``weights`` [block.numel]. ``bring``: see
        `load`."""
        if self._codes is not None:
            bring = bring or partial(self._device.copy, Lane.H2D)
            bring(self._codes[: codes.numel()], codes)
            codes = self._codes[: codes.numel()]
        stop = start + codes.numel()
        for part in block.packed_slices:
            low, high = max(start, part.codes_start), min(stop, part.codes_stop)
            if low < high:
                form = part.packed
                assert form is not None
                first, last = form.elements(low - part.codes_start, high - part.codes_start)
                out, of_part = weights[part.start + first : part.start + last], codes[low - start : high - start]
                scales = self._scales[part.scales_start : part.scales_stop]
                work = partial(form.decode_, out, first, of_part, low - part.codes_start, scales)
                self._device.run(Lane.H2D, work, fills=out, reads=(of_part, scales))


class LocalWeights:
    """A `WeightSource` over this process's store and the updates that are still in RAM. Reads go through staging
    buffers, or straight to the slot if the device's memory is host memory or the store reads to the device. The reads
    of a load may begin before the reads of the previous load have ended, so the drive works while weights are verified
    and copied."""

    def __init__(
        self,
        device: Device,
        store: RecordReader,
        staging: BufferPool,
        deliver: Callable[[Block, Tensor, Event | None], Delivery],
        decoder: Decoder | None = None,
        reads_to_device: Callable[[str, str], bool] = lambda block, kind: False,
    ) -> None:
        """``deliver(block, weights, free)`` lets updates copy their part of the block to ``weights`` after ``free``.
        ``decoder`` is for blocks with packed weights. ``reads_to_device(block, kind)``: whether the store can read a
        record straight to device memory."""
        self._reads_to_device = reads_to_device
        self._decoder = decoder
        self._device = device
        self._store = store
        self._staging = staging
        self._deliver = deliver
        self._reading: deque[_SliceRead] = deque()
        self._copying: deque[tuple[Event, Buffer]] = deque()

    def begin_load(self, block: Block, slot: Slot, on_delivered: OnDelivered) -> None:
        """Request all reads of this load. Returns after the reads of earlier loads have ended."""
        self.begin_rest(block, slot, self.deliver(block, slot), on_delivered)

    def finish_loads(self) -> None:
        while self._reading:
            self._complete_one()

    def deliver(self, block: Block, slot: Slot) -> Delivery:
        """Do the first half of a load, in which updates deliver their part. Copies to the slot that are enqueued on the
        H2D lane afterwards run after the slot's last use."""
        with self._device.timeline.task(LOADS_WAIT, "for updates to be written", block=block.name):
            return self._deliver(block, slot.weights[: block.numel], slot.last_use)

    def begin_rest(self, block: Block, slot: Slot, delivery: Delivery, on_delivered: OnDelivered) -> None:
        """Do the second half of `begin_load`, which reads and copies the parts that updates do not deliver. Earlier
        reads are completed first if their buffers are needed."""

        def end(error: BaseException | None) -> None:
            if error is None:
                delivery.call_at_end(on_delivered)
                return
            with contextlib.suppress(Exception):  # updates may still write to the slot
                delivery.wait()
            on_delivered(error)

        load = _Load(block, slot, end)
        try:
            if self._reads_to_device(block.name, PARAM) and any(True for _ in delivery.ranges_to_read()):
                self._wait_for_lane()
                load.has_waited = True
            with self._device.timeline.task(LOADS_WAIT, "for the SSD", block=block.name):
                for kind, start, stop in self._parts_of(block, delivery):
                    if load.error is not None:
                        break
                    self._order_part(load, kind, start, stop)
        except BaseException as error:
            load.error = load.error or error
        load.is_whole = True
        load.end_if_done()
        while self._reading and self._reading[0].load is not load:
            self._complete_one()

    def read_through(self, block: Block, slot: Slot, memory: Tensor) -> None:
        """Do the second half of a load if updates deliver nothing. The whole block goes through page-aligned ``memory``
        [block.numel]. After an error, no read writes to ``memory`` any more, but copies may still read it."""
        assert not block.packed_slices, "packed weights are decoded on their way"
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
            for read, _, _ in reads:  # other reads still write to the memory
                with contextlib.suppress(Exception):
                    read.wait_for_bytes()
            raise

    def _parts_of(self, block: Block, delivery: Delivery) -> Iterator[tuple[str, int, int]]:
        """Yield (kind, start, stop) of each part to read. Scales precede their codes."""
        for start, stop in delivery.ranges_to_read():
            for first, last in self._cut(block, start, min(stop, block.stored_numel)):
                yield PARAM, first, last
        if block.packed_slices:
            for kind, num_bytes in (("scales", block.scales_bytes), ("codes", block.codes_bytes)):
                for first, last in ranges(num_bytes, self._staging.buffer_bytes):
                    yield kind, first, last

    def _cut(self, block: Block, start: int, stop: int) -> Iterator[tuple[int, int]]:
        chunk_numel = self._staging.buffer_bytes // block.master.working_dtype.itemsize
        for first, last in ranges(stop - start, chunk_numel):
            yield start + first, start + last

    def _order_part(self, load: _Load, kind: str, start: int, stop: int) -> None:
        buffer = None
        view = load.slot.weights[start:stop]
        is_direct = load.has_waited and self._reads_to_device(load.block.name, PARAM)  # a block may catch up
        if kind != PARAM or not (self._device.memory_is_host or is_direct):
            buffer = self._free_buffer()
            view = buffer.view(load.block.master.working_dtype if kind == PARAM else torch.uint8, stop - start)
        try:
            read = self._store.read(load.block.name, kind, start, view, is_urgent=True)
        except BaseException:
            if buffer is not None:
                buffer.release()
            raise
        load.num_reading += 1
        self._reading.append(_SliceRead(load, read, buffer, start, stop, kind))

    def _wait_for_lane(self) -> None:
        """Wait until nothing uses the slot of the next load any more, because a drive does not wait for events. The
        slot's last use is before the current end of H2D. Earlier loads end first, because compute may need them."""
        end = self._device.record(Lane.H2D)
        if not end.is_reached():
            self.finish_loads()
            end.synchronize()

    def _pass_on(self, part: _SliceRead, buffer: Buffer) -> None:
        """Enqueue the copy or the decoding of a part that was read into a buffer."""
        block, slot, numel = part.load.block, part.load.slot, part.stop - part.start
        if part.kind == PARAM:
            content = buffer.view(block.master.working_dtype, numel)
            self._device.copy(Lane.H2D, slot.weights[part.start : part.stop], content)
            return
        assert self._decoder is not None, f"{block} has packed weights"
        if part.kind == "scales":
            self._decoder.take_scales(part.start, buffer.view(torch.uint8, numel))
        else:
            self._decoder.decode(block, slot.weights, part.start, buffer.view(torch.uint8, numel))

    def _free_buffer(self) -> Buffer:
        while self._staging.num_free == 0:
            if not self._copying:
                self._complete_one()
            if self._copying:
                event, buffer = self._copying.popleft()
                event.synchronize()
                buffer.release()
        return self._staging.acquire()

    def _complete_one(self) -> None:
        """Wait for the oldest read, and copy it to its slot."""
        part = self._reading.popleft()
        load, buffer = part.load, part.buffer
        try:
            with self._device.timeline.task(LOADS_WAIT, "for the SSD", block=load.block.name):
                part.read.wait_for_bytes() if load.error is not None else part.read.wait()
            if buffer is not None and load.error is None:
                self._pass_on(part, buffer)
                self._copying.append((self._device.record(Lane.H2D), buffer))
                buffer = None
        except BaseException as error:
            load.error = load.error or error
        if buffer is not None:
            buffer.release()
        load.num_reading -= 1
        load.end_if_done()

"""Passes weights without reading the SSD. Readers of a block get updated weights from RAM, and an update in backward
borrows the old weights from the slot."""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol, TypeAlias

from torch import Tensor

from hf_lohan.device import Buffer, Device, Event, Lane
from hf_lohan.files import IoRequest
from hf_lohan.model import Block, Chunk
from hf_lohan.store import RecordRead
from hf_lohan.threads import raised_anew

OnDelivered: TypeAlias = Callable[[BaseException | None], object]
"""Takes the error of a delivery that has ended, or None if all copies are enqueued on the device's H2D lane. Called
once: immediately if the delivery has ended, else on the updating thread or the thread of a failed update."""


class UpdatesDroppedError(RuntimeError):
    """Weights were due from a step's updates, but the step was dropped. The store has the previous step's weights."""


class RamResidentBuffer:
    """Stands for a buffer if parameters stay in RAM. Nothing else uses this memory before the block's next update,
    which runs after every copy to a slot."""

    def retain(self) -> None:
        """Do nothing."""

    def release(self) -> None:
        """Do nothing."""


IN_RAM = RamResidentBuffer()
HoldsParams: TypeAlias = "Buffer | RamResidentBuffer"


@dataclass(frozen=True, eq=False)
class NewParams:
    """A chunk's parameters after its update."""

    chunk: Chunk
    param: Tensor | None = None
    """Tensor [chunk.numel], in RAM until it is written; None before the update."""
    buffer: HoldsParams | None = None
    """The buffer of `param`."""


class Delivery:
    """A transfer of new parameters from their updates to a slot."""

    def __init__(self, weights: Tensor, chunks: Sequence[Chunk] = (), to_come: Collection[Chunk] = ()) -> None:
        """``weights``: the slot's tensor [block.numel]. ``chunks``: the delivered chunks, in order. ``to_come``: the
        chunks among these that are not updated yet."""
        self.weights = weights
        self.chunks = chunks
        self.to_come = set(to_come)
        self.copying: list[tuple[Event, HoldsParams]] = []
        """Copies to the slot from buffers that are being written to the store."""
        self._lock = threading.Lock()
        self._has_ended = not self.to_come
        self._error: BaseException | None = None
        self._on_delivered: OnDelivered | None = None

    def ranges_to_read(self) -> Iterator[tuple[int, int]]:
        """Yield [start, stop) of the block's elements that are not delivered. The store has these."""
        start = 0
        for chunk in self.chunks:
            if start < chunk.start:
                yield start, chunk.start
            start = chunk.stop
        if start < self.weights.numel():
            yield start, self.weights.numel()

    def call_at_end(self, on_delivered: OnDelivered) -> None:
        """Call ``on_delivered`` when the delivery has ended."""
        self._free_copied()
        with self._lock:
            if not self._has_ended:
                self._on_delivered = on_delivered
                return
        on_delivered(self._error)

    def wait(self) -> None:
        """Wait for the end of the delivery. Raises its error."""
        errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self.call_at_end(errors.put)
        if (error := errors.get()) is not None:
            raise error

    def _free_copied(self) -> None:
        for copied, buffer in self.copying:
            copied.synchronize()
            buffer.release()
        self.copying.clear()

    def end_delivery(self, error: BaseException | None) -> None:
        """End the delivery, because no more chunks will be delivered. Called by the updates."""
        with self._lock:
            self._has_ended, self._error = True, error
            on_delivered = self._on_delivered
        if on_delivered is not None:
            on_delivered(error)


class Handover:
    """Knows which chunks are still to be updated, and which new parameters are in RAM until they are written. A reader
    of a block first gets the new parameters from this object, and reads only the rest from the store."""

    def __init__(self, device: Device, device_of_experts: Device | None = None) -> None:
        """``device``: copies new parameters to readers. ``device_of_experts``: copies parameters of experts that belong
        to one rank; by default ``device``."""
        self._devices = device, device_of_experts or device
        # Callers enter the lock and not the condition. `IoEngine` says why.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._new: dict[Block, dict[Chunk, NewParams]] = {}
        self._deliveries: dict[Block, Delivery] = {}
        """The deliveries that have not ended."""
        self._cause: BaseException | None = None

    # Called by updates.

    def announce(self, chunks: Iterable[Chunk]) -> None:
        """Announce updates of these chunks. Their readers then wait for these updates."""
        with self._lock:
            for chunk in chunks:
                self._new.setdefault(chunk.block, {})[chunk] = NewParams(chunk)

    def hand_over(self, chunk: Chunk, param: Tensor, buffer: HoldsParams) -> tuple[NewParams, Event | None]:
        """Hand over the chunk's new parameters ``param`` [chunk.numel], in ``buffer``. They must not change before
        `note_written`, nor before the returned event, if it is not None."""
        new = NewParams(chunk, param, buffer)
        with self._lock:
            self._new.setdefault(chunk.block, {})[chunk] = new
            delivery = self._deliveries.get(chunk.block)
            if delivery is None or chunk not in delivery.to_come:
                self._changed.notify_all()
                return new, None
        # Nothing else writes to this part of the slot, and readers are still waiting.
        device = self._device_for(chunk.block)
        device.copy(Lane.H2D, delivery.weights[chunk.start : chunk.stop], param)
        copied = device.record(Lane.H2D)
        with self._lock:
            delivery.to_come.discard(chunk)
            is_last = not delivery.to_come and self._deliveries.pop(chunk.block, None) is not None
            self._changed.notify_all()
        if is_last:
            delivery.end_delivery(None)
        return new, copied

    def note_written(self, new: NewParams) -> None:
        """Record that the store has the parameters. This may be called after the chunk's next update has begun."""
        with self._lock:
            chunks = self._new.get(new.chunk.block, {})
            if chunks.get(new.chunk) is new:
                del chunks[new.chunk]

    def forget_written(self) -> None:
        """Forget all new parameters, because they are in the store, even if `note_written` was not called yet."""
        with self._lock:
            for chunks in self._new.values():
                for chunk in [chunk for chunk, new in chunks.items() if new.param is not None]:
                    del chunks[chunk]

    def call_off(self) -> None:
        """Cancel all announced updates. Called on the updating thread, which no interrupt ends half-way."""
        with self._lock:
            self._new.clear()
        self._end_all(
            lambda: UpdatesDroppedError(
                "these weights were due from the updates of a step that was dropped; read them again"
            )
        )

    def abort(self, cause: BaseException) -> None:
        """End all deliveries with an error, because the updates will never be finished."""
        with self._lock:
            self._cause = cause
            self._new.clear()
        self._end_all(lambda: raised_anew(cause))

    def _is_outstanding(self, block: Block) -> bool:
        """Return whether some chunk of the block is still to be updated."""
        with self._lock:
            return any(new.param is None for new in self._new.get(block, {}).values())

    def _end_all(self, error: Callable[[], BaseException]) -> None:
        with self._lock:
            deliveries, self._deliveries = list(self._deliveries.values()), {}
            self._changed.notify_all()
        for delivery in deliveries:
            delivery.end_delivery(error())

    def _device_for(self, block: Block) -> Device:
        return self._devices[block.owner is not None]

    # Called by readers.

    def deliver(self, block: Block, weights: Tensor, free: Event | None = None) -> Delivery:
        """Copy the block's new parameters to ``weights``. Parameters that wait to be written are copied now, and others
        when they are updated. No copy runs before ``free``, which is compute's last read of ``weights``. Later copies
        to ``weights`` on the device's H2D lane also run after ``free``. Raises the error of failed updates."""
        if free is not None:
            if self._is_outstanding(block):
                # The lane must not wait for compute, because compute may wait for new weights, which use the same lane.
                free.synchronize()
            else:
                self._device_for(block).wait(Lane.H2D, free)
        with self._lock:
            # A delivery to a forgotten slot may still run, and must end first.
            self._changed.wait_for(lambda: self._cause is not None or block not in self._deliveries)
            if self._cause is not None:
                raise raised_anew(self._cause)
            coming = sorted(self._new.get(block, {}).values(), key=lambda new: new.chunk.start)
            in_ram = [(new.chunk, new.param, new.buffer) for new in coming if new.param is not None and new.buffer]
            for _, _, buffer in in_ram:
                buffer.retain()
            to_come = [new.chunk for new in coming if new.param is None]
            delivery = Delivery(weights, [new.chunk for new in coming], to_come)
            if to_come:
                self._deliveries[block] = delivery
        for chunk, param, buffer in in_ram:
            device = self._device_for(block)
            device.copy(Lane.H2D, weights[chunk.start : chunk.stop], param)
            delivery.copying.append((device.record(Lane.H2D), buffer))
        return delivery

    def settle(self, block: Block) -> None:
        """Wait until no announced update of the block is outstanding. Raises the error of failed updates."""
        with self._lock:
            self._changed.wait_for(lambda: self._cause is not None or not self._is_outstanding(block))
            if self._cause is not None:
                raise raised_anew(self._cause)

    def copy_new(self, block: Block, start: int, out: Tensor) -> list[tuple[int, int]] | None:
        """Copy the block's new parameters that are not in the store yet to ``out``. ``out`` is on the host, and begins
        with element ``start``. Returns the ranges to read from the store; None if an update is outstanding."""
        stop = start + out.numel()
        with self._lock:
            news = [new for new in self._new.get(block, {}).values() if new.chunk.start < stop > start < new.chunk.stop]
            if any(new.param is None for new in news):
                return None
            for new in news:
                assert new.buffer is not None
                new.buffer.retain()
        rest, end = [], start
        for new in sorted(news, key=lambda new: new.chunk.start):
            assert new.param is not None
            assert new.buffer is not None
            first, last = max(start, new.chunk.start), min(stop, new.chunk.stop)
            out[first - start : last - start].copy_(new.param[first - new.chunk.start : last - new.chunk.start])
            new.buffer.release()
            if end < first:
                rest.append((end, first))
            end = last
        if end < stop:
            rest.append((end, stop))
        return rest


class BorrowedSlot:
    """A block's weights for the optimizer, from the slot that backward uses. The slot is overwritten only after it is
    given back or taken back, or after the copy from it has arrived."""

    def __init__(self, device: Device, weights: Tensor, give_back: Callable[[], None]) -> None:
        """``weights``: the block's tensor [numel], on the device."""
        self._device = device
        self._weights = weights
        self._give_back: Callable[[], None] | None = give_back
        self._lock = threading.Lock()

    def start_read(self, start_numel: int, out: Tensor) -> RecordRead | None:
        """Fill ``out`` [numel], on the host, with the elements from ``start_numel`` on. May be called once, after a
        gradient of the block has arrived, because then the block's weights have arrived too. Returns None if the slot
        was taken back; the store has the same weights."""
        give_back = self._end()
        if give_back is None:
            return None
        self._device.copy(Lane.D2H_ASIDE, out, self._weights[start_numel : start_numel + out.numel()])
        return _SlotRead(self._device.record(Lane.D2H_ASIDE), give_back)

    def give_back(self) -> None:
        """Give the slot back, because the weights are not needed, or were already read, or another load needs the slot.
        Any thread may call this."""
        give_back = self._end()
        if give_back is not None:
            give_back()

    def _end(self) -> Callable[[], None] | None:
        """Return the function that gives the slot back, in the first call. Later calls return None."""
        with self._lock:
            give_back, self._give_back = self._give_back, None
        return give_back


class WeightChange(enum.IntEnum):
    """An event that may have changed a rank's weights. All ranks make the same changes in the same order."""

    STEP = 0
    DROP = 1
    WRITE = 2

    @property
    def words(self) -> str:
        """The change as a phrase that follows the rank's name in a message."""
        return (
            "ended a step with step()",
            "dropped the gradients of a step (zero_grad())",
            "wrote weights between steps (gathered_parameters, or a checkpoint)",
        )[self]


class WeightSlots(Protocol):
    """Interface to the weights on the device, for updates."""

    is_half_changed: bool
    """Whether an exception ended `changing` before `end_step` was called. The caller must then call `end_step`."""

    def borrow_slot(self, block: Block) -> BorrowedSlot | None:
        """Borrow the slot with the block's weights that backward uses, so that the update does not read them again.
        Returns None if compute needs all slots."""

    def forget(self, blocks: Iterable[Block]) -> None:
        """Forget the weights of these blocks on the device, because they differ from the store."""

    def changing(self) -> AbstractContextManager[None]:
        """Return a context for the code that calls `end_step`. In it the step may already have changed records."""

    def end_step(self, changed: Iterable[Block], change: WeightChange = WeightChange.STEP) -> None:
        """Forget the weights of the blocks that a step has changed. All ranks call this for the same steps."""


def give_back(borrowed: BorrowedSlot | None) -> None:
    if borrowed is not None:
        borrowed.give_back()


class _SlotRead(RecordRead):
    """A copy from a slot, whose content was verified when it was loaded."""

    def __init__(self, copied: Event, give_back: Callable[[], None]) -> None:
        super().__init__(IoRequest.finished())
        self._copied = copied
        self._give_back: Callable[[], None] | None = give_back

    def wait_for_bytes(self) -> None:
        """See `RecordRead.wait_for_bytes`. Called by one thread."""
        self._copied.synchronize()
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()

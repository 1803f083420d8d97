"""Weights that are not read from the SSD: updated weights go from RAM to whoever needs the block, and an update in
backward borrows the old weights from the slot."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import TypeAlias

from torch import Tensor

from hf_lohan.device import Buffer, Device, Event, Lane
from hf_lohan.files import IoRequest
from hf_lohan.model import Block, Chunk
from hf_lohan.store import RecordRead
from hf_lohan.threads import raised_anew

Ended = Callable[[BaseException | None], None]


class UpdatesDroppedError(RuntimeError):
    """The step was dropped whose updates were to bring weights: those of the step before are in the store."""


class InRam:
    """In the place of a buffer: where parameters live in RAM, their memory is nobody else's before the block's next
    update, and that comes behind every copy to a slot."""

    def retain(self) -> None:
        """Nothing to count."""

    def release(self) -> None:
        """Nothing to give back."""


IN_RAM = InRam()
HoldsParams: TypeAlias = "Buffer | InRam"


@dataclass(frozen=True, eq=False)
class NewParams:
    """What one update makes of a chunk's parameters."""

    chunk: Chunk
    param: Tensor | None = None
    """[chunk.numel], in RAM until it is written; None while it is still to come."""
    buffer: HoldsParams | None = None
    """Where that lies."""


class Delivery:
    """New parameters on their way from their updates into a slot."""

    def __init__(self, weights: Tensor, chunks: Sequence[Chunk] = (), to_come: Collection[Chunk] = ()) -> None:
        """``weights``: the slot's [block.numel]; ``chunks``: what is delivered, in order; ``to_come``: those of them
        that are still to be updated."""
        self.weights = weights
        self.chunks = chunks
        self.to_come = set(to_come)
        self.copying: list[tuple[Event, HoldsParams]] = []
        """What is copied to the slot out of buffers from which it is being written."""
        self._lock = threading.Lock()
        self._has_ended = not self.to_come
        self._error: BaseException | None = None
        self._ended: Ended | None = None

    def ranges_to_read(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of the block's elements that do not come: they are current in the store."""
        start = 0
        for chunk in self.chunks:
            if start < chunk.start:
                yield start, chunk.start
            start = chunk.stop
        if start < self.weights.numel():
            yield start, self.weights.numel()

    def when_ended(self, ended: Ended) -> None:
        """Call ``ended`` once, when the copies of all of it are enqueued on the device's H2D lane, with None, or with
        what made that impossible: at once, or on the thread that updates, or on the one on which an update failed."""
        self._free_copied()
        with self._lock:
            if not self._has_ended:
                self._ended = ended
                return
        ended(self._error)

    def wait(self) -> None:
        """Return when it has ended. Raises what made it impossible."""
        errors: SimpleQueue[BaseException | None] = SimpleQueue()
        self.when_ended(errors.put)
        error = errors.get()
        if error is not None:
            raise error

    def _free_copied(self) -> None:
        for copied, buffer in self.copying:
            copied.synchronize()
            buffer.release()
        self.copying.clear()

    def end(self, error: BaseException | None) -> None:
        """For who delivers: no more will come."""
        with self._lock:
            self._has_ended, self._error = True, error
            ended = self._ended
        if ended is not None:
            ended(error)


class Handover:
    """Knows of each chunk whose update is outstanding, and of each whose new parameters are in RAM until they are
    written. Whoever reads a block asks here first, and reads only the rest from the store."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Entered itself, not through the condition: see `IoEngine`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._new: dict[Block, dict[Chunk, NewParams]] = {}
        self._deliveries: dict[Block, Delivery] = {}
        """Those that have not ended."""
        self._cause: BaseException | None = None

    # Whoever updates.

    def announce(self, chunks: Iterable[Chunk]) -> None:
        """These will be updated: from here on, who reads them waits for that."""
        with self._lock:
            for chunk in chunks:
                self._new.setdefault(chunk.block, {})[chunk] = NewParams(chunk)

    def hand_over(self, chunk: Chunk, param: Tensor, buffer: HoldsParams) -> tuple[NewParams, Event | None]:
        """The chunk's new parameters are ``param`` [chunk.numel], in ``buffer``. They must not change before they are
        `written`, nor before the event is reached, if somebody waits for them."""
        new = NewParams(chunk, param, buffer)
        with self._lock:
            self._new.setdefault(chunk.block, {})[chunk] = new
            delivery = self._deliveries.get(chunk.block)
            if delivery is None or chunk not in delivery.to_come:
                return new, None
        # Nobody else writes to this part of the slot, and who waits for it waits on.
        self._device.copy(Lane.H2D, delivery.weights[chunk.start : chunk.stop], param)
        copied = self._device.record(Lane.H2D)
        with self._lock:
            delivery.to_come.discard(chunk)
            is_last = not delivery.to_come and self._deliveries.pop(chunk.block, None) is not None
            self._changed.notify_all()
        if is_last:
            delivery.end(None)
        return new, copied

    def written(self, new: NewParams) -> None:
        """They are in the store. May be told late: when the chunk is in its next update already."""
        with self._lock:
            of_block = self._new.get(new.chunk.block, {})
            if of_block.get(new.chunk) is new:
                del of_block[new.chunk]

    def forget_written(self) -> None:
        """All that was handed over is in the store, even if `written` was not told yet."""
        with self._lock:
            for of_block in self._new.values():
                for chunk in [chunk for chunk, new in of_block.items() if new.param is not None]:
                    del of_block[chunk]

    def call_off(self) -> None:
        """No update is outstanding any more. On the thread that updates, which no interrupt ends half-way."""
        with self._lock:
            self._new.clear()
        self._end_all(
            lambda: UpdatesDroppedError(
                "the step whose updates were to bring these weights was dropped; read them again"
            )
        )

    def abort(self, cause: BaseException) -> None:
        """The updates will never be finished."""
        with self._lock:
            self._cause = cause
            self._new.clear()
        self._end_all(lambda: raised_anew(cause))

    def _is_outstanding(self, block: Block) -> bool:
        """Whether some of it is still to be updated."""
        with self._lock:
            return any(new.param is None for new in self._new.get(block, {}).values())

    def _end_all(self, error: Callable[[], BaseException]) -> None:
        with self._lock:
            deliveries, self._deliveries = list(self._deliveries.values()), {}
            self._changed.notify_all()
        for delivery in deliveries:
            delivery.end(error())

    # Whoever reads.

    def deliver(self, block: Block, weights: Tensor, free: Event | None = None) -> Delivery:
        """Have what is still to be updated of the block put into ``weights`` as it becomes new, and what waits to be
        written at once; not before ``free``, when compute has last read them. What is copied to them from now on by the
        device's H2D lane comes behind that, too. Raises what made that impossible."""
        if free is not None:
            if self._is_outstanding(block):
                # The lane must not wait for compute: updates bring others what that compute waits for, by the same one.
                free.synchronize()
            else:
                self._device.wait(Lane.H2D, free)
        with self._lock:
            # One may be under way to a slot that has been forgotten: what it was to have goes there first.
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
            self._device.copy(Lane.H2D, weights[chunk.start : chunk.stop], param)
            delivery.copying.append((self._device.record(Lane.H2D), buffer))
        return delivery


class BorrowedSlot:
    """Of a slot that is not overwritten until the loan is given back, or what was read of it has arrived."""

    def __init__(self, device: Device, weights: Tensor, give_back: Callable[[], None]) -> None:
        """``weights``: the block's [numel], on the device."""
        self._device = device
        self._weights = weights
        self._give_back: Callable[[], None] | None = give_back

    def read(self, start_numel: int, out: Tensor) -> RecordRead:
        """Fill ``out`` [numel], on the host, with the elements from ``start_numel`` on: once, when a gradient of the
        block has arrived, so that the block has, too."""
        give_back, self._give_back = self._give_back, None
        assert give_back is not None, "the loan is over"
        self._device.copy(Lane.D2H_ASIDE, out, self._weights[start_numel : start_numel + out.numel()])
        return _LoanedRead(self._device.record(Lane.D2H_ASIDE), give_back)

    def give_back(self) -> None:
        """The weights are not wanted, or read already."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()


def give_back(loan: BorrowedSlot | None) -> None:
    """If there is one."""
    if loan is not None:
        loan.give_back()


class _LoanedRead(RecordRead):
    """Of what a slot holds, which was verified when it was brought there."""

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

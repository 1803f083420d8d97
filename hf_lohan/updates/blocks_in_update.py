"""Which blocks' records a finished step is still changing, and who wants their new parameters at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_lohan.device import Device, Event, Lane
from hf_lohan.model import Block, Chunk
from hf_lohan.updates.until_written import UntilWritten


@dataclass(eq=False)
class Delivery:
    """New parameters on their way from their updates into a slot: they are in RAM then, and need not be read again."""

    weights: Tensor
    """The slot's [block.numel]."""
    chunks: Sequence[Chunk] = ()
    """What will come, in order; all else is to be read from the store, where it is current, or there already."""
    updates: BlocksInUpdate | None = None
    """Who delivers; None: nobody, for nothing comes."""
    missing: set[Chunk] = field(default_factory=set)
    copying: list[tuple[Event, UntilWritten]] = field(default_factory=list)
    """What is copied to the slot from buffers out of which it is being written."""
    is_cancelled: bool = False
    ended: Callable[[BaseException | None], None] | None = None

    def wait(self) -> None:
        """Return when the copies of all of it are enqueued on the device's H2D lane. Raises what made that
        impossible."""
        self.give_back()
        if self.updates is not None:
            self.updates.wait_for(self)

    def when_ended(self, ended: Callable[[BaseException | None], None]) -> None:
        """Instead of `wait`: call ``ended`` when that would return, with what it would raise; at once, or on the thread
        that updates, or on the one on which an update failed."""
        self.give_back()
        if self.updates is None:
            ended(None)
        else:
            self.updates.call_when_ended(self, ended)

    def give_back(self) -> None:
        """The buffers may change once they are copied."""
        for copied, until_written in self.copying:
            copied.synchronize()
            until_written.one_less()
        self.copying.clear()

    def ranges_to_read(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of the block's elements that do not come."""
        start = 0
        for chunk in self.chunks:
            if start < chunk.start:
                yield start, chunk.start
            start = chunk.stop
        if start < self.weights.numel():
            yield start, self.weights.numel()


@dataclass(frozen=True, eq=False)
class _Unwritten:
    """A chunk's new parameters, [chunk.numel], in RAM until they are in the store."""

    param: Tensor
    until_written: UntilWritten


class BlocksInUpdate:
    """Chunks whose update is outstanding, by block. An update first hands over its new parameters, and is over when
    they are in the store. Whoever reads a block asks here first, and has of it what is in RAM."""

    def __init__(self, device: Device) -> None:
        self._device = device
        # Entered itself, not through the condition: see `IoEngine`.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._unwritten: dict[Block, set[Chunk]] = {}
        self._to_come: dict[Block, set[Chunk]] = {}
        self._in_ram: dict[Chunk, _Unwritten] = {}
        self._deliveries: dict[Block, Delivery] = {}
        self._cause: BaseException | None = None

    # Whoever updates.

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._lock:
            for chunk in chunks:
                self._in_ram.pop(chunk, None)
                self._unwritten.setdefault(chunk.block, set()).add(chunk)
                self._to_come.setdefault(chunk.block, set()).add(chunk)

    def hand_over(self, chunk: Chunk, param: Tensor, until_written: UntilWritten) -> Event | None:
        """The chunk's new parameters are ``param`` [chunk.numel]. They must not change before they are written, nor
        before the event is reached, if somebody wants them at once."""
        with self._lock:
            self._to_come.get(chunk.block, set()).discard(chunk)
            self._in_ram[chunk] = _Unwritten(param, until_written)
            delivery = self._deliveries.get(chunk.block)
            if delivery is None or chunk not in delivery.missing:
                return None
        # Nobody else writes to this part of the slot, and who waits for it waits on.
        self._device.copy(Lane.H2D, delivery.weights[chunk.start : chunk.stop], param)
        copied = self._device.record(Lane.H2D)
        with self._lock:
            delivery.missing.discard(chunk)
            self._changed.notify_all()
        self._tell(delivery)
        return copied

    def discard(self, chunk: Chunk) -> None:
        """The chunk's new version is in the store. May come late: when the chunk is in its next update already."""
        with self._lock:
            new = self._in_ram.get(chunk)
            is_late = chunk in self._to_come.get(chunk.block, ()) or (new is not None and new.until_written.is_in_use)
            if not is_late:
                self._unwritten.get(chunk.block, set()).discard(chunk)
                self._in_ram.pop(chunk, None)
                self._changed.notify_all()

    def forget_unwritten(self) -> None:
        """All is written, even if `discard` was not called yet."""
        with self._lock:
            self._in_ram.clear()

    def clear(self) -> None:
        """No update is outstanding any more. On the thread that updates, which no interrupt ends between telling who
        waits and forgetting it."""
        with self._lock:
            deliveries = dict(self._deliveries)
            for delivery in deliveries.values():
                delivery.is_cancelled = bool(delivery.missing)
            self._unwritten.clear()
            self._to_come.clear()
            self._in_ram.clear()
            self._changed.notify_all()
        for block, delivery in deliveries.items():
            self._tell(delivery)
            with self._lock:
                if self._deliveries.get(block) is delivery:
                    del self._deliveries[block]

    def abort(self, cause: BaseException) -> None:
        """The updates will never be finished."""
        with self._lock:
            self._cause = cause
            self._in_ram.clear()
            self._changed.notify_all()
            deliveries = list(self._deliveries.values())
        for delivery in deliveries:
            self._tell(delivery)

    # Whoever reads.

    def order(self, block: Block, weights: Tensor) -> Delivery:
        """Have what is still to be updated of the block put into ``weights`` as it becomes new, and what waits to be
        written at once; return when the rest is current in the store. Raises what made that impossible."""
        with self._lock:
            before = self._deliveries.get(block)
            if before is not None:  # it was forgotten before it came: what it was to have goes there first
                self._wait_until(lambda: self._has_ended(before))
            coming = set(self._to_come.get(block, ()))
            in_ram = {chunk: new for chunk, new in self._in_ram.items() if chunk.block is block}
            in_ram = {chunk: new for chunk, new in in_ram.items() if new.until_written.one_more()}
            in_order = sorted({*coming, *in_ram}, key=lambda chunk: chunk.start)
            delivery = self._deliveries[block] = Delivery(weights, in_order, self, coming)
        for chunk, new in in_ram.items():
            self._device.copy(Lane.H2D, weights[chunk.start : chunk.stop], new.param)
            delivery.copying.append((self._device.record(Lane.H2D), new.until_written))
        try:
            with self._lock:
                gone = self._unwritten.get(block, set()) - set(in_order)
                self._wait_until(lambda: not gone & self._unwritten.get(block, set()))
        except BaseException:
            delivery.give_back()
            raise
        return delivery

    def wait_for(self, delivery: Delivery) -> None:
        """See `Delivery.wait`."""
        with self._lock:
            self._changed.wait_for(lambda: self._has_ended(delivery))
            error = self._error_of(delivery)
        if error is not None:
            raise error

    def call_when_ended(self, delivery: Delivery, ended: Callable[[BaseException | None], None]) -> None:
        """See `Delivery.when_ended`."""
        with self._lock:
            delivery.ended = ended
        self._tell(delivery)

    def _tell(self, delivery: Delivery) -> None:
        """Call ``ended`` if it is time, once."""
        with self._lock:
            if delivery.ended is None or not self._has_ended(delivery):
                return
            ended, delivery.ended = delivery.ended, None
            error = self._error_of(delivery)
        ended(error)

    def _has_ended(self, delivery: Delivery) -> bool:
        return self._cause is not None or delivery.is_cancelled or not delivery.missing

    def _error_of(self, delivery: Delivery) -> BaseException | None:
        """Why it ended before all of it had come."""
        if self._cause is None and delivery.is_cancelled:
            return RuntimeError("the step whose updates were to bring these weights was dropped; read them again")
        return self._cause

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._cause is not None or is_so())
        if self._cause is not None:
            raise self._cause

"""Which blocks' records a finished step is still changing, and who wants their new parameters at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from hf_lohan.blocks import Block, Chunk
from hf_lohan.device import Device, Event, Lane


@dataclass(eq=False)
class Delivery:
    """New parameters on their way from their updates into a slot: they are in RAM then, and need not be read again."""

    weights: Tensor
    """The slot's [block.numel]."""
    chunks: Sequence[Chunk] = ()
    """What will come, in order; all else is to be read from the store, where it is current."""
    updates: BlocksInUpdate | None = None
    """Who delivers; None: nobody, for nothing comes."""
    missing: set[Chunk] = field(default_factory=set)
    is_cancelled: bool = False

    def wait(self) -> None:
        """Return when the copies of all of it are enqueued on the device's H2D lane. Raises what made that
        impossible."""
        if self.updates is not None:
            self.updates.wait_for(self)

    def ranges_to_read(self) -> Iterator[tuple[int, int]]:
        """[start, stop) of the block's elements that do not come."""
        start = 0
        for chunk in self.chunks:
            if start < chunk.start:
                yield start, chunk.start
            start = chunk.stop
        if start < self.weights.numel():
            yield start, self.weights.numel()


class BlocksInUpdate:
    """Chunks whose update is outstanding, by block. An update first hands over its new parameters, and is over when
    they are in the store. Whoever reads a block asks here first."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changed = threading.Condition()
        self._unwritten: dict[Block, set[Chunk]] = {}
        self._to_come: dict[Block, set[Chunk]] = {}
        self._deliveries: dict[Block, Delivery] = {}
        self._cause: BaseException | None = None

    # Whoever updates.

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._changed:
            for chunk in chunks:
                self._unwritten.setdefault(chunk.block, set()).add(chunk)
                self._to_come.setdefault(chunk.block, set()).add(chunk)

    def hand_over(self, chunk: Chunk, param: Tensor) -> Event | None:
        """The chunk's new parameters are ``param`` [chunk.numel]. They must not change before the event is reached;
        None: nobody wants them."""
        with self._changed:
            self._to_come.get(chunk.block, set()).discard(chunk)
            delivery = self._deliveries.get(chunk.block)
            if delivery is None or chunk not in delivery.missing:
                return None
        # Nobody else writes to this part of the slot, and who waits for it waits on.
        self._device.copy(Lane.H2D, delivery.weights[chunk.start : chunk.stop], param)
        copied = self._device.record(Lane.H2D)
        with self._changed:
            delivery.missing.discard(chunk)
            self._changed.notify_all()
        return copied

    def discard(self, chunk: Chunk) -> None:
        """The chunk's new version is in the store."""
        with self._changed:
            self._unwritten.get(chunk.block, set()).discard(chunk)
            self._changed.notify_all()

    def clear(self) -> None:
        """No update is outstanding any more."""
        with self._changed:
            for delivery in self._deliveries.values():
                delivery.is_cancelled = bool(delivery.missing)
            self._deliveries.clear()
            self._unwritten.clear()
            self._to_come.clear()
            self._changed.notify_all()

    def abort(self, cause: BaseException) -> None:
        """The updates will never be finished."""
        with self._changed:
            self._cause = cause
            self._changed.notify_all()

    # Whoever reads.

    def order(self, block: Block, weights: Tensor) -> Delivery:
        """Have what is still to be updated of the block put into ``weights`` as it becomes new; return when the rest is
        current in the store. Raises what made that impossible."""
        with self._changed:
            coming = set(self._to_come.get(block, ()))
            in_order = sorted(coming, key=lambda chunk: chunk.start)
            delivery = Delivery(weights, in_order, self, coming)
            self._deliveries[block] = delivery
            gone = self._unwritten.get(block, set()) - set(in_order)
            self._wait_until(lambda: not gone & self._unwritten.get(block, set()))
        return delivery

    def wait_for(self, delivery: Delivery) -> None:
        """See `Delivery.wait`."""
        with self._changed:
            self._wait_until(lambda: delivery.is_cancelled or not delivery.missing)
            if delivery.is_cancelled:
                raise RuntimeError("the step whose updates were to bring these weights was dropped; read them again")

    def _wait_until(self, is_so: Callable[[], bool]) -> None:
        self._changed.wait_for(lambda: self._cause is not None or is_so())
        if self._cause is not None:
            raise self._cause

"""Load blocks ahead of their use, in the order of the schedule, as far as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hf_lohan.device import Lane
from hf_lohan.model import Block
from hf_lohan.weights.block_loader import BlockLoader
from hf_lohan.weights.next_load import NextLoad
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.source import WeightSource


class Prefetcher(BlockLoader):
    """One thread that has a `WeightSource` load what the `LoadSchedule` says.

    Backpressure comes from the slots: a block is loaded ahead only into a slot whose block is needed later than the
    new one, or not at all. What is needed now and was not foreseen (a skipped layer, a saved weight asked for out of
    order) is requested, and goes first.
    """

    def __init__(self, ring: SlotRing, source: WeightSource, forward_order: Sequence[Block]) -> None:
        schedule = LoadSchedule(forward_order, ring.num_slots, carries_on=True)
        super().__init__(ring, schedule)
        self._source = source
        self._next_load = NextLoad(schedule, ring.slots, ring.is_here, lambda slot: slot.is_claimable)
        self._start()

    # The compute thread's side.

    def _order_loads(self) -> None:
        self._ring.changed.notify_all()  # the thread looks for itself

    def _order_urgent(self, block: Block) -> None:
        self._next_load.urgent.append(block)
        try:
            self._ring.changed.notify_all()
            self._ring.changed.wait_for(lambda: self._ring.is_here(block) or self._is_broken)
            self._raise_failure()
        finally:
            self._next_load.urgent.remove(block)

    # The prefetch thread's side.

    def _load_until_closed(self) -> None:
        while True:
            with self._ring.lock:
                self._ring.changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed:
                    return
                target = self._next()
                assert target is not None
                block, slot = target
                self._next_load.take(block, slot)
                self._ring.claim(slot, block)
            try:
                self._source.load(block, slot).when_ended(partial(self._end_load, block, slot))
            except BaseException as error:
                self._end_load(block, slot, error)

    def _next(self) -> tuple[Block, Slot] | None:
        """What to load next and where. Caller holds the lock."""
        return self._next_load.find() if self._failure is None else None

    def _end_load(self, block: Block, slot: Slot, error: BaseException | None) -> None:
        """All of the block is on its way into the slot, or never will be; on this thread, or as `Delivery` says. The
        next load does not wait for that: its block may be needed first."""
        ready = self._ring.device.record(Lane.H2D)
        with self._ring.lock:
            if error is None:
                self._ring.publish(slot, ready)
            else:
                if slot.block is block:  # else it was forgotten meanwhile, and nobody waits for it
                    self._failure = error
                self._ring.abandon(slot)

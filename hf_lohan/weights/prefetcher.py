"""Load blocks ahead of their use, in the order of the schedule, as far as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hf_lohan.device import Event, Lane
from hf_lohan.model import Block
from hf_lohan.threads import Owner, raised_anew, start_thread
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.weights.schedule import NEVER, LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.source import WeightSource


class Prefetcher:
    """One thread that has a `WeightSource` load what the `LoadSchedule` says.

    Backpressure comes from the slots: a block is loaded ahead only into a slot whose block is needed later than the
    new one, or not at all. What is needed now and was not foreseen (a skipped layer, a saved weight asked for out of
    order) is requested, and goes first.
    """

    def __init__(self, ring: SlotRing, source: WeightSource, forward_order: Sequence[Block]) -> None:
        self._ring = ring
        self._source = source
        num_slots = {size_class: len(slots) for size_class, slots in ring.slots.items()}
        self._schedule = LoadSchedule(forward_order, num_slots)
        self._urgent: list[Block] = []
        self._failure: BaseException | None = None
        self._thread_ended_by: BaseException | None = None
        self._is_closed = False
        self._owner = Owner()
        self.num_unforeseen = 0
        self._thread = start_thread(self._run, "lohan-prefetch", beside_kernels=ring.device.shares_cores)

    # The compute thread's side.

    def begin_pass(self, *, is_training: bool) -> None:
        """A forward starts, with its backward if training."""
        with self._ring.lock:
            self._schedule.begin(is_training=is_training)
            self._failure = None  # what could not be read ahead may be readable now
            self._ring.changed.notify_all()

    def foresee(self, *, is_training: bool) -> None:
        """Start loading what the next such pass will need first."""
        with self._ring.lock:
            self._schedule.foresee(is_training=is_training)
            self._ring.changed.notify_all()

    def end_pass(self) -> None:
        """The pass is complete: its order is what the next one will follow."""
        with self._ring.lock:
            self._schedule.end()
            self._ring.changed.notify_all()  # a pass may go on that it came in between

    def cancel_pass(self) -> None:
        """The pass broke off."""
        with self._ring.lock:
            self._schedule.cancel()
            self._failure = None

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot:
        """Pin `block`, waiting for its load to be enqueued; compute enqueued from now on may use the slot.
        ``for_operation``: one that reads a weight of it, not a module that owns it."""
        if not self._owner.is_here:
            raise RuntimeError("backward runs in a forked child, where no thread brings weights; run it in its parent")
        device = self._ring.device
        with device.timeline.task(COMPUTE_WAITS, "weights", block=block.name), self._ring.lock:
            (self._schedule.use_for_operation if for_operation else self._schedule.use)(block)
            slot, ready = self._pin(block)
        device.wait(Lane.COMPUTE, ready)
        return slot

    def _pin(self, block: Block) -> tuple[Slot, Event]:
        """Caller holds the lock."""
        slot = self._ring.pin(block)
        if slot is None:
            self.num_unforeseen += 1
            self._urgent.append(block)
            try:
                self._ring.changed.notify_all()
                self._ring.changed.wait_for(lambda: self._ring.is_here(block) or self._is_broken)
                self._raise_failure()
            finally:
                self._urgent.remove(block)
            slot = self._ring.pin(block)
            assert slot is not None
        self._ring.changed.notify_all()
        self._ring.changed.wait_for(lambda: slot.ready is not None or self._is_broken)
        self._raise_failure()
        assert slot.ready is not None
        return slot, slot.ready

    @property
    def _is_broken(self) -> bool:
        return self._failure is not None or self._thread_ended_by is not None

    def _raise_failure(self) -> None:
        if self._thread_ended_by is not None:
            raise RuntimeError(
                "the thread that loads weights ended with an error of its own, which is a bug of hf_lohan; nothing "
                "that was committed is lost, and a new process resumes from it"
            ) from self._thread_ended_by
        if self._failure is not None:
            raise raised_anew(self._failure)

    def close(self) -> None:
        with self._ring.lock:
            self._is_closed = True
            self._ring.changed.notify_all()
        self._thread.join()

    # The prefetch thread's side.

    def _run(self) -> None:
        try:
            self._load_until_closed()
        except BaseException as error:  # else compute would wait for ever
            with self._ring.lock:
                self._thread_ended_by = error
                self._ring.changed.notify_all()

    def _load_until_closed(self) -> None:
        while True:
            with self._ring.lock:
                self._ring.changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed:
                    return
                target = self._next()
                assert target is not None
                block, slot = target
                if block in self._urgent and slot.block is not None:
                    self._schedule.lose(slot.block)
                self._ring.claim(slot, block)
            try:
                self._source.load(block, slot).when_ended(partial(self._end_load, block, slot))
            except BaseException as error:
                self._end_load(block, slot, error)

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

    def _next(self) -> tuple[Block, Slot] | None:
        """What to load next and where. Caller holds the lock."""
        if self._failure is not None:
            return None
        for block in self._urgent:
            slot = None if self._ring.is_here(block) else self._victim(block, place=-1)
            if slot is not None:
                return block, slot
        load = self._schedule.next_load(self._ring.is_here)
        if load is None:
            return None
        place, block = load
        slot = self._victim(block, place)
        return None if slot is None else (block, slot)

    def _victim(self, block: Block, place: int) -> Slot | None:
        """The slot whose block is needed last; None if all are needed before ``place``. Of those that the pass does not
        need any more the one that it used first: the next forward begins where a backward ends."""
        slots = [slot for slot in self._ring.claimable(block.size_class) if slot.block not in self._urgent]
        if not slots:
            return None
        slot = max(slots, key=self._when_needed)
        return slot if self._when_needed(slot)[1] > place else None

    def _when_needed(self, slot: Slot) -> tuple[bool, int, int]:
        if slot.block is None:
            return True, NEVER, 0
        return False, self._schedule.next_use(slot.block), -self._schedule.last_use(slot.block)

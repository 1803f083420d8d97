"""Walk the recorded order of blocks ahead of their use, as far as the slots allow."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from hf_lohan.device import Event, Lane
from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.threads import start_thread
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.weights.parameter_loader import ParameterLoader
from hf_lohan.weights.slot_ring import Slot, SlotRing


class Prefetcher:
    """One thread that loads blocks in the order in which the last pass of the same kind used them.

    Backpressure comes from the slots: a block is loaded ahead only into a slot whose block is needed later than the
    new one, or not at all. What is needed now and was not foreseen (a skipped layer, a saved weight asked for out of
    order) goes first.
    """

    def __init__(self, ring: SlotRing, loader: ParameterLoader, forward_order: Sequence[Block]) -> None:
        self._ring = ring
        self._loader = loader
        self._orders = {True: [*forward_order, *reversed(forward_order)], False: list(forward_order)}
        self._is_training_pass = False
        self._expected: list[Block] = []
        self._recorded: list[Block] = []
        self._urgent: list[Block] = []
        self._failure: BaseException | None = None
        self._is_closed = False
        self.num_unforeseen = 0
        self._thread = start_thread(self._run, "lohan-prefetch", beside_kernels=ring.device.shares_cores)

    # The compute thread's side.

    def begin_pass(self, *, is_training: bool) -> None:
        """A forward starts (with its backward, if training): expect the order of the last such pass."""
        with self._ring.lock:
            self._is_training_pass = is_training
            self._recorded = []
            self._failure = None  # what could not be read ahead may be readable now
        self.foresee(is_training=is_training)

    def foresee(self, *, is_training: bool) -> None:
        """Start loading what the next such pass will need first."""
        with self._ring.lock:
            self._expected = list(self._orders[is_training])
            self._ring.changed.notify_all()

    def end_pass(self) -> None:
        """The pass is complete: its order is what the next one will follow."""
        with self._ring.lock:
            if self._recorded:
                self._orders[self._is_training_pass] = self._recorded
            self._recorded, self._expected = [], []

    def cancel_pass(self) -> None:
        """The pass broke off: nothing is learned from it, and nothing is loaded for it any more."""
        with self._ring.lock:
            self._recorded, self._expected = [], []
            self._failure = None

    def acquire(self, block: Block) -> Slot:
        """Pin `block`, waiting for its load to be enqueued; compute enqueued from now on may use the slot."""
        device = self._ring.device
        with device.timeline.task(COMPUTE_WAITS, "weights", block=block.name), self._ring.lock:
            slot, ready = self._pin(block)
        device.wait(Lane.COMPUTE, ready)
        return slot

    def _pin(self, block: Block) -> tuple[Slot, Event]:
        """Caller holds the lock."""
        self._recorded.append(block)
        if block in self._expected:
            del self._expected[: self._expected.index(block) + 1]
        slot = self._ring.pin(block)
        if slot is None:
            self.num_unforeseen += 1
            self._urgent.append(block)
            try:
                self._ring.changed.notify_all()
                self._ring.changed.wait_for(lambda: self._ring.is_here(block) or self._failure is not None)
                self._raise_failure()
            finally:
                self._urgent.remove(block)
            slot = self._ring.pin(block)
            assert slot is not None
        self._ring.changed.notify_all()
        self._ring.changed.wait_for(lambda: slot.ready is not None or self._failure is not None)
        self._raise_failure()
        assert slot.ready is not None
        return slot, slot.ready

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        with self._ring.lock:
            self._is_closed = True
            self._ring.changed.notify_all()
        self._thread.join()

    # The prefetch thread's side.

    def _run(self) -> None:
        while True:
            with self._ring.lock:
                self._ring.changed.wait_for(lambda: self._is_closed or self._next() is not None)
                if self._is_closed:
                    return
                target = self._next()
                assert target is not None
                block, slot = target
                self._ring.claim(slot, block)
            try:
                self._loader.load(block, slot).when_ended(partial(self._end_load, block, slot))
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
            slot = None if self._ring.is_here(block) else self._victim(block, rank=-1)
            if slot is not None:
                return block, slot
        full: set[SizeClass] = set()
        for rank, block in enumerate(self._expected):
            if block.size_class in full or self._ring.is_here(block):
                continue
            slot = self._victim(block, rank)
            if slot is not None:
                return block, slot
            full.add(block.size_class)
            if len(full) == len(SizeClass):
                break
        return None

    def _victim(self, block: Block, rank: int) -> Slot | None:
        """The slot whose block is needed last; None if all are needed before `block`, the `rank`-th expected. Of those
        that the pass does not need any more the one that it used first: the next forward begins where a backward ends.
        """
        slots = [slot for slot in self._ring.claimable(block.size_class) if slot.block not in self._urgent]
        if not slots:
            return None
        slot = max(slots, key=lambda slot: (self._next_use(slot), -self._last_use(slot)))
        return slot if self._next_use(slot) > rank else None

    def _last_use(self, slot: Slot) -> int:
        """Place in the pass so far."""
        for place in range(len(self._recorded) - 1, -1, -1):
            if self._recorded[place] is slot.block:
                return place
        return -1

    def _next_use(self, slot: Slot) -> float:
        if slot.block is None:
            return float("inf")
        try:
            return self._expected.index(slot.block)
        except ValueError:
            return len(self._expected)

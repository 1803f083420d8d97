"""Load blocks ahead of their use with several ranks: all ranks carry out one list of loads, and bring each block
together."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.ranks import CodedTraffic, RankFailedError
from hf_lohan.weights.block_loader import BlockLoader
from hf_lohan.weights.load_order import DeterministicLoadOrder, OrderedLoad
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.slot_ring import SlotRing

_MORE_AHEAD = 2
"""A load comes so many uses further ahead of its own than there are slots for layers. No load overtakes another here,
so one that waits for its block's update keeps all behind it waiting. Updates run in forward order: the head, which has
a slot of its own from the beginning, is updated last, and must not be asked for first."""


class JointSource(Protocol):
    """Where several ranks find a block's weights, each of them a part. All methods but `notify` and `fail` are called
    by one thread, none of them waits for another rank but `wait`, and all raise what makes going on impossible."""

    def begin(self, number: int, block: Block, version: int, is_wanted: Callable[[], bool]) -> bool:
        """Begin to bring this rank's part of load ``number`` to the host memory of all; False if that has no room yet.
        Loads begin in their order. ``version``: how often the block had changed when the load was ordered, equal on all
        ranks. ``is_wanted``: if not, what is brought does not matter, on any rank."""

    def advance(self) -> bool:
        """Do what can be done now for loads that have begun. Says whether there was something."""

    def is_whole(self, number: int) -> bool:
        """Whether all ranks' parts are there."""

    def finish(self, number: int, weights: Tensor, free: Event | None) -> Event:
        """Enqueue the copy of a whole block to device memory, behind ``free``. Loads are finished in their order."""

    def wait(self) -> None:
        """Return when something may be possible that was not, or `notify` was called since the last return."""

    def notify(self) -> None:
        """From any thread."""

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Keep the weights of other nodes in ``kept`` from load ``first_load`` on, which has not begun. With
        ``changes``, which counts them, only what a step changed is sent."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this one brings nothing any more. From any thread."""

    def close(self) -> None: ...


class LockstepLoader(BlockLoader):
    """The computing thread orders loads (`DeterministicLoadOrder`); one thread carries them out, in that order.

    The next loads begin while the first is under way, as far as the source has room. A load waits for its slot only
    when it is its turn to be copied. Nothing that was ordered is taken back: the others would wait for it. What fails
    ends the run, on this rank and on the others.
    """

    def __init__(self, ring: SlotRing, source: JointSource, forward_order: Sequence[Block]) -> None:
        max_ahead = len(ring.slots[SizeClass.LAYER]) + _MORE_AHEAD
        schedule = LoadSchedule(forward_order, ring.num_slots, max_ahead=max_ahead)
        super().__init__(ring, schedule)
        self._source = source
        self._order = DeterministicLoadOrder(schedule, ring)
        self._ordered: deque[OrderedLoad] = deque()
        self._begun: deque[OrderedLoad] = deque()
        ring.when_loan_ends(source.notify)
        self._start()

    def close(self) -> None:
        with self._ring.lock:
            self._is_closed = True
        self._source.notify()
        super().close()
        self._source.close()

    # The compute thread's side.

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """`JointSource.keep_weights` from the next load on that is ordered. Called by all ranks at the same point of
        their passes."""
        self._source.keep_weights(self._order.num_ordered, kept, changes)

    def _order_loads(self) -> None:
        self._put(self._order.order_loads())

    def _order_urgent(self, block: Block) -> None:
        self._put([self._order.order_urgent(block)])

    def _put(self, loads: Sequence[OrderedLoad]) -> None:
        if loads:
            self._ordered.extend(loads)
            self._source.notify()

    def _reset_failure(self) -> None:
        """A failure is final with several ranks."""

    # The thread's side.

    def _load_until_closed(self) -> None:
        try:
            while not self._is_closed:
                if not (self._finish_first() or self._begin_next() or self._source.advance()):
                    self._source.wait()
        except Exception as error:
            with self._ring.lock:
                if self._is_closed:
                    return
                self._failure = error
                self._ring.changed.notify_all()
            # Do not report another rank's failure here. Whoever still needs the load will see it.
            if not isinstance(error, RankFailedError):
                self._source.fail(error)

    def _finish_first(self) -> bool:
        """Copy the first block to its slot, if all of it is there and nobody copies from the slot."""
        if not self._begun:
            return False
        load = self._begun[0]
        if not self._source.is_whole(load.number) or load.slot.num_loans:
            return False
        self._begun.popleft()
        ready = self._source.finish(load.number, load.weights, load.free)
        with self._ring.lock:
            if self._order.is_latest(load):
                self._ring.publish(load.slot, ready)
        return True

    def _begin_next(self) -> bool:
        if not self._ordered:
            return False
        load = self._ordered[0]
        if not self._source.begin(load.number, load.block, load.version, partial(self._order.is_wanted, load)):
            return False
        self._begun.append(self._ordered.popleft())
        return True

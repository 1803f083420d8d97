"""Loads blocks ahead of their use with several ranks. All ranks carry out one list of loads together."""

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
"""Loads are ordered ahead of their uses, by at most the number of layer slots plus this number. Loads do not overtake
each other, so a load that waits for its block's update delays all later loads. Updates run in forward order. The head
has its own slot and is updated last, so it must not be ordered first."""


class JointSource(Protocol):
    """Loads blocks of which each rank stores a shard. One thread calls all methods except `notify` and `fail`. Only
    `wait` waits for other ranks. Each method raises an error if no further loads are possible."""

    def begin_load(self, number: int, block: Block, version: int, is_wanted: Callable[[], bool]) -> bool:
        """Begin to load this rank's shard to the host memory that ranks share. Returns False if the memory has no room
        yet. Loads begin in their order. ``version``: number of changes of the block before the load was ordered, equal
        on all ranks. ``is_wanted``: returns False after no rank needs the load's data any more."""

    def advance_loads(self) -> bool:
        """Continue the loads that have begun. Returns whether any load advanced."""

    def is_whole(self, number: int) -> bool:
        """Return whether the shards of all ranks have arrived."""

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event:
        """Enqueue the copy of a whole block to device memory, after ``free``. Loads are finished in their order."""

    def wait(self) -> None:
        """Wait until a load can advance, or `notify` was called after the last return."""

    def notify(self) -> None:
        """Wake `wait`. Any thread may call this."""

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Keep the weights of other nodes in ``kept``, from load ``first_load`` on. This load must not have begun. With
        ``changes``, which counts the traffic, only the changes of each step are sent."""

    def fail(self, error: BaseException) -> None:
        """Tell the other ranks that this rank has failed. Any thread may call this."""

    def close(self) -> None: ...


class LockstepLoader(BlockLoader):
    """Carries out loads on one thread, in the order in which the computing thread orders them
    (`DeterministicLoadOrder`). Later loads begin while the first load runs, if the source has room. A load waits for
    its slot only when its copy is next. An ordered load is never cancelled, because other ranks would wait for it. An
    error ends the run on all ranks."""

    def __init__(self, ring: SlotRing, source: JointSource, forward_order: Sequence[Block]) -> None:
        max_ahead = len(ring.slots[SizeClass.LAYER]) + _MORE_AHEAD
        schedule = LoadSchedule(forward_order, ring.num_slots, max_ahead=max_ahead)
        super().__init__(ring, schedule)
        self._source = source
        self._order = DeterministicLoadOrder(schedule, ring)
        self._ordered: deque[OrderedLoad] = deque()
        self._begun: deque[OrderedLoad] = deque()
        ring.add_return_callback(source.notify)
        self._start()

    def close(self) -> None:
        with self._ring.lock:
            self._is_closed = True
        self._source.notify()
        super().close()
        self._source.close()

    # Called by the computing thread.

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Call `JointSource.keep_weights` from the next ordered load on. All ranks call it at the same point of their
        passes."""
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
        """Do nothing, because a failure is final with several ranks."""

    # Called by the loading thread.

    def _load_until_closed(self) -> None:
        try:
            while not self._is_closed:
                if not (self._finish_first() or self._begin_next() or self._source.advance_loads()):
                    self._source.wait()
        except Exception as error:
            with self._ring.lock:
                if self._is_closed:
                    return
                self._failure = error
                self._ring.changed.notify_all()
            # All ranks know another rank's failure. The thread that needs the load raises it.
            if not isinstance(error, RankFailedError):
                self._source.fail(error)

    def _finish_first(self) -> bool:
        """Copy the first load's block to its slot, if the block has arrived and no update borrows the slot."""
        if not self._begun:
            return False
        load = self._begun[0]
        if not self._source.is_whole(load.number) or load.slot.num_borrows:
            return False
        self._begun.popleft()
        ready = self._source.finish_load(load.number, load.weights, load.free)
        with self._ring.lock:
            if self._order.is_latest(load):
                self._ring.publish(load.slot, ready)
        return True

    def _begin_next(self) -> bool:
        if not self._ordered:
            return False
        load = self._ordered[0]
        is_wanted = partial(self._order.is_wanted, load)
        if not self._source.begin_load(load.number, load.block, load.version, is_wanted):
            return False
        self._begun.append(self._ordered.popleft())
        return True

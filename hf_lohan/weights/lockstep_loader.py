"""Loads blocks ahead of their use with several ranks. All ranks carry out a list of loads together, while they order
equal lists (`joint_order`)."""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.ranks import CodedTraffic, RankFailedError, RanksDisagreeError
from hf_lohan.weights.block_loader import BlockLoader
from hf_lohan.weights.joint_order import Standing
from hf_lohan.weights.load_order import DeterministicLoadOrder, OrderedLoad, first_of_period
from hf_lohan.weights.peer_weights import PeerWeightCache
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing

_MORE_AHEAD = 2
"""Loads are ordered ahead of their uses, by at most the number of layer slots plus this number. Loads do not overtake
each other, so a load that waits for its block's update delays all later loads. Updates run in forward order. The head
has its own slot and is updated last, so it must not be ordered first."""
_TAKES_BACK_AFTER_S = 0.2


class JointSource(Protocol):
    """Loads blocks of which each rank stores a shard. One thread calls all methods except `notify` and `fail`. Only
    `wait` waits for other ranks. Each method raises an error if no further loads are possible."""

    def begin_load(
        self, number: int, block: Block, version: int, is_wanted: Callable[[], bool], num_ended: int = 0
    ) -> bool:
        """Begin to load this rank's shard to the host memory that ranks share. Returns False if the memory has no room
        yet. Loads begin in their order. ``version``: number of changes of the block before the load was ordered, equal
        on all ranks. ``is_wanted``: returns False after this rank does not need the load's data any more.
        ``num_ended``: number of passes that had ended then."""

    def advance_loads(self) -> bool:
        """Continue the loads that have begun. Returns whether any load advanced."""

    def is_whole(self, number: int) -> bool:
        """Return whether the shards of all ranks have arrived."""

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event | None:
        """Enqueue the copy of a whole block to device memory, after ``free``. Loads are finished in their order.
        Returns None if the load turned out not to be common."""

    def is_common(self, number: int) -> bool:
        """Return whether the load is carried out by all ranks. If not, no later load of its period is."""

    def give_up_loads(self) -> None:
        """Forget the loads that have begun and are not common."""

    def begin_lent_load(self, number: int, block: Block, weights: Tensor, free: Event | None) -> None:
        """Begin to copy a block to device memory, after ``free``, from shards that other ranks lend. One such load
        runs at a time, and no common one."""

    def finish_lent_load(self, *, is_wanted: bool) -> Event | None:
        """Return the event of the lent load's end; None if shards are missing."""

    def stand_by(self, standing: Standing, looks_again_after_s: float) -> None:
        """Note this rank's standing before `wait`, which returns after ``looks_again_after_s`` seconds at the latest.
        Lends other ranks what this rank will not load with them."""

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
    its slot only when its copy is next. A common load is never cancelled, because other ranks would wait for it. An
    error ends the run on all ranks."""

    def __init__(
        self,
        ring: SlotRing,
        source: JointSource,
        forward_order: Sequence[Block],
        end_exchanges: Callable[[], object] = lambda: None,
    ) -> None:
        """``end_exchanges`` wakes a load that waits for other ranks' devices, when no more are needed."""
        max_ahead = len(ring.slots[SizeClass.LAYER]) + _MORE_AHEAD
        schedule = LoadSchedule(forward_order, ring.num_slots, max_ahead=max_ahead)
        super().__init__(ring, schedule)
        self._source = source
        self._end_exchanges = end_exchanges
        self._order = DeterministicLoadOrder(schedule, ring)
        self._ordered: deque[OrderedLoad] = deque()
        self._begun: deque[OrderedLoad] = deque()
        self._lent: OrderedLoad | None = None
        """The load in progress that not all ranks have in common."""
        self._borrowed_since_s: float | None = None
        self._computing_thread = 0
        ring.add_callback(source.notify)
        self._start()

    def close(self) -> None:
        with self._ring.lock:
            self._is_closed = True
        self._source.notify()
        self._end_exchanges()
        super().close()
        self._source.close()

    # Called by the computing thread.

    def keep_weights(self, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """Call `JointSource.keep_weights` from the next ordered load on. All ranks call it at the same point of their
        passes."""
        first = self._order.next_number
        if self._order.num_ended:  # ranks may have ordered different loads in this period
            first = first_of_period(self._ring.num_changes + 1)
        self._source.keep_weights(first, kept, changes)

    def acquire(self, block: Block, *, for_operation: bool = False) -> Slot:
        self._computing_thread = threading.get_ident()
        return super().acquire(block, for_operation=for_operation)

    def end_pass(self) -> None:
        with self._ring.lock:
            super().end_pass()
            self._order.num_ended += 1

    def cancel_pass(self) -> None:
        with self._ring.lock:
            super().cancel_pass()
            self._order.num_ended += 1

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
                    self._stand_by()
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

    def _stand_by(self) -> None:
        with self._ring.lock:
            is_idle = not (self._ordered or self._begun or self._lent)
            standing = Standing(
                self._order.next_number,
                self._order.has,
                is_idle,
                self._schedule.is_between_passes,
                self._order.num_ended,
                self._computing_thread,
            )
        self._source.stand_by(standing, math.inf if self._borrowed_since_s is None else _TAKES_BACK_AFTER_S)

    def _finish_first(self) -> bool:
        """Finish the first load, if its block has arrived and no update borrows the slot."""
        if self._lent is not None:
            try:
                ready = self._source.finish_lent_load(is_wanted=self._is_wanted(self._lent))
            except RanksDisagreeError:
                if not self._has_abandoned(self._lent):
                    raise
            else:
                if ready is None:
                    return False
                self._publish(self._lent, ready)
            self._lent = None
            return True
        if not self._begun:
            return False
        load = self._begun[0]
        if not self._source.is_common(load.number):
            self._source.give_up_loads()
            with self._ring.lock:
                self._ordered.extendleft(reversed(self._begun))
                self._begun.clear()
            return True
        if not self._source.is_whole(load.number) or self._is_borrowed(load.slot):
            return False
        if (ready := self._source.finish_load(load.number, load.weights, load.free)) is not None:
            self._begun.popleft()
            self._publish(load, ready)
        return True

    def _begin_next(self) -> bool:
        # A lent load ends before a common one begins. Shards of common loads that have no room here would stay in the
        # connection in front of the lent ones. And the load's end belongs to its period.
        if not self._ordered or self._lent is not None:
            return False
        load = self._ordered[0]
        if not self._source.is_common(load.number):
            return self._begin_lent(load)
        is_wanted = partial(self._order.is_wanted, load)
        if not self._source.begin_load(load.number, load.block, load.version, is_wanted, load.num_ended):
            return False
        self._begun.append(self._ordered.popleft())
        return True

    def _begin_lent(self, load: OrderedLoad) -> bool:
        if self._begun:
            return False
        if not self._is_wanted(load):
            self._ordered.popleft()
            with self._ring.lock:
                if self._order.is_latest(load):
                    self._ring.abandon(load.slot)
            return True
        if self._is_borrowed(load.slot):
            return False
        self._lent = self._ordered.popleft()
        self._source.begin_lent_load(load.number, load.block, load.weights, load.free)
        return True

    def _has_abandoned(self, load: OrderedLoad) -> bool:
        """Empty the slot of a lent load whose shards are not all there, unless compute needs the block now. A rank may
        end a step, and change a block, a moment before a rank that loads the block ahead without a need for it."""
        with self._ring.lock:
            if self._order.is_wanted(load) and load.slot.num_pins:
                return False
            if self._order.is_latest(load):
                self._ring.abandon(load.slot)
            return True

    def _publish(self, load: OrderedLoad, ready: Event) -> None:
        with self._ring.lock:
            if self._order.is_latest(load):
                self._ring.publish(load.slot, ready)

    def _is_wanted(self, load: OrderedLoad) -> bool:
        with self._ring.lock:
            return self._order.is_wanted(load)

    def _is_borrowed(self, slot: Slot) -> bool:
        """Return whether an update borrows the slot. The update may wait for ranks that wait for this load, so it gives
        the slot back after a moment, and reads the store."""
        if not slot.num_borrows:
            self._borrowed_since_s = None
            return False
        now_s = time.monotonic()
        if self._borrowed_since_s is None:
            self._borrowed_since_s = now_s
        elif now_s - self._borrowed_since_s >= _TAKES_BACK_AFTER_S:
            self._ring.take_back(slot)
        return slot.num_borrows > 0

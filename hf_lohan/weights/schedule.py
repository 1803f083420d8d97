"""The order in which a pass needs its blocks, and the order of loads that follows, known before the pass begins."""

from __future__ import annotations

import heapq
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from hf_lohan.model import Block
from hf_lohan.planner import SizeClass

NEVER = 1 << 60
"""A place behind every pass."""


class _PassOrder:
    """One kind of pass: its uses by place, and the places in the order in which their blocks are loaded."""

    def __init__(
        self,
        own_uses: Sequence[Block],
        num_slots: Mapping[SizeClass, int],
        max_ahead: int,
        followed_by: Sequence[Block] = (),
    ) -> None:
        """``followed_by``: uses of the pass that comes behind it, whose loads may begin in this one."""
        self.own_uses = list(own_uses)
        self.uses = [*own_uses, *followed_by]
        self.places: dict[Block, list[int]] = defaultdict(list)
        for place, block in enumerate(self.uses):
            self.places[block].append(place)
        self.loads = self._order_loads(num_slots, max_ahead)

    def next_use(self, block: Block, place: int) -> int:
        """The first use at ``place`` or behind it."""
        places = self.places.get(block, ())
        index = bisect_left(places, place)
        return places[index] if index < len(places) else NEVER

    def _order_loads(self, num_slots: Mapping[SizeClass, int], max_ahead: int) -> list[int]:
        """Each load in its turn: as soon as a slot of its class has been used for the last time before it, but no more
        than ``max_ahead`` uses ahead of its own. Where several have, the one is given up that is needed last
        (Belady)."""
        loads: list[tuple[int, int]] = []
        last_used: dict[SizeClass, dict[Block, int]] = defaultdict(dict)
        free_since: dict[SizeClass, int] = defaultdict(int)
        for place, block in enumerate(self.uses):
            size_class, held = block.size_class, last_used[block.size_class]
            if block not in held:
                if len(held) >= max(1, num_slots[size_class]):
                    since = free_since[size_class] = max(min(held.values()) + 1, free_since[size_class])
                    gone = [other for other, used in held.items() if used < since]
                    del held[max(gone, key=lambda other: self.next_use(other, place))]
                loads.append((max(free_since[size_class], place - max_ahead), place))
            held[block] = place
        return [place for _, place in sorted(loads)]


class LoadSchedule:
    """What a pass needs next and what to load next. Another order than foreseen corrects the next pass of its kind.

    Loads follow from the order of uses and the number of slots alone, never from which thread comes first: several
    ranks load in one order. Only what nobody foresaw is loaded out of turn. Whoever calls holds the slots' lock.
    """

    def __init__(
        self,
        forward_order: Sequence[Block],
        num_slots: Mapping[SizeClass, int],
        *,
        max_ahead: int = NEVER,
        carries_on: bool = False,
    ) -> None:
        """``max_ahead``: how many uses ahead of its own a block's load may come, whatever slots are free.
        ``carries_on``: behind an evaluation another one is foreseen, as where a model generates: it begins where this
        one ends, so the last blocks compute while the first ones come."""
        self._num_slots = num_slots
        self._max_ahead = max_ahead
        self._carries_on = carries_on
        self._orders = {
            True: self._order_of([*forward_order, *reversed(forward_order)], is_training=True),
            False: self._order_of(forward_order, is_training=False),
        }
        self._nothing = self._order_of((), is_training=False)
        self._order = self._nothing
        self._is_training = False
        self._place = 0
        self._num_loads = 0
        self._again: list[int] = []
        self._used: list[Block] = []
        self._last_use: dict[Block, int] = {}
        self.num_unforeseen = 0
        """Uses that were not in the order foreseen for their pass."""
        self._waiting: tuple[_PassOrder, int, list[Block], dict[Block, int]] | None = None
        """A training pass between its forward and its backward, while one without gradients comes in between."""

    def foresee(self, *, is_training: bool) -> None:
        """A training pass (forward and backward) or an evaluation comes next."""
        self._order = self._orders[is_training]
        self._place = self._num_loads = 0
        self._again.clear()

    def begin(self, *, is_training: bool) -> None:
        """It begins. One without gradients may come between a training forward and its backward, for a loss that asks
        the model itself for its reference: the training pass goes on behind it."""
        if not is_training and self._is_training and self._used:
            self._waiting = self._order, self._place, self._used, self._last_use
        self.foresee(is_training=is_training)
        self._is_training = is_training
        self._forget_uses()

    def use(self, block: Block) -> None:
        """Compute needs the block now."""
        self._last_use[block] = len(self._used)
        self._used.append(block)
        place = self.next_use(block)
        if place < len(self._order.own_uses):
            self._place = place + 1
        else:
            self.num_unforeseen += 1

    def use_for_operation(self, block: Block) -> None:
        """One operation needs the block now; with others of the kind it is one use."""
        if not self._used or self._used[-1] is not block:
            self.use(block)

    def end(self) -> None:
        """The pass is complete: the next one of its kind follows its order."""
        if self._used and self._used != self._orders[self._is_training].own_uses:
            self._orders[self._is_training] = self._order_of(self._used, is_training=self._is_training)
        waiting = self._waiting
        self.cancel()
        if waiting is None and self._carries_on and not self._is_training:
            self.foresee(is_training=False)
        if waiting is not None:
            self._order, self._place, self._used, self._last_use = waiting
            self._is_training = True
            # All that it needs from here on, as if it were loaded for the first time: others had the slots.
            self._num_loads = len(self._order.loads)
            self._again = list(range(self._place, len(self._order.uses)))

    def cancel(self) -> None:
        """Nothing is learned from the pass, and nothing is needed for it any more."""
        self._order = self._nothing
        self._place = self._num_loads = 0
        self._again.clear()  # places in an order that is no longer followed
        self._waiting = None
        self._forget_uses()

    def _order_of(self, uses: Sequence[Block], *, is_training: bool) -> _PassOrder:
        followed_by = uses if self._carries_on and not is_training else ()
        return _PassOrder(uses, self._num_slots, self._max_ahead, followed_by)

    def _forget_uses(self) -> None:
        self._used = []
        self._last_use = {}

    def next_use(self, block: Block) -> int:
        """Place in the pass; `NEVER` if it does not need the block any more."""
        return self._order.next_use(block, self._place)

    def last_use(self, block: Block) -> int:
        """Place among the uses so far, or -1."""
        return self._last_use.get(block, -1)

    def lose(self, block: Block) -> None:
        """The block had to make room out of turn: if the pass needs it again, it is loaded again."""
        place = self.next_use(block)
        if place != NEVER:
            heapq.heappush(self._again, place)

    def next_load(self, is_here: Callable[[Block], bool]) -> tuple[int, Block] | None:
        """What to load now, with the place for which it is needed."""
        uses, loads = self._order.uses, self._order.loads
        while self._again and (self._again[0] < self._place or is_here(uses[self._again[0]])):
            heapq.heappop(self._again)
        while self._num_loads < len(loads):
            place = loads[self._num_loads]
            if place >= self._place and not is_here(uses[place]):
                break
            self._num_loads += 1
        places = self._again[:1] + loads[self._num_loads : self._num_loads + 1]
        return (min(places), uses[min(places)]) if places else None

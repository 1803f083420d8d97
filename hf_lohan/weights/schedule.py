"""Computes the order in which a pass needs its blocks, and from it the order of loads, before the pass begins."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from hf_lohan.costs import SizeClass
from hf_lohan.model import Block

NEVER = 1 << 60
"""A position after the end of every pass."""


class _PassOrder:
    """The order of one kind of pass. A position is the index of a use. `loads` are positions in the order of loads."""

    def __init__(
        self,
        own_uses: Sequence[Block],
        num_slots: Mapping[SizeClass, int],
        max_ahead: int,
        followed_by: Sequence[Block] = (),
    ) -> None:
        """``followed_by``: uses of the next pass. Their loads may begin in this pass."""
        self.own_uses = list(own_uses)
        self.uses = [*own_uses, *followed_by]
        self.positions: dict[Block, list[int]] = defaultdict(list)
        for position, block in enumerate(self.uses):
            self.positions[block].append(position)
        self.loads = self._order_loads(num_slots, max_ahead)

    def next_use(self, block: Block, position: int) -> int:
        """Return the position of the block's first use at ``position`` or later."""
        positions = self.positions.get(block, ())
        index = bisect_left(positions, position)
        return positions[index] if index < len(positions) else NEVER

    def _order_loads(self, num_slots: Mapping[SizeClass, int], max_ahead: int) -> list[int]:
        """Return the positions of all loads, in order. A load begins at most ``max_ahead`` uses ahead, as soon as the
        block in a slot of its class is not needed before the new block. If several slots are possible, it overwrites
        the slot whose block is needed last (Belady's rule)."""
        loads: list[tuple[int, int]] = []
        last_used: dict[SizeClass, dict[Block, int]] = defaultdict(dict)
        free_since: dict[SizeClass, int] = defaultdict(int)
        for position, block in enumerate(self.uses):
            size_class, held = block.size_class, last_used[block.size_class]
            if block not in held:
                if len(held) >= max(1, num_slots[size_class]):
                    since = free_since[size_class] = max(min(held.values()) + 1, free_since[size_class])
                    gone = [other for other, used in held.items() if used < since]
                    del held[max(gone, key=lambda other: self.next_use(other, position))]
                loads.append((max(free_since[size_class], position - max_ahead), position))
            held[block] = position
        return [position for _, position in sorted(loads)]


@dataclass(eq=False)
class PassState:
    """A pass and its progress."""

    is_training: bool
    has_begun: bool = False

    def expect_backward(self) -> None:
        """Record that the pass has a backward."""
        self.is_training = True


PassT = TypeVar("PassT", bound=PassState)


class PassSchedule(ABC, Generic[PassT]):
    """Tracks the running pass, the foreseen pass and the interrupted pass. Callers hold the slots' lock."""

    carries_on = False
    """Whether another evaluation is foreseen after each evaluation, as when a model generates."""

    def __init__(self) -> None:
        self._pass: PassT | None = None
        self._interrupted: PassT | None = None
        """A training pass between its forward and its backward, while an evaluation runs."""
        self.version = 0
        """Number of times that a pass was begun, ended or foreseen."""

    @property
    def is_between_passes(self) -> bool:
        """Whether no pass is in progress."""
        return self._pass is None or not self._pass.has_begun

    def foresee_pass(self, *, is_training: bool) -> None:
        """Expect a training pass (forward and backward) or an evaluation next."""
        self._pass = self._expect_pass(is_training=is_training)
        self.version += 1

    def begin_pass(self, *, is_training: bool) -> None:
        """Begin the pass. An evaluation may run between a training forward and its backward, if a loss uses the model
        as its own reference. The training pass continues afterwards."""
        running = self._pass
        if not is_training and running is not None and running.is_training and running.has_begun:
            self._interrupted = running
        self.foresee_pass(is_training=is_training)
        assert self._pass is not None
        self._pass.has_begun = True

    def end_pass(self) -> None:
        """End a complete pass. The next pass of its kind is expected to have the same order."""
        ended, self._pass, self._interrupted = self._pass, self._interrupted, None
        self.version += 1
        if ended is not None:
            self._learn_from(ended)
        if self._pass is not None:
            self._resume_pass(self._pass)
        elif self.carries_on and ended is not None and not ended.is_training:
            self.foresee_pass(is_training=False)

    def cancel_pass(self) -> None:
        """End the pass early. Its order is not learned, and its remaining blocks are not needed."""
        self._pass = self._interrupted = None
        self.version += 1

    @abstractmethod
    def use(self, block: Block) -> None:
        """Record that compute needs the block now."""

    @abstractmethod
    def use_for_operation(self, block: Block) -> None:
        """Record that a single operation needs the block now."""

    @abstractmethod
    def _expect_pass(self, *, is_training: bool) -> PassT: ...

    @abstractmethod
    def _learn_from(self, ended: PassT) -> None: ...

    @abstractmethod
    def _resume_pass(self, resumed: PassT) -> None:
        """Continue a pass after an evaluation, which used the slots."""


@dataclass(eq=False, kw_only=True)
class _LayerPass(PassState):
    order: _PassOrder
    position: int = 0
    """Place of the next use."""
    num_loads: int = 0
    """Number of loads of the order that were made or skipped."""
    again: list[int] = field(default_factory=list)
    """A heap of positions whose blocks are loaded out of turn."""
    used: list[Block] = field(default_factory=list)
    last_use: dict[Block, int] = field(default_factory=dict)


class LoadSchedule(PassSchedule[_LayerPass]):
    """Decides which block a pass needs next, and which block to load next. If a pass uses blocks in an unforeseen
    order, the next pass of its kind follows that order. Loads depend only on the order of uses and the number of slots,
    not on the timing of threads, so all ranks load in the same order. Only unforeseen blocks are loaded out of turn."""

    def __init__(
        self,
        forward_order: Sequence[Block],
        num_slots: Mapping[SizeClass, int],
        *,
        max_ahead: int = NEVER,
        carries_on: bool = False,
    ) -> None:
        """``max_ahead``: number of uses by which a load may precede its own use, even if more slots are free.
        ``carries_on``: see `PassSchedule.carries_on`. The first blocks of the next pass are then loaded while the last
        blocks of this pass compute."""
        super().__init__()
        self._num_slots = num_slots
        self._max_ahead = max_ahead
        self.carries_on = carries_on
        self._orders = {
            True: self._order_of([*forward_order, *reversed(forward_order)], is_training=True),
            False: self._order_of(forward_order, is_training=False),
        }
        self._nothing = self._order_of((), is_training=False)
        self._no_pass = _LayerPass(is_training=False, order=self._nothing)
        self.num_unforeseen = 0
        """Number of uses that differed from the foreseen order of their pass."""

    @property
    def _now(self) -> _LayerPass:
        return self._pass if self._pass is not None else self._no_pass

    def use(self, block: Block) -> None:
        now = self._now
        now.last_use[block] = len(now.used)
        now.used.append(block)
        position = self.next_use(block)
        if position < len(now.order.own_uses):
            now.position = position + 1
        else:
            self.num_unforeseen += 1

    def use_for_operation(self, block: Block) -> None:
        """Record the use. Several operations in a row that read the same block are one use."""
        if self._now.used[-1:] != [block]:
            self.use(block)

    def cancel_pass(self) -> None:
        super().cancel_pass()
        self._no_pass = _LayerPass(is_training=False, order=self._nothing)

    def _expect_pass(self, *, is_training: bool) -> _LayerPass:
        return _LayerPass(is_training=is_training, order=self._orders[is_training])

    def _learn_from(self, ended: _LayerPass) -> None:
        if ended.used and ended.used != self._orders[ended.is_training].own_uses:
            self._orders[ended.is_training] = self._order_of(ended.used, is_training=ended.is_training)
        self._no_pass = _LayerPass(is_training=False, order=self._nothing)

    def _resume_pass(self, resumed: _LayerPass) -> None:
        # Order the remaining loads of the pass again, because the evaluation used the slots.
        resumed.num_loads = len(resumed.order.loads)
        resumed.again = list(range(resumed.position, len(resumed.order.uses)))

    def _order_of(self, uses: Sequence[Block], *, is_training: bool) -> _PassOrder:
        followed_by = uses if self.carries_on and not is_training else ()
        return _PassOrder(uses, self._num_slots, self._max_ahead, followed_by)

    def next_use(self, block: Block) -> int:
        """Return the position of the block's next use; `NEVER` if the pass does not need the block any more."""
        return self._now.order.next_use(block, self._now.position)

    def last_use(self, block: Block) -> int:
        """Return the position of the block's last use so far, or -1."""
        return self._now.last_use.get(block, -1)

    def note_displaced(self, block: Block) -> None:
        """Record that the block was overwritten out of turn. If the pass needs the block again, it is loaded again."""
        position = self.next_use(block)
        if position != NEVER:
            heapq.heappush(self._now.again, position)

    def next_load(self, is_here: Callable[[Block], bool]) -> tuple[int, Block] | None:
        """Return the position and the block of the next load; None if nothing is to be loaded now."""
        now = self._now
        uses, loads = now.order.uses, now.order.loads
        while now.again and (now.again[0] < now.position or is_here(uses[now.again[0]])):
            heapq.heappop(now.again)
        while now.num_loads < len(loads):
            position = loads[now.num_loads]
            if position >= now.position and not is_here(uses[position]):
                break
            now.num_loads += 1
        positions = now.again[:1] + loads[now.num_loads : now.num_loads + 1]
        return (min(positions), uses[min(positions)]) if positions else None

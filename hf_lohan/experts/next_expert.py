"""Chooses the next expert to load and the slot that it overwrites."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from hf_lohan.costs import SizeClass
from hf_lohan.experts.expert_schedule import ExpertSchedule
from hf_lohan.model import Block
from hf_lohan.weights import NextLoad, Slot, SlotLoad, SlotRing
from hf_lohan.weights.schedule import NEVER

_EMPTY = NEVER + 1
_MOST_HINTS = 2
"""Maximum number of hints that are loaded at once. One is read while the other is verified and copied."""


@dataclass
class ExpertFigures:
    """Counts of the experts that calls needed, and counts of the loads of experts."""

    num_used: int = 0
    """Number of experts in all calls."""
    num_here: int = 0
    """Number of used experts that were in a slot, or being loaded, when their call began."""
    num_loads: int = 0
    num_from_ram: int = 0
    """Number of loads from a copy in RAM."""
    loaded_bytes: int = 0
    wrong_bytes: int = 0
    """Bytes of experts that were loaded ahead and overwritten before any use."""


class FarthestUse:
    """Finds the slot whose block is needed last (`ExpertSchedule.next_use`). Call `note_next_use` when a block's next
    use changes. If only the position of the use has passed, no call is needed."""

    def __init__(self, slots: Iterable[Slot], next_use: Callable[[Block], int]) -> None:
        self._slots = tuple(slots)
        self._next_use = next_use
        self._at: dict[int, dict[Slot, None]] = {}
        self._position_of: dict[Slot, int] = {}
        self._positions: list[int] = []
        """A heap of negated positions, the last position first. Some positions may no longer have slots."""
        self._busy: set[Slot] = set()
        """Slots that could not be overwritten when they were last tried."""
        self._position = 0
        self.rebuild(0)

    def rebuild(self, position: int) -> None:
        """Compute all next uses again. ``position`` is the current position."""
        self._at.clear()
        self._position_of.clear()
        self._positions.clear()
        self._busy.clear()
        self._position = position
        for slot in self._slots:
            self.note_next_use(slot)

    def advance(self, position: int) -> None:
        """Set the current position. Earlier positions need no more blocks."""
        if position < self._position:
            self.rebuild(position)
            return
        for over in range(self._position, position):
            for slot in self._at.pop(over, ()):
                del self._position_of[slot]
                self.note_next_use(slot)
        self._position = position

    def note_next_use(self, slot: Slot) -> None:
        """Record that the slot has a new block, or that its block has a new next use."""
        self._take_out(slot)
        position = _EMPTY if slot.block is None else self._next_use(slot.block)
        slots = self._at.get(position)
        if slots is None:
            slots = self._at[position] = {}
            heapq.heappush(self._positions, -position)
        slots[slot] = None
        self._position_of[slot] = position

    def find_slot(self, before: int) -> Slot | None:
        """Return a slot for a block that is needed at ``before``, or None. The block in the slot is needed later than
        ``before``, and later than the blocks in all other slots. Of equal slots, the first noted is chosen. Slots with
        enqueued compute are the last choice, because a copy to them would wait and occupy its buffer."""
        for slot in [slot for slot in self._busy if slot.is_claimable]:
            self.note_next_use(slot)
        computing: Slot | None = None
        while self._positions:
            position = -self._positions[0]
            slots = self._at.get(position)
            if not slots:
                heapq.heappop(self._positions)
                self._at.pop(position, None)
                continue
            if position <= before:
                break
            slot = next(iter(slots))
            if slot.is_claimable:
                if slot.last_use is None or slot.last_use.is_reached():
                    return slot
                computing = computing or slot
            self._take_out(slot)
            self._busy.add(slot)
        return computing

    def _take_out(self, slot: Slot) -> None:
        self._busy.discard(slot)
        position = self._position_of.pop(slot, None)
        if position is not None:
            del self._at[position][slot]


class NextExpert(NextLoad):
    """Chooses loads by an `ExpertSchedule`. At most two hints load at once, so that a needed block waits only briefly.

    A call looks at no more slots or blocks than a layer has experts. The first call after the begin or end of a pass,
    or after a step, is an exception."""

    def __init__(
        self, schedule: ExpertSchedule, ring: SlotRing, is_in_ram: Callable[[Block], bool] = lambda block: False
    ) -> None:
        """``is_in_ram`` returns whether a block's weights have a copy in RAM, for the figures."""
        super().__init__()
        self._is_in_ram = is_in_ram
        self._schedule = schedule
        self._ring = ring
        self.figures = ExpertFigures()
        self._farthest = FarthestUse(ring.slots[SizeClass.EXPERT], self._next_use)
        self._seen = (schedule.version, ring.num_forgets)
        self._num_hints = 0
        """Number of hints that are being loaded."""
        self._unused: dict[Block, None] = {}
        """Blocks that have not been used since they were loaded."""

    def find_load(self) -> SlotLoad | None:
        self._catch_up()
        for block in self.urgent:
            slot = None if self._ring.is_here(block) else self._farthest.find_slot(before=-1)
            if slot is not None:
                return SlotLoad(block, slot)
        load = self._schedule.next_load(self._ring.is_here)
        if load is None or (self._num_hints >= _MOST_HINTS and not load.is_sure):
            return None
        slot = self._farthest.find_slot(before=load.position)
        return None if slot is None else SlotLoad(load.block, slot, not load.is_sure)

    def claim_slot(self, load: SlotLoad) -> None:
        block, slot = load.block, load.slot
        if slot.block is not None:
            self._schedule.note_displaced(slot.block)
            if slot.block in self._unused:
                del self._unused[slot.block]
                self.figures.wrong_bytes += slot.block.param_bytes
        self._ring.claim(slot, block)
        self._farthest.note_next_use(slot)
        self._num_hints += load.is_hint
        self._unused[block] = None
        self.figures.num_loads += 1
        self.figures.num_from_ram += self._is_in_ram(block)
        self.figures.loaded_bytes += block.param_bytes

    def end_load(self, load: SlotLoad) -> None:
        self._num_hints -= load.is_hint
        self._farthest.note_next_use(load.slot)

    def begin_call(self, layer: int, needed: Sequence[Block]) -> None:
        """Begin a call. Called after `ExpertSchedule.route`."""
        self.note_layer(layer)
        self.figures.num_used += len(needed)
        self.figures.num_here += sum(map(self._ring.is_here, needed))

    def note_use(self, slot: Slot) -> None:
        """Record that the slot's block was pinned. Called after `ExpertSchedule.use`."""
        assert slot.block is not None
        self._unused.pop(slot.block, None)
        self._farthest.note_next_use(slot)

    def note_layer(self, layer: int) -> None:
        """Record that the schedule of the layer's experts has changed."""
        for block in self._schedule.experts_of(layer):
            if self._ring.is_here(block):
                self._farthest.note_next_use(self._ring.slot_of(block))

    def _catch_up(self) -> None:
        """React to new passes and to emptied slots."""
        seen = (self._schedule.version, self._ring.num_forgets)
        if seen == self._seen:
            self._farthest.advance(self._schedule.position)
            return
        if seen[1] != self._seen[1]:
            self._schedule.look_anew()
            self._unused = {block: None for block in self._unused if self._ring.is_here(block)}
        self._seen = seen
        self._farthest.rebuild(self._schedule.position)

    def _next_use(self, block: Block) -> int:
        """Return the next use of a block. Blocks for which compute waits are first."""
        return -1 if block in self.urgent else self._schedule.next_use(block)

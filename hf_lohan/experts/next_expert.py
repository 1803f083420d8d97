"""Which expert is loaded next, and which slot it goes to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from hf_lohan.experts.expert_schedule import ExpertSchedule
from hf_lohan.experts.farthest_use import FarthestUse
from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.weights import Slot, SlotRing

_MOST_HINTS = 2
"""Under way: one is read while the other is verified and copied."""


@dataclass
class ExpertFigures:
    """What calls of experts needed so far, and where they found it."""

    num_used: int = 0
    """Experts that calls computed with, each call by itself."""
    num_here: int = 0
    """Those of them that were in a slot, or on their way, when their call began."""
    num_loads: int = 0
    num_from_ram: int = 0
    """Loads of experts whose weights have a copy in RAM."""
    loaded_bytes: int = 0
    wrong_bytes: int = 0
    """Of loads ahead that were overwritten before anybody used them."""


class ExpertLoad(NamedTuple):
    """A block and the slot that it goes to."""

    block: Block
    slot: Slot
    is_hint: bool


class NextExpert:
    """What compute waits for goes first; then what the schedule says, as far as there is a slot whose block is needed
    later, or not at all. Of hints two at a time: what turns out to be needed does not wait behind many.

    Whoever calls holds the slots' lock. No call looks at more slots or blocks than one layer has experts, but for the
    first behind the begin or the end of a pass, and behind a step."""

    def __init__(
        self, schedule: ExpertSchedule, ring: SlotRing, is_in_ram: Callable[[Block], bool] = lambda block: False
    ) -> None:
        """``is_in_ram``: whether a block's weights have a copy in RAM, for the figures."""
        self._is_in_ram = is_in_ram
        self._schedule = schedule
        self._ring = ring
        self.urgent: list[Block] = []
        """What compute waits for though it is not of the call under way."""
        self.figures = ExpertFigures()
        self._farthest = FarthestUse(ring.slots[SizeClass.EXPERT], self._next_use)
        self._seen = (schedule.version, ring.num_forgets)
        self._num_hints = 0
        """Loads under way that may be in vain."""
        self._unused: dict[Block, None] = {}
        """Loaded, and not used since."""

    def find(self) -> ExpertLoad | None:
        """None if nothing can be loaded now."""
        self._catch_up()
        for block in self.urgent:
            slot = None if self._ring.is_here(block) else self._farthest.find(before=-1)
            if slot is not None:
                return ExpertLoad(block, slot, is_hint=False)
        load = self._schedule.next_load(self._ring.is_here)
        if load is None or (self._num_hints >= _MOST_HINTS and not load.is_sure):
            return None
        slot = self._farthest.find(before=load.place)
        return None if slot is None else ExpertLoad(load.block, slot, not load.is_sure)

    def take(self, load: ExpertLoad) -> None:
        """It was found, and is about to be loaded: claims the slot."""
        block, slot = load.block, load.slot
        if slot.block is not None:
            self._schedule.lose(slot.block)
            if slot.block in self._unused:
                del self._unused[slot.block]
                self.figures.wrong_bytes += slot.block.param_bytes
        self._ring.claim(slot, block)
        self._farthest.note(slot)
        self._num_hints += load.is_hint
        self._unused[block] = None
        self.figures.num_loads += 1
        self.figures.num_from_ram += self._is_in_ram(block)
        self.figures.loaded_bytes += block.param_bytes

    def end(self, load: ExpertLoad) -> None:
        """It was published or abandoned."""
        self._num_hints -= load.is_hint
        self._farthest.note(load.slot)

    def begin_call(self, layer: int, needed: Sequence[Block]) -> None:
        """The schedule was told of a call."""
        self.note_layer(layer)
        self.figures.num_used += len(needed)
        self.figures.num_here += sum(map(self._ring.is_here, needed))

    def use(self, slot: Slot) -> None:
        """Its block was pinned, and the schedule told."""
        assert slot.block is not None
        self._unused.pop(slot.block, None)
        self._farthest.note(slot)

    def note_layer(self, layer: int) -> None:
        """The schedule was told something of the layer."""
        for block in self._schedule.experts_of(layer):
            if self._ring.is_here(block):
                self._farthest.note(self._ring.slot_of(block))

    def _catch_up(self) -> None:
        """With what was said of passes, and with slots that were emptied."""
        seen = (self._schedule.version, self._ring.num_forgets)
        if seen == self._seen:
            self._farthest.advance(self._schedule.place)
            return
        if seen[1] != self._seen[1]:
            self._schedule.look_anew()
            self._unused = {block: None for block in self._unused if self._ring.is_here(block)}
        self._seen = seen
        self._farthest.rebuild(self._schedule.place)

    def _next_use(self, block: Block) -> int:
        """Nothing is needed sooner than what compute waits for."""
        return -1 if block in self.urgent else self._schedule.next_use(block)

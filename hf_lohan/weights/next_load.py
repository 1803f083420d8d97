"""Which block is loaded next, and which slot it goes to."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.weights.schedule import NEVER, LoadSchedule
from hf_lohan.weights.slot_ring import Slot


class NextLoad:
    """What is needed now and was not foreseen goes first; then what the schedule says, as far as there is a slot whose
    block is needed later, or not at all. Whoever calls holds the slots' lock."""

    def __init__(
        self,
        schedule: LoadSchedule,
        slots: Mapping[SizeClass, Sequence[Slot]],
        is_here: Callable[[Block], bool],
        may_overwrite: Callable[[Slot], bool],
    ) -> None:
        self._schedule = schedule
        self._slots = slots
        self._is_here = is_here
        self._may_overwrite = may_overwrite
        self.urgent: list[Block] = []
        """What compute waits for though nobody foresaw it."""

    def find(self) -> tuple[Block, Slot] | None:
        """None if nothing can be loaded now."""
        for block in self.urgent:
            slot = None if self._is_here(block) else self._victim(block, place=-1)
            if slot is not None:
                return block, slot
        load = self._schedule.next_load(self._is_here)
        if load is None:
            return None
        place, block = load
        slot = self._victim(block, place)
        return None if slot is None else (block, slot)

    def take(self, block: Block, slot: Slot) -> None:
        """It was found, and is about to be loaded."""
        if block in self.urgent and slot.block is not None:
            self._schedule.lose(slot.block)

    def _victim(self, block: Block, place: int) -> Slot | None:
        """The slot whose block is needed last; None if all are needed before ``place``. Of those that the pass does not
        need any more the one that it used first: the next forward begins where a backward ends."""
        may_overwrite, urgent = self._may_overwrite, self.urgent
        slots = [slot for slot in self._slots[block.size_class] if may_overwrite(slot) and slot.block not in urgent]
        if not slots:
            return None
        slot = max(slots, key=self._when_needed)
        return slot if self._when_needed(slot)[1] > place else None

    def _when_needed(self, slot: Slot) -> tuple[bool, int, int]:
        if slot.block is None:
            return True, NEVER, 0
        return False, self._schedule.next_use(slot.block), -self._schedule.last_use(slot.block)

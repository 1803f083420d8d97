"""Chooses the next block to load, and the slot that it overwrites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import NamedTuple

from hf_lohan.model import Block
from hf_lohan.weights.schedule import NEVER, LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing


class SlotLoad(NamedTuple):
    """A load of a block to a slot."""

    block: Block
    slot: Slot
    is_hint: bool = False
    """Whether it is uncertain that the block is needed."""


class NextLoad(ABC):
    """Chooses the next load. Unforeseen blocks for which compute waits are first. The schedule's next block follows, if
    some slot holds a block that is needed even later, or not at all. Callers hold the slots' lock."""

    def __init__(self) -> None:
        self.urgent: list[Block] = []
        """Unforeseen blocks for which compute waits."""

    @abstractmethod
    def find_load(self) -> SlotLoad | None:
        """Return the next load; None if no block can be loaded now."""

    @abstractmethod
    def claim_slot(self, load: SlotLoad) -> None:
        """Claim the slot of a load that begins."""

    @property
    def is_due(self) -> bool:
        """Whether a block is to be loaded, even if it has no slot yet."""
        return bool(self.urgent)

    def end_load(self, load: SlotLoad) -> None:  # noqa: B027
        """Record that the load was published or abandoned."""


class NextLayer(NextLoad):
    """Follows a `LoadSchedule`, in slots of all classes except EXPERT."""

    def __init__(self, schedule: LoadSchedule, ring: SlotRing) -> None:
        super().__init__()
        self._schedule = schedule
        self._ring = ring

    @property
    def is_due(self) -> bool:
        return bool(self.urgent) or self._schedule.next_load(self._ring.is_here) is not None

    def find_load(self) -> SlotLoad | None:
        for block in self.urgent:
            slot = None if self._ring.is_here(block) else self._find_slot(block, position=-1)
            if slot is not None:
                return SlotLoad(block, slot)
        due = self._schedule.next_load(self._ring.is_here)
        if due is None:
            return None
        position, block = due
        slot = self._find_slot(block, position)
        return None if slot is None else SlotLoad(block, slot)

    def claim_slot(self, load: SlotLoad) -> None:
        if load.block in self.urgent and load.slot.block is not None:
            self._schedule.note_displaced(load.slot.block)
        self._ring.claim(load.slot, load.block)

    def _find_slot(self, block: Block, position: int) -> Slot | None:
        """Return the slot whose block is needed last; None if all blocks are needed before ``position``. If several of
        the blocks are no longer needed in this pass, choose the block used longest ago. A backward ends with the first
        layers, which the next forward needs first, so recently used blocks are worth keeping."""
        slots = self._ring.slots[block.size_class]
        free = [slot for slot in slots if slot.is_claimable and slot.block not in self.urgent]
        if not free:
            return None
        slot = max(free, key=self._when_needed)
        return slot if self._when_needed(slot)[1] > position else None

    def _when_needed(self, slot: Slot) -> tuple[bool, int, int]:
        if slot.block is None:
            return True, NEVER, 0
        return False, self._schedule.next_use(slot.block), -self._schedule.last_use(slot.block)

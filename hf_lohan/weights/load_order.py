"""Chooses the next block to load, and the slot that it overwrites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block
from hf_lohan.weights.schedule import NEVER, LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing


class SlotLoad(NamedTuple):
    """A block, and the slot for it."""

    block: Block
    slot: Slot
    is_hint: bool = False
    """Whether the block may turn out not to be needed."""


class NextLoad(ABC):
    """Chooses the next load: first an unforeseen block that compute waits for, then the schedule's next block, if there
    is a slot whose block is needed later or never. Callers hold the slots' lock."""

    def __init__(self) -> None:
        self.urgent: list[Block] = []
        """Unforeseen blocks that compute waits for."""

    @abstractmethod
    def find_load(self) -> SlotLoad | None:
        """The next load. None if no block can be loaded now."""

    @abstractmethod
    def claim_slot(self, load: SlotLoad) -> None:
        """Take the slot of a load that begins."""

    def end_load(self, load: SlotLoad) -> None:  # noqa: B027
        """The load was published or abandoned."""


class NextLayer(NextLoad):
    """Follows a `LoadSchedule`, in slots of all classes but EXPERT."""

    def __init__(
        self,
        schedule: LoadSchedule,
        ring: SlotRing,
        may_overwrite: Callable[[Slot], bool] = lambda slot: slot.is_claimable,
    ) -> None:
        super().__init__()
        self._schedule = schedule
        self._ring = ring
        self._may_overwrite = may_overwrite

    def find_load(self) -> SlotLoad | None:
        for block in self.urgent:
            slot = None if self._ring.is_here(block) else self._find_slot(block, place=-1)
            if slot is not None:
                return SlotLoad(block, slot)
        due = self._schedule.next_load(self._ring.is_here)
        if due is None:
            return None
        place, block = due
        slot = self._find_slot(block, place)
        return None if slot is None else SlotLoad(block, slot)

    def claim_slot(self, load: SlotLoad) -> None:
        if load.block in self.urgent and load.slot.block is not None:
            self._schedule.note_displaced(load.slot.block)
        self._ring.claim(load.slot, load.block)

    def _find_slot(self, block: Block, place: int) -> Slot | None:
        """The slot whose block is needed last. None if all are needed before ``place``. Among blocks that the pass no
        longer needs, the one that it used first, because the next forward begins where a backward ends."""
        may_overwrite, urgent = self._may_overwrite, self.urgent
        slots = self._ring.slots[block.size_class]
        free = [slot for slot in slots if may_overwrite(slot) and slot.block not in urgent]
        if not free:
            return None
        slot = max(free, key=self._when_needed)
        return slot if self._when_needed(slot)[1] > place else None

    def _when_needed(self, slot: Slot) -> tuple[bool, int, int]:
        if slot.block is None:
            return True, NEVER, 0
        return False, self._schedule.next_use(slot.block), -self._schedule.last_use(slot.block)


@dataclass(frozen=True, eq=False)
class OrderedLoad:
    """A load of a `DeterministicLoadOrder`."""

    number: int
    """Position among all loads, from 0."""
    block: Block
    slot: Slot
    weights: Tensor
    """[block.numel] of the slot, which may belong to a later load when this one is carried out."""
    free: Event | None
    """Reached when compute has read the slot's last block for the last time."""
    version: int
    """`SlotRing.version_of` the block when the load was ordered."""


class DeterministicLoadOrder:
    """Orders loads by the computing thread's passes alone, so ranks that run the same passes order the same loads.

    A slot is free once compute unpins it. Loads in flight and copies by the optimizer are ignored, because their timing
    differs between ranks; the thread that carries out a load waits for them. An unforeseen load comes after all loads
    that were ordered before. Callers hold the slots' lock; only the computing thread forgets blocks.
    """

    def __init__(self, schedule: LoadSchedule, ring: SlotRing) -> None:
        self._ring = ring
        self._next_load = NextLayer(schedule, ring, lambda slot: slot.num_pins == 0)
        self.num_ordered = 0
        """Loads so far, equal on all ranks at the same point of their passes."""
        self._latest: dict[Slot, OrderedLoad] = {}

    def order_loads(self) -> list[OrderedLoad]:
        """The loads that have a slot now. Their blocks count as present from here on."""
        loads = []
        while (load := self._next_load.find_load()) is not None:
            loads.append(self._order(load))
        return loads

    def order_urgent(self, block: Block) -> OrderedLoad:
        """The load of an unforeseen block that compute needs now."""
        self._next_load.urgent.append(block)
        try:
            load = self._next_load.find_load()
            assert load is not None, f"compute has all slots of the size of {block} in use, and needs one more"
            return self._order(load)
        finally:
            self._next_load.urgent.remove(block)

    def is_latest(self, load: OrderedLoad) -> bool:
        """Whether no later load goes to its slot."""
        return self._latest[load.slot] is load

    def is_wanted(self, load: OrderedLoad) -> bool:
        """Whether its block was neither forgotten nor replaced since."""
        return load.slot.block is load.block and self._latest[load.slot] is load

    def _order(self, load: SlotLoad) -> OrderedLoad:
        block, slot = load.block, load.slot
        free = slot.last_use
        self._next_load.claim_slot(load)
        version = self._ring.version_of(block)
        ordered = OrderedLoad(self.num_ordered, block, slot, slot.weights[: block.numel], free, version)
        self.num_ordered += 1
        self._latest[slot] = ordered
        return ordered

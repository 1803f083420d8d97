"""Chooses the next block to load, and the slot that it overwrites."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from hf_lohan.device import Event
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
    """Chooses the next load. First come unforeseen blocks that compute is waiting for. Then comes the schedule's
    next block, if some slot holds a block that is needed later than it, or not at all. Callers hold the slots' lock."""

    def __init__(self) -> None:
        self.urgent: list[Block] = []
        """Unforeseen blocks for which compute waits."""

    @abstractmethod
    def find_load(self) -> SlotLoad | None:
        """Return the next load; None if no block can be loaded now."""

    @abstractmethod
    def claim_slot(self, load: SlotLoad) -> None:
        """Claim the slot of a load that begins."""

    def end_load(self, load: SlotLoad) -> None:  # noqa: B027
        """Note that the load was published or abandoned."""


class NextLayer(NextLoad):
    """Follows a `LoadSchedule`, in slots of all classes except EXPERT."""

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
        """Return the slot whose block is needed last; None if all blocks are needed before ``place``. If several of
        the blocks are no longer needed in this pass, choose the one used longest ago. A backward ends with the first
        layers, which the next forward needs first, so recently used blocks are worth keeping."""
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


_PERIOD_BITS = 32
_NUM_PERIODS = 64
"""Number of periods whose numbers of loads are kept."""


def first_of_period(period: int) -> int:
    """Return the number of a period's first load."""
    return period << _PERIOD_BITS


def period_of(number: int) -> int:
    """Return the period of a load's number."""
    return number >> _PERIOD_BITS


@dataclass(frozen=True, eq=False)
class OrderedLoad:
    """A load of a `DeterministicLoadOrder`."""

    number: int
    """Its period (`SlotRing.num_changes`) in the high bits, and its position among the period's loads."""
    block: Block
    slot: Slot
    weights: Tensor
    """View [block.numel] of the slot. The slot may belong to a later load when this load is carried out."""
    free: Event | None
    """Event after compute's last read of the slot's previous block."""
    version: int
    """Value of `SlotRing.version_of(block)` when the load was ordered."""
    num_ended: int = 0
    """Number of passes that had ended when the load was ordered."""


class DeterministicLoadOrder:
    """The order of loads depends only on the passes of the computing thread. Ranks that run the same passes therefore
    choose the same order. A slot is free when compute unpins it. Loads in flight and copies by the optimizer are
    ignored here, because their timing differs between ranks. The thread that carries out a load waits for them. An
    unforeseen load comes after all loads that are already ordered. Callers hold the slots' lock. Only the computing
    thread forgets blocks."""

    def __init__(self, schedule: LoadSchedule, ring: SlotRing) -> None:
        self._ring = ring
        self._next_load = NextLayer(schedule, ring, lambda slot: slot.num_pins == 0)
        self._num_ordered: Counter[int] = Counter()
        """By period, the number of ordered loads. It is equal on ranks at the same point of equal passes."""
        self.num_ended = 0
        """Number of passes that have ended."""
        self._latest: dict[Slot, OrderedLoad] = {}

    def order_loads(self) -> list[OrderedLoad]:
        """Order and return the loads that have a slot now. Their blocks then count as present."""
        loads = []
        while (load := self._next_load.find_load()) is not None:
            loads.append(self._order(load))
        return loads

    def order_urgent(self, block: Block) -> OrderedLoad:
        """Order and return the load of an unforeseen block that compute needs now."""
        self._next_load.urgent.append(block)
        try:
            load = self._next_load.find_load()
            assert load is not None, f"compute uses all slots of the size of {block}, and needs one more"
            return self._order(load)
        finally:
            self._next_load.urgent.remove(block)

    @property
    def next_number(self) -> int:
        """The number of the next load that is ordered."""
        return first_of_period(self._ring.num_changes) + self._num_ordered[self._ring.num_changes]

    def has(self, number: int) -> bool:
        """Return whether this rank has ordered a load with this number."""
        return number - first_of_period(period_of(number)) < self._num_ordered.get(period_of(number), 0)

    def is_latest(self, load: OrderedLoad) -> bool:
        """Return whether the load is the last one to its slot."""
        return self._latest[load.slot] is load

    def is_wanted(self, load: OrderedLoad) -> bool:
        """Return whether the load's block was neither forgotten nor replaced after the load was ordered."""
        return load.slot.block is load.block and self._latest[load.slot] is load

    def _order(self, load: SlotLoad) -> OrderedLoad:
        block, slot = load.block, load.slot
        free = slot.last_use
        self._next_load.claim_slot(load)
        version = self._ring.version_of(block)
        number = self.next_number
        ordered = OrderedLoad(number, block, slot, slot.weights[: block.numel], free, version, self.num_ended)
        self._num_ordered[self._ring.num_changes] += 1
        if len(self._num_ordered) > _NUM_PERIODS:
            del self._num_ordered[min(self._num_ordered)]
        self._latest[slot] = ordered
        return ordered

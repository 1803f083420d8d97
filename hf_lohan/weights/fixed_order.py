"""One order of loads for several ranks: it follows from what their computing threads do, and from nothing else."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.model import Block
from hf_lohan.weights.next_load import NextLoad
from hf_lohan.weights.schedule import LoadSchedule
from hf_lohan.weights.slot_ring import Slot, SlotRing


@dataclass(frozen=True, eq=False)
class OrderedLoad:
    """A load that is to come."""

    number: int
    """Its place among all loads, from 0."""
    block: Block
    slot: Slot
    weights: Tensor
    """[block.numel] of the slot, which may belong to a later load by the time this one is carried out."""
    free: Event | None
    """Reached when compute has last read what the slot held before."""
    version: int
    """Of the block, when this was ordered (`SlotRing.version_of`)."""


class FixedOrder:
    """Decides, on the computing thread alone, which block is loaded next and into which slot.

    A slot may be overwritten from when compute has let go of it. Whether an earlier load to it has been carried out by
    then, or the optimizer still copies from it, depends on who is faster; so that does not count here, and whoever
    carries out a load waits for it. Ranks that run the same passes therefore decide alike, one by one. What nobody
    foresaw has its place behind all that was ordered before.

    Whoever calls holds the slots' lock. Blocks are forgotten (`SlotRing.forget`) by the computing thread as well.
    """

    def __init__(self, schedule: LoadSchedule, ring: SlotRing) -> None:
        self._ring = ring
        self._next_load = NextLoad(schedule, ring.slots, ring.is_here, lambda slot: slot.num_pins == 0)
        self._num_ordered = 0
        self._latest: dict[Slot, OrderedLoad] = {}

    def order(self) -> list[OrderedLoad]:
        """Loads for which there is a slot now. Their blocks count as being there from here on."""
        loads = []
        while (found := self._next_load.find()) is not None:
            loads.append(self._take(*found))
        return loads

    def order_urgent(self, block: Block) -> OrderedLoad:
        """A block that compute needs now, and that nobody foresaw."""
        self._next_load.urgent.append(block)
        try:
            found = self._next_load.find()
            assert found is not None, f"compute has all slots of the size of {block} in use, and needs one more"
            return self._take(*found)
        finally:
            self._next_load.urgent.remove(block)

    def is_latest(self, load: OrderedLoad) -> bool:
        """Whether no later load goes to its slot."""
        return self._latest[load.slot] is load

    def is_wanted(self, load: OrderedLoad) -> bool:
        """Whether its block has neither been forgotten since nor made room for another."""
        return load.slot.block is load.block and self._latest[load.slot] is load

    def _take(self, block: Block, slot: Slot) -> OrderedLoad:
        self._next_load.take(block, slot)
        free = slot.last_use
        self._ring.claim(slot, block)
        version = self._ring.version_of(block)
        load = OrderedLoad(self._num_ordered, block, slot, slot.weights[: block.numel], free, version)
        self._num_ordered += 1
        self._latest[slot] = load
        return load

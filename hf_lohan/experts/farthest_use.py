"""Which slot is given up: the one whose block is needed last, found without looking at all slots."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from hf_lohan.model import Block
from hf_lohan.weights import Slot
from hf_lohan.weights.schedule import NEVER

_EMPTY = NEVER + 1


class FarthestUse:
    """Slots by the place that needs their blocks next (`ExpertSchedule.next_use`). Whoever changes the next use of a
    block says so, with `note`; blocks that were expected at a place that is behind are found without that."""

    def __init__(self, slots: Iterable[Slot], next_use: Callable[[Block], int]) -> None:
        self._slots = tuple(slots)
        self._next_use = next_use
        self._at: dict[int, dict[Slot, None]] = {}
        self._place_of: dict[Slot, int] = {}
        self._places: list[int] = []
        """A heap of those with slots, the last first, negated; some may have none any more."""
        self._busy: set[Slot] = set()
        """Those that could not be overwritten when somebody looked."""
        self._place = 0
        self.rebuild(0)

    def rebuild(self, place: int) -> None:
        """All next uses may be others. ``place`` is at hand."""
        self._at.clear()
        self._place_of.clear()
        self._places.clear()
        self._busy.clear()
        self._place = place
        for slot in self._slots:
            self.note(slot)

    def advance(self, place: int) -> None:
        """``place`` is at hand: those before it need nothing any more."""
        if place < self._place:
            self.rebuild(place)
            return
        for over in range(self._place, place):
            for slot in self._at.pop(over, ()):
                del self._place_of[slot]
                self.note(slot)
        self._place = place

    def note(self, slot: Slot) -> None:
        """The slot has another block, or its block another next use."""
        self._take_out(slot)
        place = _EMPTY if slot.block is None else self._next_use(slot.block)
        slots = self._at.get(place)
        if slots is None:
            slots = self._at[place] = {}
            heapq.heappush(self._places, -place)
        slots[slot] = None
        self._place_of[slot] = place

    def find(self, before: int) -> Slot | None:
        """A slot that may be overwritten by what is needed at ``before``: of those that are needed later, or never,
        the one needed last. Among equals the one that was noted first. Slots that the device has yet to compute with
        come last, though they were used last and so are needed last: a copy to them would wait, and keep its buffer."""
        for slot in [slot for slot in self._busy if slot.is_claimable]:
            self.note(slot)
        computing: Slot | None = None
        while self._places:
            place = -self._places[0]
            slots = self._at.get(place)
            if not slots:
                heapq.heappop(self._places)
                self._at.pop(place, None)
                continue
            if place <= before:
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
        place = self._place_of.pop(slot, None)
        if place is not None:
            del self._at[place][slot]

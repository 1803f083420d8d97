"""How often the experts of a layer were used, which says what will probably be used again."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

_DECAY = 0.9
"""What a use counts for one pass later."""
_MAX_WEIGHT = 1e12


class Frequencies:
    """How often passes of one kind used each expert of one layer, the last passes counting most."""

    def __init__(self) -> None:
        self._counts: dict[int, float] = {}
        self._weight = 1.0
        self._last: set[int] = set()
        self._most_used: dict[int, None] | None = None

    def note(self, experts: Iterable[int], *, begins_pass: bool) -> None:
        """A pass used these; more may follow of the same."""
        if begins_pass:
            self._weight /= _DECAY
            if self._weight > _MAX_WEIGHT:
                self._counts = {expert: count / self._weight for expert, count in self._counts.items()}
                self._weight = 1.0
            self._last = set()
        for expert in experts:
            if expert not in self._last:
                self._last.add(expert)
                self._counts[expert] = self._counts.get(expert, 0.0) + self._weight
        self._most_used = None

    @property
    def most_used(self) -> dict[int, None]:
        """As many as the last pass used, the most used first."""
        if self._most_used is None:
            counts = self._counts
            most = heapq.nlargest(len(self._last), counts, key=lambda expert: (counts[expert], -expert))
            self._most_used = dict.fromkeys(most)
        return self._most_used

"""How often the experts of a layer were used, which says what will probably be used again; and whether that was right
more often than what the layer's router said beforehand."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection, Iterable

_DECAY = 0.9**0.25
"""What a use counts for one pass later: nine tenths behind four passes, as caches of experts do well with."""
_MOST = 0.5
_STEPS = 16
"""Ranks tell counts apart that differ by one part in so many of a doubling."""


class Frequencies:
    """How often passes of one kind used each expert of one layer, the last passes counting most. Kept as logarithms, so
    what was not used again stays as it is while later uses count for more."""

    def __init__(self) -> None:
        self._log_counts: dict[int, float] = {}
        self._log_weight = 0.0
        self._last: set[int] = set()
        self._most_used: dict[int, None] | None = None

    def note(self, experts: Iterable[int], *, begins_pass: bool) -> None:
        """A pass used these; more may follow of the same."""
        if begins_pass:
            self._log_weight -= math.log2(_DECAY)
            self._last = set()
        for expert in experts:
            if expert not in self._last:
                self._last.add(expert)
                before = self._log_counts.get(expert, -math.inf)
                self._log_counts[expert] = self._log_weight + math.log2(1 + 2 ** (before - self._log_weight))
        self._most_used = None

    @property
    def most_used(self) -> dict[int, None]:
        """As many as the last pass used, the most used first."""
        if self._most_used is None:
            counts = self._log_counts
            most = heapq.nlargest(len(self._last), counts, key=lambda expert: (counts[expert], -expert))
            self._most_used = dict.fromkeys(most)
        return self._most_used

    def rank(self, expert: int) -> int:
        """The higher, the more often it was used, comparable over layers; below all others if never."""
        count = self._log_counts.get(expert)
        return -1 if count is None else round(_STEPS * count)


class Trust:
    """Whom to believe of one layer: its habits, or its router asked beforehand. The share of experts each was right
    about, the last passes counting most."""

    def __init__(self) -> None:
        self._right_by_habit = 0.0
        self._right_by_router = 0.0
        self._weight = 0.0

    def note(self, used: Collection[int], *, by_habit: Collection[int], by_router: Collection[int]) -> None:
        """A pass used these, and those were expected."""
        self._weight = _DECAY * self._weight + 1
        self._right_by_habit += (_overlap(used, by_habit) - self._right_by_habit) / self._weight
        self._right_by_router += (_overlap(used, by_router) - self._right_by_router) / self._weight

    @property
    def is_in_router(self) -> bool:
        """Habits mostly name what is here; what routers name besides is worth loading if they are right about most.
        Until that is known they are believed."""
        return not self._weight or self._right_by_router > max(self._right_by_habit, _MOST)


def _overlap(used: Collection[int], expected: Collection[int]) -> float:
    return len(set(used) & set(expected)) / max(len(used), len(expected), 1)

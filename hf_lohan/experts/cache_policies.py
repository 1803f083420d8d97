"""Policies that decide which experts a cache in RAM keeps during generation, and which expert is replaced.

Generation uses some experts much more often than others. In training, the many tokens use all experts in turn, so that
a fixed set of copies is as good as any policy.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable
from typing import Generic, Literal, NamedTuple, TypeVar

_DECAY = 0.9
_DECAY_PASSES = 4
_MAX_WEIGHT = 1e12
Expert = TypeVar("Expert", bound=Hashable)
PolicyName = Literal["auto", "lru"]


class CacheUse(NamedTuple, Generic[Expert]):
    """The result of one use of an expert."""

    is_hit: bool
    is_kept: bool
    """Whether the expert is in the cache after this use."""
    victim: Expert | None = None
    """The expert that was replaced."""


class CachePolicy(Generic[Expert]):
    """Decides which experts are in a cache of `capacity` entries. All experts have scores, including those that are not
    in the cache. An expert replaces the expert with the lowest score if its own score is higher. A use takes at most
    logarithmic time.

    The policy ``auto`` counts uses, so that a single use replaces nothing. Counts decay by a factor of 0.9 every 4
    passes. This is implemented by a growing weight of later uses. With ``lru`` the score is the number of the last use,
    so that the least recently used expert is replaced.
    """

    def __init__(self, capacity: int, name: PolicyName) -> None:
        """Raises ValueError if ``capacity`` is 0."""
        if capacity < 1:
            raise ValueError(f"a cache needs at least one entry, and this one has {capacity}; run without a cache")
        self.capacity = capacity
        self._counts_uses = name == "auto"
        self._scores: dict[Expert, float] = {}
        self._weight = 1.0
        self._num_uses = self._num_passes = 0
        self._heap: list[tuple[float, int, Expert]] = []
        """(score, entry number, expert) of kept experts, the lowest score first. Actual scores may be higher."""
        self._entry_of: dict[Expert, int] = {}
        self._num_entries = 0

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def use(self, expert: Expert) -> CacheUse[Expert]:
        """Count a use, and decide whether the cache keeps the expert."""
        self._num_uses += 1
        counted = self._scores.get(expert, 0.0) + self._weight
        self._scores[expert] = counted if self._counts_uses else self._num_uses
        if expert in self:
            return CacheUse(is_hit=True, is_kept=True)
        victim = None
        if len(self) >= self.capacity:
            victim = self._find_lowest()
            if self._scores[expert] <= self._scores[victim]:
                return CacheUse(is_hit=False, is_kept=False)
            self.remove(victim)
        self._keep(expert)
        return CacheUse(is_hit=False, is_kept=True, victim=victim)

    def end_pass(self) -> None:
        """End a pass, after all layers have run."""
        self._num_passes += 1
        if self._num_passes % _DECAY_PASSES or not self._counts_uses:
            return
        self._weight /= _DECAY
        if self._weight > _MAX_WEIGHT:
            self._scores = {expert: score / self._weight for expert, score in self._scores.items()}
            self._weight = 1.0
            kept = [expert for _, entry, expert in sorted(self._heap) if self._entry_of.get(expert) == entry]
            self._heap.clear()
            for expert in kept:
                self._keep(expert)

    def remove(self, expert: Expert) -> None:
        """Remove an expert from the cache."""
        del self._entry_of[expert]

    def _keep(self, expert: Expert) -> None:
        self._num_entries += 1
        self._entry_of[expert] = self._num_entries
        heapq.heappush(self._heap, (self._scores[expert], self._num_entries, expert))
        if len(self._heap) > 4 * self.capacity + 16:
            self._heap = [entry for entry in self._heap if self._entry_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _find_lowest(self) -> Expert:
        """Return the kept expert with the lowest score. The cache is not empty."""
        while True:
            score, entry, expert = self._heap[0]
            if self._entry_of.get(expert) == entry and score == self._scores[expert]:
                return expert
            heapq.heappop(self._heap)
            if self._entry_of.get(expert) == entry:  # if not, the expert was removed, or added again
                self._keep(expert)

"""Policies that decide which experts a cache in RAM keeps during generation, and which expert is replaced.

Generation uses some experts much more often than others. In training, the many tokens use all experts in turn, so that
a fixed set of copies is as good as any policy.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
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


class CachePolicy(ABC, Generic[Expert]):
    """Decides which experts are in a cache of `capacity` entries. A use takes at most logarithmic time."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError if ``capacity`` is 0."""
        if capacity < 1:
            raise ValueError(f"a cache needs at least one entry, and this one has {capacity}; run without a cache")
        self.capacity = capacity

    def use(self, expert: Expert) -> CacheUse[Expert]:
        """Count a use, and decide whether the cache keeps the expert."""
        is_hit = expert in self
        self._count_use(expert, is_hit=is_hit)
        if is_hit:
            return CacheUse(is_hit=True, is_kept=True)
        victim = None
        if len(self) >= self.capacity:
            victim = self._choose_victim(expert)
            if victim is None:
                return CacheUse(is_hit=False, is_kept=False)
            self.remove(victim)
        self._keep(expert)
        return CacheUse(is_hit=False, is_kept=True, victim=victim)

    def end_pass(self) -> None:
        """End a pass, after all layers have run."""

    @abstractmethod
    def __contains__(self, expert: Expert) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def remove(self, expert: Expert) -> None:
        """Remove an expert from the cache."""

    @abstractmethod
    def _count_use(self, expert: Expert, *, is_hit: bool) -> None: ...

    @abstractmethod
    def _choose_victim(self, expert: Expert) -> Expert | None:
        """Return the expert that ``expert`` replaces, or None if ``expert`` is not worth keeping."""

    @abstractmethod
    def _keep(self, expert: Expert) -> None: ...


class LeastRecentlyUsed(CachePolicy[Expert]):
    """Replaces the least recently used expert."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Expert, None] = OrderedDict()

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._order

    def __len__(self) -> int:
        return len(self._order)

    def remove(self, expert: Expert) -> None:
        del self._order[expert]

    def _count_use(self, expert: Expert, *, is_hit: bool) -> None:
        if is_hit:
            self._order.move_to_end(expert)

    def _choose_victim(self, expert: Expert) -> Expert | None:
        return next(iter(self._order))

    def _keep(self, expert: Expert) -> None:
        self._order[expert] = None


class FrequencyWithAdmission(CachePolicy[Expert]):
    """Counts the uses of all experts, including those that are not in the cache. An expert replaces the expert with the
    lowest count if its own count is higher, so that a single use replaces nothing.

    Counts decay by a factor of 0.9 every 4 passes. This is implemented by a growing weight of later uses.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._counts: dict[Expert, float] = {}
        self._weight = 1.0
        self._num_passes = 0
        self._heap: list[tuple[float, int, Expert]] = []
        """(count, entry number, expert) of kept experts, the lowest count first. Actual counts may be higher."""
        self._entry_of: dict[Expert, int] = {}
        self._num_entries = 0

    def __contains__(self, expert: Expert) -> bool:
        return expert in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def end_pass(self) -> None:
        self._num_passes += 1
        if self._num_passes % _DECAY_PASSES:
            return
        self._weight /= _DECAY
        if self._weight > _MAX_WEIGHT:
            self._counts = {expert: count / self._weight for expert, count in self._counts.items()}
            self._weight = 1.0
            kept = [expert for _, entry, expert in sorted(self._heap) if self._entry_of.get(expert) == entry]
            self._heap.clear()
            for expert in kept:
                self._keep(expert)

    def remove(self, expert: Expert) -> None:
        del self._entry_of[expert]

    def _count_use(self, expert: Expert, *, is_hit: bool) -> None:
        self._counts[expert] = self._counts.get(expert, 0.0) + self._weight

    def _choose_victim(self, expert: Expert) -> Expert | None:
        victim = self._least_used()
        return victim if victim is not None and self._counts[expert] > self._counts[victim] else None

    def _keep(self, expert: Expert) -> None:
        self._num_entries += 1
        self._entry_of[expert] = self._num_entries
        heapq.heappush(self._heap, (self._counts[expert], self._num_entries, expert))
        if len(self._heap) > 4 * self.capacity + 16:
            self._heap = [entry for entry in self._heap if self._entry_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _least_used(self) -> Expert | None:
        while self._heap:
            count, entry, expert = self._heap[0]
            if self._entry_of.get(expert) != entry:  # the expert was removed, or added again
                heapq.heappop(self._heap)
            elif count != self._counts[expert]:
                heapq.heappop(self._heap)
                self._keep(expert)
            else:
                return expert
        return None


def make_policy(name: PolicyName, capacity: int) -> CachePolicy[Hashable]:
    """Make the policy ``auto``, which counts uses, or ``lru``, which keeps the last used experts."""
    return FrequencyWithAdmission(capacity) if name == "auto" else LeastRecentlyUsed(capacity)

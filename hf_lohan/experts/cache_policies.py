"""Which experts a cache in RAM keeps while a model generates, and which one makes room for another.

With as many tokens as training has, all experts are used in turn, and a fixed set of copies serves as well as any
policy. Generation uses some experts much more often than others.
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
    """The outcome of one use."""

    is_hit: bool
    is_kept: bool
    """Whether the expert is in the cache after this use."""
    victim: Expert | None = None
    """The expert that made room for it."""


class CachePolicy(ABC, Generic[Expert]):
    """Knows which experts are in a cache of `capacity` entries. A use takes logarithmic time at most."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError if ``capacity`` is 0."""
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} places keeps nothing: give it at least one, or have none")
        self.capacity = capacity

    def use(self, expert: Expert) -> CacheUse[Expert]:
        """Count a use, and decide whether the expert is kept from now on."""
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
        """All layers have run."""

    @abstractmethod
    def __contains__(self, expert: Expert) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def remove(self, expert: Expert) -> None:
        """The expert is not in the cache any more."""

    @abstractmethod
    def _count_use(self, expert: Expert, *, is_hit: bool) -> None: ...

    @abstractmethod
    def _choose_victim(self, expert: Expert) -> Expert | None:
        """The expert that makes room for ``expert``. None if ``expert`` is not worth it."""

    @abstractmethod
    def _keep(self, expert: Expert) -> None: ...


class LeastRecentlyUsed(CachePolicy[Expert]):
    """Replaces the expert whose last use is the oldest."""

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
    """Counts the uses of all experts, also of those that are not kept. Replaces the one with the lowest count, and only
    by one with a higher count, so that a single use replaces nothing.

    Every 4 passes all counts are multiplied by 0.9. Instead of all counts, the weight of later uses is changed.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._counts: dict[Expert, float] = {}
        self._weight = 1.0
        self._num_passes = 0
        self._heap: list[tuple[float, int, Expert]] = []
        """(count, entry number, expert) of kept experts, the lowest first. Counts may have grown since."""
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
            if self._entry_of.get(expert) != entry:  # removed, or entered again
                heapq.heappop(self._heap)
            elif count != self._counts[expert]:
                heapq.heappop(self._heap)
                self._keep(expert)
            else:
                return expert
        return None


def make_policy(name: PolicyName, capacity: int) -> CachePolicy[Hashable]:
    """``auto`` counts uses, with admission; ``lru`` keeps what was used last."""
    return FrequencyWithAdmission(capacity) if name == "auto" else LeastRecentlyUsed(capacity)

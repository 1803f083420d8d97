"""Which experts are worth their RAM where passes use a few of each layer: what a cache keeps, and what it gives up.

With as many tokens as training has, all experts are used in turn, and no choice is better than any: copies of fixed
records serve as well. Generation uses some experts much oftener than others.
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, Literal, NamedTuple, TypeVar

NEVER = 1 << 60
_MAX_WEIGHT = 1e12
Key = TypeVar("Key", bound=Hashable)
PolicyName = Literal["auto", "lfu", "lru", "next_use"]


class Use(NamedTuple, Generic[Key]):
    """What became of one use."""

    is_hit: bool
    is_kept: bool
    """Whether it is in the cache from here on."""
    victim: Key | None = None
    """What made room for it."""


class CachePolicy(ABC, Generic[Key]):
    """Knows which keys are in a cache of `capacity` places. The time of a use grows with its logarithm at most."""

    def __init__(self, capacity: int) -> None:
        """Raises ValueError for a cache without a place."""
        if capacity < 1:
            raise ValueError(f"a cache of {capacity} places keeps nothing: give it at least one, or have none")
        self.capacity = capacity

    def use(self, key: Key, next_use: int = NEVER) -> Use[Key]:
        """``next_use``: when it is used again, counted as the caller likes, if that is known."""
        if key in self:
            self._note(key, next_use, is_hit=True)
            return Use(is_hit=True, is_kept=True)
        self._note(key, next_use, is_hit=False)
        victim = None
        if len(self) >= self.capacity:
            victim = self._choose_victim(key, next_use)
            if victim is None:
                return Use(is_hit=False, is_kept=False)
            self.drop(victim)
        self._keep(key, next_use)
        return Use(is_hit=False, is_kept=True, victim=victim)

    def end_pass(self) -> None:
        """All layers have had their turn."""

    @abstractmethod
    def __contains__(self, key: Key) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def drop(self, key: Key) -> None:
        """It is not in the cache any more."""

    @abstractmethod
    def _note(self, key: Key, next_use: int, *, is_hit: bool) -> None:
        """It was used."""

    @abstractmethod
    def _choose_victim(self, key: Key, next_use: int) -> Key | None:
        """What makes room for ``key``; None if that is not worth it."""

    @abstractmethod
    def _keep(self, key: Key, next_use: int) -> None: ...


class LeastRecentlyUsed(CachePolicy[Key]):
    """Gives up what was not used for the longest time."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._order: OrderedDict[Key, None] = OrderedDict()

    def __contains__(self, key: Key) -> bool:
        return key in self._order

    def __len__(self) -> int:
        return len(self._order)

    def drop(self, key: Key) -> None:
        del self._order[key]

    def _note(self, key: Key, next_use: int, *, is_hit: bool) -> None:
        if is_hit:
            self._order.move_to_end(key)

    def _choose_victim(self, key: Key, next_use: int) -> Key | None:
        return next(iter(self._order))

    def _keep(self, key: Key, next_use: int) -> None:
        self._order[key] = None


class _ByRank(CachePolicy[Key]):
    """What is kept in a heap by rank, the least first. Ranks of what is kept may grow without a word."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._heap: list[tuple[float, int, Key]] = []
        self._entry_of: dict[Key, int] = {}
        self._num_entries = 0

    def __contains__(self, key: Key) -> bool:
        return key in self._entry_of

    def __len__(self) -> int:
        return len(self._entry_of)

    def drop(self, key: Key) -> None:
        del self._entry_of[key]

    def _keep(self, key: Key, next_use: int) -> None:
        self._push(key)

    def _push(self, key: Key) -> None:
        self._num_entries += 1
        self._entry_of[key] = self._num_entries
        heapq.heappush(self._heap, (self._rank(key), self._num_entries, key))
        if len(self._heap) > 4 * self.capacity + 16:
            self._heap = [entry for entry in self._heap if self._entry_of.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def _least(self) -> Key | None:
        while self._heap:
            rank, entry, key = self._heap[0]
            if self._entry_of.get(key) != entry:  # dropped, or pushed again since
                heapq.heappop(self._heap)
            elif rank != self._rank(key):
                heapq.heappop(self._heap)
                self._push(key)
            else:
                return key
        return None

    @abstractmethod
    def _rank(self, key: Key) -> float: ...


class _Counting(_ByRank[Key]):
    """Counts uses. Every ``passes`` passes each count is worth ``decay`` of what it was: instead of all counts, the
    weight of the uses to come is changed."""

    def __init__(self, capacity: int, *, decay: float = 0.9, passes: int = 4) -> None:
        super().__init__(capacity)
        self._decay = decay
        self._passes = passes
        self._num_passes = 0
        self._counts: dict[Key, float] = {}
        self._weight = 1.0

    def end_pass(self) -> None:
        self._num_passes += 1
        if self._num_passes % self._passes:
            return
        self._weight /= self._decay
        if self._weight > _MAX_WEIGHT:
            self._counts = {key: count / self._weight for key, count in self._counts.items()}
            self._weight = 1.0
            kept = [key for _, entry, key in sorted(self._heap) if self._entry_of.get(key) == entry]
            self._heap.clear()
            for key in kept:
                self._push(key)

    def _rank(self, key: Key) -> float:
        return self._counts[key]


class FrequencyWithAdmission(_Counting[Key]):
    """Counts the uses of all keys, of those that are not kept, too. Takes in only what is used oftener than what would
    have to make room, so what is used once pushes nothing out."""

    def _note(self, key: Key, next_use: int, *, is_hit: bool) -> None:
        self._counts[key] = self._counts.get(key, 0.0) + self._weight

    def _choose_victim(self, key: Key, next_use: int) -> Key | None:
        victim = self._least()
        return victim if victim is not None and self._counts[key] > self._counts[victim] else None


class Algorithm2(_Counting[Key]):
    """MoESys' Algorithm 2, as printed: of the keys with at least ``threshold`` hits the one with the fewest makes room.
    What has fewer cannot be given up, and what was given up is forgotten, so it begins with one hit again. Where all
    have fewer, which the text leaves open, nothing is taken in."""

    def __init__(self, capacity: int, *, decay: float = 0.9, passes: int = 4, threshold: float = 1.0) -> None:
        super().__init__(capacity, decay=decay, passes=passes)
        self._threshold = threshold
        self._protected: set[Key] = set()
        """Kept, with too few hits. Hits become worth less all the time, so only a use changes that."""

    def __contains__(self, key: Key) -> bool:
        return super().__contains__(key) or key in self._protected

    def __len__(self) -> int:
        return super().__len__() + len(self._protected)

    def drop(self, key: Key) -> None:
        self._entry_of.pop(key, None)
        self._protected.discard(key)
        del self._counts[key]

    def _note(self, key: Key, next_use: int, *, is_hit: bool) -> None:
        if is_hit:
            self._counts[key] += self._weight
            if key in self._protected:
                self._protected.remove(key)
                self._push(key)

    def _keep(self, key: Key, next_use: int) -> None:
        self._counts[key] = self._weight
        super()._keep(key, next_use)

    def _choose_victim(self, key: Key, next_use: int) -> Key | None:
        while (least := self._least()) is not None and self._counts[least] < self._threshold * self._weight:
            del self._entry_of[least]
            self._protected.add(least)
        return least


class NextUse(_ByRank[Key]):
    """Gives up what is used last of all, and takes in only what is used sooner (Belady). Needs to be told when."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._when: dict[Key, int] = {}

    def drop(self, key: Key) -> None:
        super().drop(key)
        del self._when[key]

    def _note(self, key: Key, next_use: int, *, is_hit: bool) -> None:
        if is_hit:
            self._when[key] = next_use
            self._push(key)

    def _keep(self, key: Key, next_use: int) -> None:
        self._when[key] = next_use
        super()._keep(key, next_use)

    def _choose_victim(self, key: Key, next_use: int) -> Key | None:
        victim = self._least()
        return victim if victim is not None and next_use < self._when[victim] else None

    def _rank(self, key: Key) -> float:
        return -self._when[key]


def policy_named(name: PolicyName, capacity: int) -> CachePolicy[Hashable]:
    """``auto`` is by frequency, with admission; ``lfu`` is MoESys' Algorithm 2. Raises ValueError for another name."""
    policies: dict[str, type[CachePolicy[Hashable]]] = {
        "auto": FrequencyWithAdmission,
        "lfu": Algorithm2,
        "lru": LeastRecentlyUsed,
        "next_use": NextUse,
    }
    if name not in policies:
        raise ValueError(f"there is no cache policy {name!r}; choose one of {', '.join(policies)}")
    return policies[name](capacity)

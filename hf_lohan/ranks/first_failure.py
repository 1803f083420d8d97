"""The first thing that went wrong on any rank, as one rank knows it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hf_lohan.ranks.errors import RankFailedError
from hf_lohan.threads import raised_anew


@dataclass(frozen=True)
class Failure:
    """Of one rank."""

    rank: int
    """Where it began."""
    text: str
    error: BaseException | None = None
    """If this rank raised it."""


class FirstRankFailure:
    """Noted once, for good, on any thread. What fails afterwards follows from it."""

    def __init__(self, rank: int, changed: threading.Condition, lock: threading.RLock) -> None:
        """``rank``: this one; ``lock`` is that of ``changed``."""
        self._rank = rank
        self._changed = changed
        self._lock = lock
        self._failure: Failure | None = None
        self._told_of_it: list[Callable[[RankFailedError], object]] = []
        self.was_told = False
        """Whether the other ranks were told by this one."""

    @property
    def is_known(self) -> bool:
        return self._failure is not None

    def note(self, failure: Failure) -> None:
        """Does nothing if there was one before."""
        with self._lock:
            if self._failure is not None:
                return
            self._failure = failure
            told = list(self._told_of_it)
            self._changed.notify_all()
        for tell in told:
            tell(RankFailedError(failure.text, failure.rank))

    def when_known(self, told: Callable[[RankFailedError], object]) -> None:
        """Have `told` called once, on any thread; at once if it is known."""
        with self._lock:
            self._told_of_it.append(told)
            failure = self._failure
        if failure is not None:
            told(RankFailedError(failure.text, failure.rank))

    def to_be_told(self) -> Failure | None:
        """What this rank has to tell the others: once, if there is anything."""
        with self._lock:
            if self.was_told or self._failure is None:
                return None
            self.was_told = True
            return self._failure

    def raise_if_known(self, did: str) -> None:
        """Raise RankFailedError, or what this rank itself raised. `did` completes "while rank 0 ..."."""
        failure = self._failure
        if failure is None:
            return
        if failure.error is not None:
            raise raised_anew(failure.error)
        joint = ";" if " while rank " in failure.text else " while"
        raise RankFailedError(f"{failure.text}{joint} rank {self._rank} {did}", failure.rank)

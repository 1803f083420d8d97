"""The errors that end a rank because of another rank, and the first failure that a rank knows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from hf_lohan.threads import raised_anew


class RankFailedError(RuntimeError):
    """A rank ended or failed, so the other ranks cannot continue."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank
        """The rank where the failure began."""


class RankTimeoutError(RankFailedError):
    """A rank was silent for too long while another rank waited for it."""


class RanksDisagreeError(RuntimeError):
    """Two ranks did different things or have different data. All ranks must do the same and have the same data."""


@dataclass(frozen=True)
class Failure:
    rank: int
    """The rank where the failure began."""
    text: str
    error: BaseException | None = None
    """The exception, if this rank raised it."""


class FirstRankFailure:
    """The first failure of any rank. It is recorded once, from any thread. Later failures follow from it and are
    ignored."""

    def __init__(self, rank: int) -> None:
        """``rank``: this rank."""
        self.failure: Failure | None = None
        self._rank = rank
        self._lock = threading.Lock()
        self._is_known = threading.Event()
        self._callbacks: list[Callable[[RankFailedError], object]] = []

    @property
    def is_known(self) -> bool:
        return self.failure is not None

    def wait(self, timeout_s: float) -> bool:
        """Wait for a failure, and return whether one is known."""
        return self._is_known.wait(timeout_s)

    def record_failure(self, failure: Failure) -> None:
        """Record the first failure. Later failures are ignored."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure = failure
            callbacks = list(self._callbacks)
        self._is_known.set()
        for callback in callbacks:
            callback(self._error_of(failure, "was running"))

    def add_callback(self, callback: Callable[[RankFailedError], object]) -> None:
        """Call ``callback`` once, on any thread, when a failure is recorded, or now if one is already recorded."""
        with self._lock:
            self._callbacks.append(callback)
            failure = self.failure
        if failure is not None:
            callback(self._error_of(failure, "was running"))

    def raise_if_known(self, action: str) -> None:
        """Raise RankFailedError, or this rank's own exception, if a failure is known. ``action`` completes "while rank
        0 ..."."""
        failure = self.failure
        if failure is None:
            return
        if failure.error is not None:
            raise raised_anew(failure.error)
        raise self._error_of(failure, action)

    def error(self, action: str) -> BaseException:
        """Return the exception that `raise_if_known` raises."""
        assert self.failure is not None
        return self.failure.error or self._error_of(self.failure, action)

    def _error_of(self, failure: Failure, action: str) -> RankFailedError:
        joint = ";" if " while rank " in failure.text else " while"
        return RankFailedError(f"{failure.text}{joint} rank {self._rank} {action}", failure.rank)

"""Exchanges that any rank may begin, and that all ranks carry out together, one round after the other.

Each rank has a thread and a lane for them. In a round every rank sends its *head*, with its request and its progress,
and then all ranks do the same work for all heads. A rank enters a round when its head has changed, or when it waits for
others. If its own computation waits for other ranks, or has requested nothing for a while, the rank enters too, and
serves them. So ranks whose passes differ exchange nothing twice, and do not wait for each other forever.

*No wait is circular.* Every rank reaches its next round by itself, because its computation continues until it requests
something, waits for another rank, runs no pass, or is idle for a while. In all these cases its thread enters.
"""

from __future__ import annotations

import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, suppress

from hf_lohan.ranks.transport.failures import RankFailedError
from hf_lohan.ranks.transport.lanes import LaneClosedError, RankLane
from hf_lohan.ranks.transport.links import Links
from hf_lohan.threads import start_thread

_WAITS_S = 0.1
"""Seconds that a rank's computation waits for other ranks before its thread serves them."""
_BETWEEN_PASSES_S = 5.0
"""Seconds between two passes after which a rank serves others."""
_AT_LAST_S = 30.0
"""Seconds without a request of its own after which a rank serves others in any case."""
_CLOSES_WITHIN_S = 2.0
"""Seconds that `close` waits for the other ranks to close."""
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.0005, 0.05
"""Pauses after rounds in which no head changed."""


class Rounds(ABC):
    """One rank's side of the rounds. `lock` guards the state of the subclass."""

    def __init__(self, links: Links, lane: RankLane, *, beside_kernels: bool) -> None:
        self._links = links
        self._lane = lane
        self._beside_kernels = beside_kernels
        # Enter the lock itself and not the condition, which an interrupt may stop halfway.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.is_closed = False
        self._told = b""
        self._told_by_all: list[bytes] = []
        self._num_idle = 0
        """Number of rounds since a head changed."""
        self.serves = False
        """Whether this rank's computation waits for others, or has requested nothing for a while."""
        self.last_request_s = time.monotonic()
        """When this rank last requested something."""
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread. All ranks do this before any of them waits for a round."""
        self._links.watch.on_waiting(self.notify)
        this = weakref.ref(self)  # the links live longer than this object
        self._links.add_failure_callback(lambda _error: _notify(this()))
        self._thread = start_thread(self._run, f"lohan-{self._lane.name}", beside_kernels=self._beside_kernels)

    def notify(self) -> None:
        """Tell the thread that something may have changed. Any thread may call this."""
        with self.lock:
            self.changed.notify_all()

    def close(self) -> None:
        """Serve other ranks for a moment, until all have closed. A later wait for this rank raises an error."""
        with self.lock:
            self.is_closed = True
            self.changed.notify_all()
        if self._thread is not None:
            self._thread.join(_CLOSES_WITHIN_S)
            self._lane.close()
            self.notify()
            self._thread.join()
            self._links.watch.forget_waiting(self.notify)

    def raise_if_broken(self) -> None:
        """Raise the error that has ended the thread."""
        if self._error is not None:
            raise self._error

    # A subclass defines these methods. The thread calls them.

    @abstractmethod
    def advance(self) -> None:
        """Do the work that needs no other rank. Called before `head`, without the lock."""

    @abstractmethod
    def head(self) -> bytes:
        """Return this rank's head. Called with the lock held."""

    def urgent_part(self, head: bytes) -> bytes:
        """Return the part of a head that others must know soon. The rest may wait for a later round."""
        return head

    @abstractmethod
    def is_waiting(self) -> bool:
        """Return whether this rank waits for the others. Called with the lock held."""

    @abstractmethod
    def is_between_passes(self) -> bool: ...

    @abstractmethod
    def carry_out(self, heads: Sequence[bytes]) -> bool:
        """Carry out the round with these heads, as all ranks do. Returns False when all ranks have closed."""

    @abstractmethod
    def break_off(self, error: BaseException) -> None:
        """Handle an error that ends the thread."""

    def shown_wait(self) -> AbstractContextManager[object]:
        """Return a context that shows a wait of the thread in the timeline."""
        return nullcontext()

    # The thread.

    def _run(self) -> None:
        try:
            goes_on = True
            while goes_on:
                head = self._next_head()
                with self.shown_wait():
                    heads = self._lane.agree(f"the next {self._lane.name}", head)
                has_changed = heads != self._told_by_all
                self._num_idle = 0 if has_changed else self._num_idle + 1
                self._told, self._told_by_all = self.urgent_part(head), heads
                goes_on = self.carry_out(heads)
        except LaneClosedError:
            pass
        except BaseException as error:
            if not isinstance(error, RankFailedError):
                with suppress(Exception):
                    self._links.fail(error)
            with self.lock:
                self._error = error
                self.changed.notify_all()
            self.break_off(error)

    def _next_head(self) -> bytes:
        """Wait until this rank enters the next round. Returns its head."""
        since_s = time.monotonic()
        while True:
            self.advance()
            with self.lock:
                self._links.raise_if_failed("waited for a round")
                self._lane.raise_if_closed()
                now_s = time.monotonic()
                serves_in_s = self._serves_in_s(now_s)
                self.serves = serves_in_s <= 0
                head = self.head()
                if self.urgent_part(head) != self._told:
                    return head
                left_s = 0.0 if self.is_closed or self.is_waiting() else serves_in_s
                if self._num_idle:
                    pause_s = min(_LONGEST_PAUSE_S, _SHORTEST_PAUSE_S * 2 ** min(self._num_idle, 8))
                    left_s = max(left_s, since_s + pause_s - now_s)
                if left_s <= 0:
                    return head
                with self.shown_wait(), self._links.watch.idle(self._lane.name):
                    self.changed.wait(left_s)

    def _serves_in_s(self, now_s: float) -> float:
        """Return the seconds until this rank serves others, if nothing happens meanwhile."""
        if (since_s := self._links.watch.waiting_since_s) is not None:
            return since_s + _WAITS_S - now_s
        patience_s = _BETWEEN_PASSES_S if self.is_between_passes() else _AT_LAST_S
        return self.last_request_s + patience_s - now_s


def _notify(rounds: Rounds | None) -> None:
    if rounds is not None:
        rounds.notify()

"""Notices that each rank gives all others through the launcher's store: its position, its end, and the first failure.

One thread of a rank reads and writes, because a call to a store may hang for long if its node is cut off or stopped.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

from hf_lohan.ranks.transport.failures import Failure, FirstRankFailure
from hf_lohan.ranks.transport.topology import Ranks
from hf_lohan.threads import start_thread

_LOOK_S = 0.1
"""Seconds between two looks at the failure of the run."""
_BEAT_S = 0.5
"""Seconds between two notices of a rank."""
_LAST_WORDS_S = 2.0
"""Seconds that a rank waits at its end until the other ranks have read its last notice."""
_MAX_TEXT_CHARS = 4000
_FAILED = "failed"

Table = dict[str, Any]
"""The position and the waits of a rank in its lanes. See `Watch`."""


class Notice(NamedTuple):
    """The last notice of a rank, and when this rank first read its counts."""

    table: Table
    beats_s: float
    """When this rank first read the number of beats in the table."""
    num_looks: int
    """How often the thread of the rank has looked."""
    num_looks_s: float
    has_left: bool
    knows_failure: bool


class NoticeBoard:
    """One rank's notices. Any thread may call the methods."""

    def __init__(self, ranks: Ranks, store: Any, failure: FirstRankFailure, table: Callable[[], Table]) -> None:
        """``store``: a client that no other thread uses. ``table`` returns the position of this rank."""
        self.notices: dict[int, Notice] = {}
        """The last notice of each other rank."""
        self.looked_s = self.read_s = time.monotonic()
        """When this rank last looked for a failure, and when it last read all notices."""
        self._ranks = ranks
        self._store = store
        self._failure = failure
        self._table = table
        self._untold: deque[Failure] = deque()
        self._num_looks = 0
        self._beat_s = 0.0
        self._is_asked = False
        self._wake, self._has_read = threading.Event(), threading.Event()
        self._is_over = self._is_dead = False
        self._thread: threading.Thread | None = None

    def write_first(self) -> None:
        """Write the first notice, so that every connected rank has a notice."""
        self._write()

    def start(self, on_lost: Callable[[RuntimeError], None]) -> None:
        """Start the thread. It calls ``on_lost`` if the store has ended."""
        self._on_lost = on_lost
        self._thread = start_thread(self._run, f"lohan-rank-{self._ranks.rank}-notices", beside_kernels=False)

    def tell(self, failure: Failure) -> None:
        """Tell all ranks the failure that ends the run. All ranks record it, unless an earlier failure is known."""
        self._untold.append(failure)
        self._wake.set()

    def ask(self, within_s: float = 0.0) -> bool:
        """Read the notices of the other ranks soon. Returns whether that was done within ``within_s``."""
        self._has_read.clear()
        self._is_asked = True
        if within_s:
            self._wake.set()
        return self._has_read.wait(within_s)

    def has_left(self, rank: int) -> bool:
        return rank in self.notices and self.notices[rank].has_left

    def silent_s(self, rank: int) -> float:
        """Return the seconds without a new notice of a rank; 0 if the rank has left."""
        notice = self.notices.get(rank)
        return 0.0 if notice is None or notice.has_left else self.read_s - notice.num_looks_s

    def unchanged_s(self, rank: int) -> float:
        """Return the seconds without progress of another rank's computation, by its notices; 0 for this rank."""
        notice = self.notices.get(rank)
        return 0.0 if notice is None else notice.num_looks_s - notice.beats_s

    def die(self) -> None:
        """Write nothing any more, as if this process were killed."""
        self._is_dead = self._is_over = True
        self._wake.set()

    def close(self) -> None:
        """End the thread after its last notice."""
        self._is_over = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(2 * _LAST_WORDS_S)

    # The thread.

    def _run(self) -> None:
        try:
            while not self._is_over:
                self._look()
                self._wake.wait(_LOOK_S)
                self._wake.clear()
            if not self._is_dead:
                self._end()
        except RuntimeError as error:  # of the store
            if not self._is_over:
                self._on_lost(error)

    def _look(self) -> None:
        self._tell_failures()
        knew = self._failure.is_known
        if self._store.check([_FAILED]):
            self._failure.record_failure(Failure(*json.loads(self._store.get(_FAILED))))
        if time.monotonic() - self._beat_s > _BEAT_S or self._failure.is_known != knew:
            self._write()
        if self._is_asked:
            self._is_asked = False
            self._read()
            self._has_read.set()
        self.looked_s = time.monotonic()

    def _tell_failures(self) -> None:
        while self._untold and not self._is_dead:
            failure = self._untold[0]
            told = json.dumps([failure.rank, failure.text[:_MAX_TEXT_CHARS]])
            self._failure.record_failure(Failure(*json.loads(self._store.compare_set(_FAILED, "", told))))
            self._untold.popleft()

    def _write(self, *, has_left: bool = False) -> None:
        self._beat_s, self._num_looks = time.monotonic(), self._num_looks + 1
        notice = [self._table(), self._num_looks, has_left, self._failure.is_known]
        self._store.set(f"at/{self._ranks.rank}", json.dumps(notice))

    def _read(self) -> None:
        keys = [f"at/{rank}" for rank in self._ranks.others]
        if not (self.notices or self._store.check(keys)):
            return  # a rank has not written yet
        told = self._store.multi_get(keys) if self._store.has_extended_api() else map(self._store.get, keys)
        self.read_s = time.monotonic()
        for rank, written in zip(self._ranks.others, told, strict=True):
            table, num_looks, *flags = json.loads(written)
            before = self.notices.get(rank)
            if before is None:
                before = Notice(table, self.read_s, num_looks, self.read_s, False, False)
            self.notices[rank] = Notice(
                table,
                before.beats_s if before.table["beats"] == table["beats"] else self.read_s,
                num_looks,
                before.num_looks_s if before.num_looks == num_looks else self.read_s,
                *flags,
            )

    def _end(self) -> None:
        """Write the last notice, and wait until it is read. An earlier end may lose it or end the store."""
        self._tell_failures()
        self._write(has_left=not self._failure.is_known)
        until_s = time.monotonic() + _LAST_WORDS_S
        while not self._is_heard() and time.monotonic() < until_s:
            time.sleep(0.05)

    def _is_heard(self) -> bool:
        """Return whether no rank needs this rank. After a failure only rank 0, which may have the store, waits."""
        failure = self._failure.failure
        if failure is not None and self._ranks.rank != 0:
            return True
        self._read()
        return all(
            notice.has_left or notice.knows_failure or (failure is not None and failure.rank == rank)
            for rank, notice in self.notices.items()
        )

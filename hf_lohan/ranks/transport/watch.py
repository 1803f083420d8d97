"""One thread of each rank that learns which rank has died, failed or hangs, and tells it to all waits of its rank.

*A death* on this node is told by the kernel (`pidfd_open`), even if a child of the rank lives on and keeps its
connections open. A death elsewhere breaks connections, and a roll call finds the rank that does not answer. *A failure*
is written to the launcher's store once. The first one wins, so all ranks name the same cause. *A hang* is found in the
table of positions: each rank writes where it is in each lane. A wait that lasts too long follows "who waits for whom"
to a rank that does not wait. Ranks that wait for each other are at different calls, and an error names both calls.
"""

from __future__ import annotations

import json
import logging
import os
import select
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NoReturn

import torch
from torch.distributed import distributed_c10d

from hf_lohan.ranks.transport.failures import (
    Failure,
    FirstRankFailure,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
)
from hf_lohan.ranks.transport.topology import Ranks
from hf_lohan.threads import start_thread

_LOOK_S = 0.1
_BEAT_S = 0.5
_VERDICT_S = 1.0
"""Seconds in which the watch of a living rank answers a roll call."""
_CYCLE_S = 3.0
"""Seconds after which ranks that wait for each other are taken for ranks at different calls."""
_LAST_WORDS_S = 2.0
"""Seconds that `close` waits until the other ranks need this one no more."""
_STUCK_S = 1.0
"""Seconds that the main thread may stay in one of torch's own collectives after a failure."""
_MAX_TEXT_CHARS = 4000

Position = tuple[int, str]
"""Number and tag of a rank's last operation in a lane."""


class Watch:
    """What one rank knows of the others. Any thread may call its methods."""

    def __init__(
        self,
        ranks: Ranks,
        store: Any,
        failure: FirstRankFailure,
        timeout_s: float,
        exits: Mapping[int, int] | None = None,
    ) -> None:
        """``store``: the launcher's, with a prefix of its own for this call of `connect`. ``timeout_s``: seconds that a
        rank may do nothing while this rank waits for it. ``exits``: by rank, a descriptor that becomes readable when
        the rank has ended, by default those of the processes of this node."""
        self.ranks = ranks
        self.timeout_s = timeout_s
        self._failure = failure
        self._store, self._own_store = store, None if store is None else _clone(store)
        """The thread has a client of its own, because a client that waits is locked."""
        self._exits = dict(exits) if exits is not None else None
        self._members: dict[str, Sequence[int]] = {}
        """The ranks of each lane."""
        self._positions: dict[str, Position] = {}
        self._waits: dict[int, list[str]] = {}
        """By thread, the lanes for which it waits, if this keeps the rank from computing."""
        self._num_beats = 0
        self._seen: dict[int, tuple[dict[str, Any], float]] = {}
        """By rank, its last known table, and when it was first seen."""
        self._seen_alive: dict[int, tuple[int, float]] = {}
        """By rank, how often its watch has looked, and when that number was first seen."""
        self._has_left: set[int] = set()
        self._names: dict[int, str] = {}
        self._is_over = threading.Event()
        self._known = threading.Event()
        self._waiting_changed: list[Callable[[], object]] = []
        failure.add_callback(lambda _error: self._known.set())
        self._stuck_since_s: float | None = None
        self.ends_process = False
        """Whether to end this process if a rank has failed and the main thread stays in a collective of torch's own,
        which nothing else can wake."""

    def start(self, until_s: float) -> None:
        """Meet the other ranks. Raises RankTimeoutError if one has not come at ``until_s`` (`time.monotonic`)."""
        here = {"pid": os.getpid(), "host": socket.gethostname(), "pids": _pid_namespace()}
        self._store.set(f"who/{self.ranks.rank}", json.dumps(here))
        who: dict[int, dict[str, Any]] = {}
        for rank in range(self.ranks.num_ranks):
            self.meet(f"who/{rank}", rank, until_s)
            who[rank] = json.loads(self._store.get(f"who/{rank}"))
            self._names[rank] = f"rank {rank} (pid {who[rank]['pid']}, {who[rank]['host']})"
        if self._exits is None:
            near = [rank for rank in self.ranks.on_this_node if who[rank]["pids"] == here["pids"] is not None]
            self._exits = {rank: fd for rank in near if (fd := _exit_of(who[rank]["pid"])) is not None}
        self._thread = start_thread(self._run, f"lohan-rank-{self.ranks.rank}-watch", beside_kernels=False)

    def meet(self, key: str, rank: int, until_s: float) -> None:
        """Wait until a rank has set a key of the store. Raises RankTimeoutError and RankFailedError."""
        while not self._store.check([key]):
            self._failure.raise_if_known(f"waited for rank {rank}")
            if time.monotonic() > until_s:
                raise RankTimeoutError(
                    f"rank {rank} did not connect within {self.timeout_s:g} s: rank {self.ranks.rank} waited for it; "
                    "check that it was started and that nodes reach each other (set GLOO_SOCKET_IFNAME to the name of "
                    "the network interface)",
                    rank,
                )
            time.sleep(0.01)

    def add_lane(self, name: str, members: Sequence[int], until_s: float) -> Any:
        """Meet the members of a new lane. Returns the store with which they connect."""
        self._members[name] = members
        self._store.set(f"lane/{name}/{self.ranks.rank}", "1")
        for rank in members:
            self.meet(f"lane/{name}/{rank}", rank, until_s)
        return torch.distributed.PrefixStore(f"group/{name}", _clone(self._store))

    def name_of(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    # What this rank tells.

    def note_position(self, lane: str, number: int, tag: str) -> None:
        self._positions[lane] = number, tag

    @contextmanager
    def waiting(self, lane: str) -> Iterator[None]:
        """A context in which the calling thread, and with it this rank's computation, waits for a lane."""
        lanes = self._waits.setdefault(threading.get_ident(), [])
        lanes.append(lane)
        self._tell_waiting()
        try:
            yield
        finally:
            lanes.pop()
            if not lanes:
                self._waits.pop(threading.get_ident(), None)
            self._tell_waiting()

    @property
    def is_waiting(self) -> bool:
        """Whether this rank's computation waits for other ranks."""
        return bool(self._waits)

    def on_waiting(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which must not wait, whenever `is_waiting` may have changed."""
        self._waiting_changed.append(callback)

    def forget_waiting(self, callback: Callable[[], object]) -> None:
        self._waiting_changed.remove(callback)

    def _tell_waiting(self) -> None:
        for callback in list(self._waiting_changed):
            callback()

    def beat(self) -> None:
        """Tell ranks that wait for this one that it is working."""
        self._num_beats += 1

    def announce(self, failure: Failure) -> None:
        """Tell all ranks where the run ends, unless another rank has told it already."""
        is_own = failure.error is not None and not isinstance(failure.error, RankFailedError)
        name = self.name_of(self.ranks.rank)
        text = f"{name} failed: {failure.text}" if is_own else failure.text
        with suppress(RuntimeError):
            self._store.compare_set("failed", "", json.dumps([failure.rank, text[:_MAX_TEXT_CHARS]]))

    def blame(self, rank: int, text: str) -> None:
        """Tell all ranks that the run ends because of another rank."""
        with suppress(RuntimeError):
            rank, text = json.loads(self._store.compare_set("failed", "", json.dumps([rank, text])))
        self._failure.record_failure(Failure(rank, text))

    # What waits ask.

    def raise_known_cause(self, what: str) -> None:
        """Raise RankFailedError if the cause of a failure is known, now or within a moment."""
        if self.ranks.others:
            self._known.wait(_VERDICT_S)
            self._failure.raise_if_known(f"waited for {what}")
            self._raise_left(self.ranks.others, what)

    def raise_cause(self, what: str, error: BaseException) -> NoReturn:
        """Raise RankFailedError for an operation that ended with ``error``: the kernel may know the cause already, or a
        rank has told it. If not, the rank whose watch does not answer has ended."""
        self._known.wait(2 * _LOOK_S)
        self._failure.raise_if_known(f"waited for {what}")
        missing: list[int] = []
        try:
            self._raise_left(self.ranks.others, what)
            self._store.set("roll call", "1")
            until_s, missing = time.monotonic() + _VERDICT_S, self.ranks.others
            while missing and time.monotonic() < until_s and not self._known.wait(_LOOK_S):
                missing = [rank for rank in missing if not self._store.check([f"here/{rank}"])]
            if missing and not self._known.is_set():
                self.blame(missing[0], f"{self.name_of(missing[0])} ended")
        except RuntimeError as lost:  # of the store
            self._failure.record_failure(_no_store(lost))
        self._failure.raise_if_known(f"waited for {what}")
        rank = self.ranks.rank
        raise RankFailedError(f"rank {rank} lost its connections while it waited for {what} ({error})", rank)

    def judge(self, lane: str, what: str, since_s: float) -> None:
        """Raise if a wait in a lane cannot end, or has lasted too long. ``since_s``: when it began."""
        tables = {rank: self._table_of(rank) for rank in self.ranks.others}
        tables[self.ranks.rank] = self._table()
        late = self._late(tables, lane)
        self._raise_left(late, what)
        now_s = time.monotonic()
        patience_s = min(_CYCLE_S, self.timeout_s)
        if now_s - since_s < patience_s:
            return
        path, last = [self.ranks.rank], late[:1]
        while last and last[0] not in path:
            path.append(last[0])
            last = next(self._awaited_by(tables, last[0]), [])[:1]
        if last and (calls := self._calls_of(tables, path[path.index(last[0]) :])):
            if all(now_s - self._seen[rank][1] > patience_s for rank in calls if rank != self.ranks.rank):
                (first, call), *others = calls.items()
                told = " and ".join(f"rank {rank} waits for {others_call!r}" for rank, others_call in others)
                raise RanksDisagreeError(
                    f"rank {first} waits for {call!r}, and {told}; all ranks must do the same in the same order; look "
                    "for a step, a callback or a save that only some of them run"
                )
        elif now_s - since_s > self.timeout_s:
            # If no rank is late, one may have stopped in the middle of a transfer.
            silent = [path[-1]] if late else [rank for rank in self._members[lane] if self._is_stopped(rank, now_s)]
            if silent and silent[0] != self.ranks.rank and now_s - self._seen[silent[0]][1] > self.timeout_s:
                self._raise_silent(silent[0], what)

    def _is_stopped(self, rank: int, now_s: float) -> bool:
        return rank != self.ranks.rank and now_s - self._seen_alive[rank][1] > self.timeout_s

    def _raise_silent(self, rank: int, what: str) -> NoReturn:
        text = (
            f"{self.name_of(rank)} said nothing for {self.timeout_s:g} s while rank {self.ranks.rank} waited for "
            f"{what}; find out what it does (py-spy dump), or raise net_timeout"
        )
        self.blame(rank, text)
        raise RankTimeoutError(text, rank)

    def _awaited_by(self, tables: Mapping[int, dict[str, Any]], rank: int) -> Iterator[list[int]]:
        """Yield the late ranks of each lane for which a rank's computation waits."""
        for lane in tables[rank].get("waits", ()):
            if late := self._late(tables, lane):
                yield late

    def _calls_of(self, tables: Mapping[int, dict[str, Any]], cycle: Sequence[int]) -> dict[int, str]:
        """Return the calls in which ranks wait for each other; {} if one of them only loads or sends ahead."""
        found = {}
        for rank in cycle:
            lanes = [lane for lane in tables[rank].get("waits", ()) if lane in tables[rank]["at"]]
            if not lanes:
                return {}
            found[rank] = tables[rank]["at"][lanes[-1]][1]
        return found

    def _late(self, tables: Mapping[int, dict[str, Any]], lane: str) -> list[int]:
        """Return the ranks that have not begun an operation of a lane that another rank has begun."""
        numbers = {rank: tables[rank].get("at", {}).get(lane, (0, ""))[0] for rank in self._members.get(lane, ())}
        most = max(numbers.values(), default=0)
        return [rank for rank, number in numbers.items() if number < most]

    def _table(self) -> dict[str, Any]:
        waits = [lanes[-1] for lanes in list(self._waits.values()) if lanes]
        return {"at": dict(self._positions), "waits": waits, "beats": self._num_beats}

    def _table_of(self, rank: int) -> dict[str, Any]:
        told = self._store.get(f"at/{rank}") if self._store.check([f"at/{rank}"]) else b"[{}, 0]"
        now_s, (table, num_looks) = time.monotonic(), json.loads(told)
        for seen, value in ((self._seen, table), (self._seen_alive, num_looks)):
            if rank not in seen or seen[rank][0] != value:
                seen[rank] = value, now_s  # type: ignore[index]
        return dict(table)

    def _raise_left(self, ranks: Sequence[int], what: str) -> None:
        for rank in ranks:
            if self._store.check([f"left/{rank}"]):
                text = f"{self.name_of(rank)} had ended its run while rank {self.ranks.rank} waited for {what}"
                raise RankFailedError(text, rank)

    # The thread.

    def _run(self) -> None:
        poll, beat_s, num_looks, is_here = select.poll(), 0.0, 0, False
        assert self._exits is not None
        of_fd = {fd: rank for rank, fd in self._exits.items() if rank != self.ranks.rank}
        for fd in of_fd:
            poll.register(fd, select.POLLIN)
        store = self._own_store
        try:
            while not self._is_over.is_set():
                for fd, _ in poll.poll(_LOOK_S * 1e3):
                    poll.unregister(fd)
                    self._note_left()
                    if of_fd[fd] not in self._has_left:
                        self._note_end(of_fd[fd])
                if store.check(["failed"]):
                    self._failure.record_failure(Failure(*json.loads(store.get("failed"))))
                if not is_here and store.check(["roll call"]):
                    store.set(f"here/{self.ranks.rank}", "1")
                    is_here = True
                if time.monotonic() - beat_s > _BEAT_S:
                    beat_s, num_looks = time.monotonic(), num_looks + 1
                    self._end_stuck_process()
                    store.set(f"at/{self.ranks.rank}", json.dumps([self._table(), num_looks]))
                    self._note_left()
        except RuntimeError as error:  # of the store, which the process of rank 0 may have had
            if not self._is_over.is_set() and 0 not in self._has_left:
                self._note_end(0) if self._has_ended(0) else self._failure.record_failure(_no_store(error))

    def _end_stuck_process(self) -> None:
        """End this process as NCCL's own watchdog does, if the main thread waits for a rank that is gone."""
        if not self.ends_process or not self._failure.is_known or not _is_in_torch_collective():
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = time.monotonic()
        elif time.monotonic() - self._stuck_since_s > _STUCK_S:
            error = self._failure.error("was in a collective of torch.distributed")
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - as an exception's
            logging.shutdown()
            os._exit(1)

    def _note_left(self) -> None:
        """Note which ranks need the others no more."""
        for rank in set(self.ranks.others) - self._has_left:
            if self._own_store.check([f"left/{rank}"]):
                self._has_left.add(rank)

    def _has_ended(self, rank: int) -> bool:
        assert self._exits is not None
        return rank in self._exits and bool(select.select([self._exits[rank]], [], [], 0)[0])

    def _note_end(self, rank: int) -> None:
        text = f"{self.name_of(rank)} ended"
        with suppress(RuntimeError):
            rank, text = json.loads(self._own_store.compare_set("failed", "", json.dumps([rank, text])))
        self._failure.record_failure(Failure(rank, text))

    def close(self, *, has_failed: bool) -> None:
        """End the thread. Unless this rank has failed, wait a moment for the others, because the end of this process
        would cut their last bytes."""
        if not has_failed:
            with suppress(RuntimeError):
                self._store.set(f"left/{self.ranks.rank}", "1")
                left = [f"left/{rank}" for rank in self.ranks.others]
                until_s = time.monotonic() + _LAST_WORDS_S
                while time.monotonic() < until_s and not self._known.is_set() and not self._store.check(left):
                    time.sleep(0.01)
        self._is_over.set()
        self._thread.join(_LAST_WORDS_S)
        for fd in (self._exits or {}).values():
            with suppress(OSError):
                os.close(fd)


def _is_in_torch_collective() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    return frame is not None and frame.f_code.co_filename == distributed_c10d.__file__


def _no_store(error: BaseException) -> Failure:
    return Failure(0, f"the launcher's store, on the node of rank 0, ended ({error})")


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (RuntimeError, NotImplementedError):
        return store


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None


def _exit_of(pid: int) -> int | None:
    """Return a descriptor that becomes readable when a process has ended; None where the kernel has none, and for this
    process itself."""
    if pid == os.getpid() or not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:
        return None

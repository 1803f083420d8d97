"""Finds out which other rank has died, has failed or hangs, for all waits of a rank.

*A death* on this node is reported by the kernel (`pidfd_open`), even if a child of the rank lives on and keeps its
connections open. A death elsewhere breaks connections, and the rank that gives no more notices has ended. *A failure*
is written to the launcher's store once. The first failure wins, so all ranks name the same cause. *A hang* is found in
the notices: each rank gives its position in each lane. A wait that lasts too long follows "who waits for whom" to a
rank that does not wait. Ranks whose computations wait for each other are at different calls, and an error names both.
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
from contextlib import contextmanager
from typing import Any, NoReturn

from torch.distributed import distributed_c10d
from torch.distributed.distributed_c10d import PrefixStore

from hf_lohan.compat.torch_private import gloo_group
from hf_lohan.ranks.transport.failures import (
    Failure,
    FirstRankFailure,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
)
from hf_lohan.ranks.transport.notice_board import NoticeBoard, Table
from hf_lohan.ranks.transport.topology import Ranks
from hf_lohan.threads import start_thread

_LOOK_S = 0.05
_ANSWER_S = 0.5
"""Seconds in which the store answers. Without an answer, its node may be gone."""
_VERDICT_S = 2.0
"""Seconds without a notice after which a rank has ended, if connections broke. Notices are written twice a second."""
_CYCLE_S = 3.0
"""Seconds after which computations that wait for each other are taken to be at different calls."""
_STUCK_S = 1.0
"""Seconds that the main thread may stay in one of torch's own collectives after a failure."""


class Watch:
    """One rank's view of the other ranks. Any thread may call its methods."""

    def __init__(
        self,
        ranks: Ranks,
        store: Any,
        failure: FirstRankFailure,
        timeout_s: float,
        exits: Mapping[int, int] | None = None,
    ) -> None:
        """``store``: the launcher's store, with a separate prefix for this call of `connect`. ``timeout_s``: seconds
        that a rank may do nothing while this rank waits for it. ``exits``: by rank, a descriptor that becomes readable
        when the rank has ended, by default of the other processes of this node. The watch closes them."""
        self.ranks = ranks
        self.timeout_s = timeout_s
        """Seconds that a rank may do nothing while this rank waits for it."""
        self._failure = failure
        self._store = store
        self._exits = dict(exits) if exits is not None else None
        self._members: dict[str, Sequence[int]] = {}
        """The ranks of each lane."""
        self._of_compute: set[str] = set()
        """The lanes of threads that compute."""
        self._positions: dict[str, tuple[int, str]] = {}
        """Number and tag of this rank's last operation, by lane."""
        self._users: dict[str, int] = {}
        """The thread that used a lane last."""
        self._waits: dict[int, list[tuple[str, Callable[[], Sequence[int]]]]] = {}
        """Waits that keep the rank from computing, by thread. Each has a lane, and a function that returns the ranks
        for whose computations the thread waits."""
        self._waits_change = threading.Lock()
        self.waiting_since_s: float | None = None
        """When this rank's computation began to wait for other ranks, by `time.monotonic`. None if it does not wait."""
        self._waits_beside: dict[int, list[tuple[str, Callable[[], Sequence[int]]]]] = {}
        """Waits of threads beside the computation, as in `_waits`."""
        self._idle: set[str] = set()
        """Lanes whose threads beside the computation wait for it."""
        self._closed: list[str] = []
        """Lanes in which this rank no longer takes part."""
        self._num_beats = 0
        self._names: dict[int, str] = {}
        self._is_started = False
        self._is_over = threading.Event()
        self._broken: tuple[str, set[int]] | None = None
        """Name of the wait in which this rank's connections broke, and the ranks at their other ends."""
        self._waiting_changed: list[Callable[[], object]] = []
        self._stuck_since_s: float | None = None
        self.ends_process = False
        """Whether to end this process if a rank has failed and the main thread stays in a collective of torch's own,
        which nothing else can wake."""
        if ranks.others:
            self._board = NoticeBoard(ranks, store.clone(), failure, self._table)

    def begin(self) -> None:
        """Begin to write this rank's notices, and to read failures."""
        self._board.write_first()
        self._board.start(self._on_lost_store)

    def start(self, until_s: float) -> None:
        """Connect all ranks. Raises RankTimeoutError if a rank is missing at ``until_s`` (`time.monotonic`)."""
        here = {"pid": os.getpid(), "host": socket.gethostname(), "pids": _pid_namespace()}
        self._store.set(f"who/{self.ranks.rank}", json.dumps(here))
        who: dict[int, dict[str, Any]] = {}
        for rank in range(self.ranks.num_ranks):
            self.meet(f"who/{rank}", rank, until_s)
            who[rank] = json.loads(self._store.get(f"who/{rank}"))
            self._names[rank] = f"rank {rank} (pid {who[rank]['pid']}, {who[rank]['host']})"
        if self._exits is None:
            self._exits = {}
            for rank in self.ranks.on_this_node:
                if rank != self.ranks.rank and who[rank]["pids"] == here["pids"] is not None:
                    self._watch_process(rank, who[rank]["pid"])
        self._is_started = True
        start_thread(self._run, f"lohan-rank-{self.ranks.rank}-watch", beside_kernels=False)

    def _watch_process(self, rank: int, pid: int) -> None:
        assert self._exits is not None
        if pid != os.getpid() and hasattr(os, "pidfd_open"):
            try:
                self._exits[rank] = os.pidfd_open(pid)
            except ProcessLookupError:
                self._settle(rank, f"{self.name_of(rank)} ended")
            except OSError:  # the kernel lacks the call or forbids it
                pass

    def meet(self, key: str, rank: int, until_s: float) -> None:
        """Wait until a rank has set a key of the store. Raises RankTimeoutError and RankFailedError."""
        while not self._is_set(key, rank):
            self._failure.raise_if_known(f"waited for rank {rank}")
            if time.monotonic() > until_s:
                raise RankTimeoutError(
                    f"rank {rank} did not connect within {self.timeout_s:g} s: rank {self.ranks.rank} waited for it; "
                    "check that it was started and that nodes reach each other (set GLOO_SOCKET_IFNAME to the name of "
                    "the network interface)",
                    rank,
                )
            time.sleep(0.01)

    def _is_set(self, key: str, rank: int) -> bool:
        try:
            return bool(self._store.check([key]))
        except RuntimeError as error:  # its process may have ended
            self.raise_cause(f"rank {rank} to connect", error)

    def add_lane(self, name: str, members: Sequence[int], until_s: float, *, stops_compute: bool) -> Any:
        """Connect the members of a new lane. Returns their store with its own client, because a wait locks a client."""
        self._members[name] = members
        self._positions[name] = 0, ""  # this also names the members to ranks that are not members
        if stops_compute:
            self._of_compute.add(name)
        self._store.set(f"lane/{name}/{self.ranks.rank}", "1")
        for rank in members:
            self.meet(f"lane/{name}/{rank}", rank, until_s)
        return PrefixStore(f"group/{name}", self._store.clone())

    def name_of(self, rank: int) -> str:
        return self._names.get(rank, f"rank {rank}")

    # News of this rank.

    def note_position(self, lane: str, number: int, tag: str) -> None:
        self._positions[lane] = number, tag
        self._users[lane] = threading.get_ident()
        if lane in self._of_compute:
            self.beat()

    def note_closed(self, lane: str) -> None:
        """Record that this rank takes part in no later operation of a lane."""
        self._closed.append(lane)

    @contextmanager
    def waiting(
        self, lane: str, *, stops_compute: bool = True, needs: Callable[[], Sequence[int]] = tuple
    ) -> Iterator[None]:
        """A context in which the calling thread waits for a lane. This rank's computation waits too, unless
        ``stops_compute`` is False. ``needs`` returns other ranks whose computations must run before the wait ends."""
        of_threads = self._waits if stops_compute else self._waits_beside
        lanes, wait = of_threads.setdefault(threading.get_ident(), []), (lane, needs)
        try:  # an interrupt may occur anywhere
            lanes.append(wait)
            if stops_compute:
                self.beat()
                self._note_waiting()
            yield
        finally:
            if wait in lanes:
                lanes.remove(wait)
            if not lanes:
                of_threads.pop(threading.get_ident(), None)
            if stops_compute:
                self._note_waiting()

    @property
    def is_waiting(self) -> bool:
        return self.waiting_since_s is not None

    @contextmanager
    def idle(self, lane: str) -> Iterator[None]:
        """A context in which the thread that uses a lane, beside the computation, waits for this rank's computation."""
        self._idle.add(lane)
        try:
            yield
        finally:
            self._idle.discard(lane)

    def on_waiting(self, callback: Callable[[], object]) -> None:
        """Call ``callback``, which must not wait, whenever `waiting_since_s` may have changed."""
        self._waiting_changed.append(callback)

    def forget_waiting(self, callback: Callable[[], object]) -> None:
        self._waiting_changed.remove(callback)

    def _note_waiting(self) -> None:
        with self._waits_change:
            if not self._waits:
                self.waiting_since_s = None
            elif self.waiting_since_s is None:
                self.waiting_since_s = time.monotonic()
        for callback in list(self._waiting_changed):
            callback()

    def beat(self) -> None:
        """Tell ranks that wait for this rank that its computation continues. Work of threads beside the computation
        does not count, because they may serve others although the computation hangs."""
        self._num_beats += 1

    def announce(self, failure: Failure) -> None:
        """Tell all ranks the failure that ends the run, unless another rank has told an earlier failure."""
        is_own = failure.error is not None and not isinstance(failure.error, RankFailedError)
        text = f"{self.name_of(self.ranks.rank)} failed: {failure.text}" if is_own else failure.text
        self._board.tell(Failure(failure.rank, text))

    def _settle(self, rank: int, text: str) -> None:
        """Record that the run ends because of another rank, unless the store has an earlier cause."""
        self._board.tell(Failure(rank, text))
        if not self._failure.wait(_ANSWER_S):
            self._failure.record_failure(Failure(rank, text))

    # For threads that wait.

    def find_cause(self, what: str, members: Sequence[int] = ()) -> None:
        """Raise RankFailedError if another rank is the cause of a failure. Call this if an operation that depends on
        other ranks, ``members``, has failed on this rank. ``what`` completes "rank 0 waited for ..."."""
        if self.ranks.others:
            self._broken = what, set(members or self.ranks.others) - {self.ranks.rank}
            self._failure.wait(_VERDICT_S + 2 * _ANSWER_S)
            self._failure.raise_if_known(f"waited for {what}")

    def raise_cause(self, what: str, error: BaseException, members: Sequence[int] = ()) -> NoReturn:
        """Raise RankFailedError for an operation that ended with ``error``. See `find_cause`."""
        self.find_cause(what, members)
        rank = self.ranks.rank
        raise RankFailedError(f"rank {rank} lost its connections while it waited for {what} ({error})", rank)

    def judge(self, lane: str, what: str, since_s: float) -> None:
        """Raise if a wait in a lane cannot end, or has lasted too long. ``since_s``: when it began."""
        self._board.ask()
        now_s, notices = time.monotonic(), dict(self._board.notices)
        if len(notices) == len(self.ranks.others):
            tables = {rank: notice.table for rank, notice in notices.items()} | {self.ranks.rank: self._table()}
            late = self._late(tables, lane, self.ranks.rank)
            if (gone := next(filter(self._board.has_left, late), None)) is not None:
                raise RankFailedError(self._left_text(gone, what), gone)
            if now_s - since_s > min(_CYCLE_S, self.timeout_s):
                self._judge_long_wait(tables, lane, what, now_s - since_s)
        if now_s - since_s > self.timeout_s and now_s - self._board.looked_s > self.timeout_s:
            self._raise_silent(0, what)  # the node of rank 0 has the store, which does not answer

    def _judge_long_wait(self, tables: Mapping[int, Table], lane: str, what: str, waited_s: float) -> None:
        for rank in self._late(tables, lane, self.ranks.rank):
            if lane in tables[rank]["closed"]:  # and no rank has reported another cause meanwhile
                text = f"{self.name_of(rank)} had closed its model while rank {self.ranks.rank} waited for {what}"
                raise RankFailedError(text, rank)
        path, cycle, is_sure = self._follow(tables, lane)
        calls = {rank: _calls_of(tables[rank]) for rank in cycle}
        if calls and all(calls.values()):
            patience_s = min(_CYCLE_S, self.timeout_s) if is_sure else self.timeout_s
            others = [rank for rank in cycle if rank != self.ranks.rank]
            if waited_s > patience_s and all(self._board.unchanged_s(rank) > patience_s for rank in others):
                first, *told = [f"rank {rank} waits for {call[-1]!r}" for rank, call in calls.items()]
                raise RanksDisagreeError(
                    f"{first}, and {' and '.join(told)}; all ranks must do the same in the same order; look for a "
                    "step, a callback or a save that only some of them run"
                )
        elif waited_s > self.timeout_s:
            patience_s = max(self.timeout_s, _VERDICT_S)
            stopped = [rank for rank in self.ranks.others if self._board.silent_s(rank) > patience_s]
            if path[1:]:
                concerned = [next((rank for rank in cycle if not calls[rank]), path[-1])]
            else:  # all ranks have begun, and bytes of one rank do not arrive
                members = set(self._members[lane]) - {self.ranks.rank}
                concerned = sorted(members, key=self.ranks.on_this_node.__contains__)
            if stopped or all(self._board.unchanged_s(rank) > self.timeout_s for rank in concerned):
                self._raise_silent((stopped or concerned)[0], what)

    def _follow(self, tables: Mapping[int, Table], lane: str) -> tuple[list[int], list[int], bool]:
        """Follow who waits for whom from this rank's wait in a lane. Returns the ranks on this path, the ranks among
        them that wait for each other in a circle, and whether each wait in the circle is for a computation. A thread
        beside the computation may be late because it works."""
        path, lanes, needs, is_sure = [self.ranks.rank], [lane], list[int](), True
        while True:
            lane, late = next(((name, of) for name in lanes if (of := self._late(tables, name, path[-1]))), ("", needs))
            if not late:
                return path, [], False
            is_of_compute = not lane or lane in self._of_compute or lane in tables[late[0]]["idle"]
            is_sure = is_sure and is_of_compute
            if late[0] in path:
                return path, path[path.index(late[0]) :], is_sure
            path.append(late[0])
            of_next = tables[late[0]]
            # A late thread beside the computation has its own waits. The waits of the computation do not matter.
            lanes = [name for name, _ in of_next["waits"]] if is_of_compute else of_next["beside"].get(lane, [])
            needs = [rank for _, of in of_next["waits"] for rank in of] if is_of_compute else []

    def _late(self, tables: Mapping[int, Table], lane: str, rank: int) -> list[int]:
        """Return the ranks that have not begun an operation of a lane that ``rank`` has begun. Other ranks may be ahead
        of ``rank``, which does not wait for them."""
        numbers = {member: table["at"][lane][0] for member, table in tables.items() if lane in table["at"]}
        return [member for member, number in numbers.items() if number < numbers.get(rank, 0)]

    def _table(self) -> Table:
        waits = [wait for of_thread in list(self._waits.values()) for wait in of_thread[-1:]]
        users = list(self._users.items())
        beside = {user: wait[0] for user, waits in list(self._waits_beside.items()) for wait in waits[-1:]}
        return {
            "at": dict(self._positions),
            "waits": [(lane, list(needs())) for lane, needs in waits],
            # The thread that began a lane's last operation may wait elsewhere, while another waits for the lane.
            "beside": {
                lane: [*([beside[user]] if user in beside else ()), *({lane} & set(beside.values()))]
                for lane, user in users
            },
            "idle": list(self._idle),
            "closed": list(self._closed),
            "beats": self._num_beats,
        }

    def _raise_silent(self, rank: int, what: str) -> NoReturn:
        text = f"{self._silent_text(rank, self.timeout_s, what)}, or raise ranks.timeout"
        self._settle(rank, text)
        assert self._failure.failure is not None
        if self._failure.failure.text == text:
            raise RankTimeoutError(text, rank)
        self._failure.raise_if_known(f"waited for {what}")
        raise AssertionError

    def _silent_text(self, rank: int, seconds: float, what: str) -> str:
        return (
            f"{self.name_of(rank)} was silent for {seconds:g} s while rank {self.ranks.rank} waited for {what}; find "
            "out what it does (py-spy dump)"
        )

    def _left_text(self, rank: int, what: str) -> str:
        return f"{self.name_of(rank)} had ended its run while rank {self.ranks.rank} waited for {what}"

    # The thread.

    def _run(self) -> None:
        assert self._exits is not None
        poll, of_fd = select.poll(), {fd: rank for rank, fd in self._exits.items()}
        for fd in of_fd:
            poll.register(fd, select.POLLIN)
        while not self._is_over.is_set():
            for fd, _ in poll.poll(_LOOK_S * 1e3):
                poll.unregister(fd)
                if not self._is_over.is_set():  # the board would not answer
                    self._note_end(of_fd[fd])
            if self._broken is not None and not self._failure.is_known:
                self._find_ended_rank(*self._broken)
            if self.ends_process:
                self._end_stuck_process()
        self._close_exits()

    def _note_end(self, rank: int) -> None:
        self._board.ask(_ANSWER_S)
        if not self._board.has_left(rank) and not self._is_over.is_set():
            self._settle(rank, f"{self.name_of(rank)} ended")

    def _find_ended_rank(self, what: str, members: set[int]) -> None:
        if self._board.ask(_ANSWER_S):
            for rank in members:
                if self._board.has_left(rank):
                    self._settle(rank, self._left_text(rank, what))
            silent = max(members, key=self._board.silent_s)
            silent_s = self._board.silent_s(silent)
            if silent_s > _VERDICT_S:
                # The kernel reports the end of a process of this node. A silent process that has not ended is stopped.
                is_stopped = silent in (self._exits or {})
                ended = f"{self.name_of(silent)} ended"
                self._settle(silent, self._silent_text(silent, round(silent_s), what) if is_stopped else ended)

    def _on_lost_store(self, error: RuntimeError) -> None:
        """The process of rank 0 may have had the store. If rank 0 ends well, other ranks may continue without it."""
        if self._board.has_left(0):
            return
        fd = (self._exits or {}).get(0)
        poll = select.poll()
        if fd is not None:
            poll.register(fd, select.POLLIN)
        if fd is not None and poll.poll(_ANSWER_S * 1e3):
            text = f"{self.name_of(0)} ended"
        else:
            text = f"the launcher's store, on the node of rank 0, ended ({str(error).splitlines()[0]})"
        self._failure.record_failure(Failure(0, text))

    def _end_stuck_process(self) -> None:
        """End this process as NCCL's own watchdog does, if the main thread waits for a rank that is gone."""
        if not self._failure.is_known or not _is_in_torch_collective():
            self._stuck_since_s = None
        elif self._stuck_since_s is None:
            self._stuck_since_s = time.monotonic()
        elif time.monotonic() - self._stuck_since_s > _STUCK_S:
            error = self._failure.error("was in a collective of torch.distributed")
            print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)  # noqa: T201 - as an exception's
            logging.shutdown()
            os._exit(1)

    def close(self) -> None:
        """End the threads. Unless this rank has failed, wait a moment for the others."""
        self._board.close()
        self._is_over.set()
        if not self._is_started:
            self._close_exits()

    def die(self) -> None:
        """Give no more notices, as if this process were killed. For ranks of tests, which are threads."""
        self._board.die()
        self._is_over.set()

    def _close_exits(self) -> None:
        for fd in (self._exits or {}).values():
            os.close(fd)


def _calls_of(table: Table) -> list[str]:
    return [table["at"][lane][1] for lane, _ in table["waits"] if lane in table["at"]]


def _is_in_torch_collective() -> bool:
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return False
    return frame.f_code.co_filename == distributed_c10d.__file__ or frame.f_code is gloo_group.__code__


def _pid_namespace() -> str | None:
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return None

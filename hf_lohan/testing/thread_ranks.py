"""Runs ranks as threads of one process, with the real `Links` over gloo, delays and faults.

A rank's function gets the rank's `Links`. Delays before the operations of lanes are drawn from a seed, so ranks meet in
a different order with each seed. A fault happens at the n-th operation of a rank.
"""

from __future__ import annotations

import gc
import os
import random
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

import torch

from hf_lohan.ranks import Links, RankFailedError, Ranks
from hf_lohan.ranks.transport.watch import Watch

_Result = TypeVar("_Result")
LONGEST_DELAY_S = 0.003
HANGS_AFTER_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, just before its operation number `at_operation` in a lane, counted from 0."""

    rank: int
    what: Literal["die", "hang"]
    """With `die` the rank ends without a message to others. With `hang` it stops, but its connections stay open."""
    at_operation: int
    lane: str | None = None
    """If set, only operations of lanes whose names begin with this text count."""


class DiedError(RankFailedError):
    """Ends the threads of a rank that has died."""


@dataclass
class Outcome(Generic[_Result]):
    """The result or the error of one rank."""

    result: _Result | None = None
    error: BaseException | None = None
    took_s: float = 0.0


def run_ranks(
    num_ranks: int,
    function: Callable[[Links], _Result],
    *,
    num_local: int | None = None,
    delays_seed: int | None = None,
    faults: Sequence[Fault] = (),
    timeout_s: float = 20.0,
) -> list[_Result]:
    """Run `function` on each rank, and return the results. Raises the first error that is not a `RankFailedError`, or
    else the first error."""
    outcomes = rank_outcomes(
        num_ranks, function, num_local=num_local, delays_seed=delays_seed, faults=faults, timeout_s=timeout_s
    )
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        raise next((error for error in errors if not isinstance(error, RankFailedError)), errors[0])
    return [outcome.result for outcome in outcomes]  # type: ignore[misc]


def rank_outcomes(
    num_ranks: int,
    function: Callable[[Links], _Result],
    *,
    num_local: int | None = None,
    delays_seed: int | None = None,
    faults: Sequence[Fault] = (),
    timeout_s: float = 20.0,
) -> list[Outcome[_Result]]:
    """Run `function` on each rank, and return each rank's result or error. All threads have ended when this returns."""
    before = set(threading.enumerate())
    world = _World(num_ranks, num_local or num_ranks, delays_seed, faults)
    outcomes: list[Outcome[_Result]] = [Outcome() for _ in range(num_ranks)]
    num_threads = torch.get_num_threads()
    all_have_threads = threading.Barrier(num_ranks)

    def run(rank: int) -> None:
        # Some sums depend on the number of torch's threads. A thread gets this number from torch's last setting when it
        # first uses torch, and the loader of another rank may just have set its own number to 1.
        torch.get_num_threads()
        torch.set_num_threads(num_threads)
        all_have_threads.wait()
        began_s = time.monotonic()
        try:
            with world.connect(rank, timeout_s) as links:
                try:
                    outcomes[rank].result = function(links)
                finally:
                    outcomes[rank].took_s = time.monotonic() - began_s
        except BaseException as error:
            outcomes[rank].error = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    until_s = time.monotonic() + HANGS_AFTER_S
    hanging = {fault.rank for fault in faults if fault.what == "hang"}
    for rank, thread in enumerate(threads):
        if rank not in hanging:
            thread.join(until_s - time.monotonic())
    stacks = _stacks(thread for rank, thread in enumerate(threads) if rank not in hanging and thread.is_alive())
    world.end()
    for thread in threads:
        thread.join(HANGS_AFTER_S)
    if stacks:
        raise AssertionError(f"ranks hang:\n{stacks}")
    gc.collect()  # some threads end with their owner, which a cycle may keep alive
    left = [thread for thread in threading.enumerate() if thread not in before]
    has_failed = any(outcome.error for outcome in outcomes)  # an error's traceback may keep the threads' owner alive
    until_s = time.monotonic() + (0.1 if has_failed else HANGS_AFTER_S)
    for thread in left:
        thread.join(max(0.0, until_s - time.monotonic()))
    left = [thread for thread in left if thread.is_alive()]
    if left and not has_failed:
        raise AssertionError(f"threads are still running: {_stacks(left)}")
    return outcomes


class _World:
    """The connections and faults of all ranks."""

    def __init__(self, num_ranks: int, num_local: int, delays_seed: int | None, faults: Sequence[Fault]) -> None:
        self.num_ranks = num_ranks
        self.num_local = num_local
        self.is_over = threading.Event()
        self._store: Any = torch.distributed.HashStore()
        self._fates = [
            _Fate(self, rank, delays_seed, [fault for fault in faults if fault.rank == rank])
            for rank in range(num_ranks)
        ]

    def connect(self, rank: int, timeout_s: float) -> Links:
        ranks = Ranks(rank, self.num_ranks, rank % self.num_local, self.num_local)
        exits = {other: os.dup(self._fates[other].exit) for other in ranks.on_this_node if other != rank}
        fate = self._fates[rank]
        links = Links(ranks, self._store, timeout_s, host="127.0.0.1", exits=exits, interfere=fate.interfere)
        fate.watch = links.watch
        return links

    def end(self) -> None:
        """Let hanging ranks continue, without connections."""
        self.is_over.set()
        for fate in self._fates:
            fate.close()


class _Fate:
    """The faults and delays of one rank."""

    def __init__(self, world: _World, rank: int, delays_seed: int | None, faults: list[Fault]) -> None:
        self.exit, self._lives = os.pipe()
        """A descriptor that becomes readable when the rank dies, and the other end of its pipe."""
        self.watch: Watch | None = None
        self._world = world
        self._rank = rank
        self._delays = None if delays_seed is None else random.Random(f"{delays_seed} {rank}")
        self._faults = faults
        self._is_dead = self._hangs = False
        self._num_operations: Counter[str | None] = Counter()
        self._lock = threading.Lock()

    def interfere(self, lane: str) -> None:
        """Called before each operation of a lane."""
        if self._delays is not None and self._delays.random() < 0.4:
            # Delays are often short and sometimes long, because equal delays would keep the order.
            time.sleep(LONGEST_DELAY_S * self._delays.random() ** 3)
        with self._lock:
            for fault in self._faults:
                if lane.startswith(fault.lane or ""):
                    number = self._num_operations[fault.lane]
                    if number == fault.at_operation:
                        self._is_dead, self._hangs = fault.what == "die", fault.what == "hang"
                        if self._is_dead:
                            self._die()
            for counted in {fault.lane for fault in self._faults if lane.startswith(fault.lane or "")}:
                self._num_operations[counted] += 1
        if self._hangs:
            self._world.is_over.wait()
        if self._is_dead or (self._hangs and self._world.is_over.is_set()):
            raise DiedError("this rank has died", self._rank)

    def _die(self) -> None:
        os.close(self._lives)
        if self.watch is not None:
            self.watch.die()

    def close(self) -> None:
        for fd in (self.exit, self._lives):
            with suppress(OSError):
                os.close(fd)


def _stacks(threads: Iterable[threading.Thread]) -> str:
    frames = sys._current_frames()
    found = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            found.append(f"{thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)

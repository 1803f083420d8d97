"""Runs ranks as threads of one process, with the real `Links` over socket pairs, delays and faults.

A rank's function gets the rank's `Links`. Delays before sends and receives are drawn from a seed, so ranks meet in
another order with each seed. A fault happens at the n-th message that a rank sends.
"""

from __future__ import annotations

import gc
import random
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import combinations
from typing import Generic, Literal, TypeVar

import torch

from hf_lohan.ranks import HEAD_BYTES, Channel, Links, RankFailedError, Ranks
from hf_lohan.ranks.transport.messages import Head

_Result = TypeVar("_Result")
LONGEST_DELAY_S = 0.003
HANGS_AFTER_S = 60.0


@dataclass(frozen=True)
class Fault:
    """A fault of a rank, just before it sends its message number `at_message`, counted from 0."""

    rank: int
    what: Literal["die", "hang", "truncate", "corrupt"]
    """With `die` the rank's connections end. With `hang` it neither sends nor reads any more. With `truncate` it dies
    after half a head. With `corrupt` a bit of the head is wrong."""
    at_message: int
    channel: Channel | None = None
    """If set, only messages of this channel count."""


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
    """Run `function` on each rank, and return the results. Raises the first error that does not only report another
    rank's error."""
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
    links = [
        Links(Ranks(rank, num_ranks, rank % world.num_local, world.num_local), world.sockets[rank], timeout_s)
        for rank in range(num_ranks)
    ]
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
            with links[rank]:
                try:
                    outcomes[rank].result = function(links[rank])
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
    until_s = time.monotonic() + (1.0 if has_failed else HANGS_AFTER_S)
    for thread in left:
        thread.join(max(0.0, until_s - time.monotonic()))
    left = [thread for thread in left if thread.is_alive()]
    if left and not has_failed:
        raise AssertionError(f"threads are still running: {_stacks(left)}")
    return outcomes


class _World:
    """The sockets and faults of all ranks."""

    def __init__(self, num_ranks: int, num_local: int, delays_seed: int | None, faults: Sequence[Fault]) -> None:
        self.num_local = num_local
        self.is_over = threading.Event()
        self.sockets: list[dict[tuple[Channel, int], _RankSocket]] = [{} for _ in range(num_ranks)]
        fates = [_Fate(self, [fault for fault in faults if fault.rank == rank]) for rank in range(num_ranks)]
        for channel in Channel:
            for first, second in combinations(range(num_ranks), 2):
                ends = socket.socketpair()
                for end, (rank, peer) in zip(ends, ((first, second), (second, first)), strict=True):
                    delays = None if delays_seed is None else random.Random(f"{delays_seed} {rank} {peer} {channel}")
                    self.sockets[rank][channel, peer] = _RankSocket(end, channel, fates[rank], delays)
        for rank, fate in enumerate(fates):
            fate.sockets = list(self.sockets[rank].values())

    def end(self) -> None:
        """Let hanging ranks continue, with closed connections."""
        self.is_over.set()
        for sockets in self.sockets:
            for rank_socket in sockets.values():
                rank_socket.cut()


class _Fate:
    """The faults of one rank. Counts the messages that the rank sends."""

    def __init__(self, world: _World, faults: list[Fault]) -> None:
        self.world = world
        self.sockets: list[_RankSocket] = []
        self.hangs = False
        self.is_dead = False
        self._faults = faults
        self._num_sent: dict[Channel | None, int] = {}
        self._lock = threading.Lock()

    def next_message(self, channel: Channel) -> str | None:
        """Return the fault of the next message, or None."""
        with self._lock:
            happens = None
            for counted in (None, channel):
                number = self._num_sent.get(counted, 0)
                self._num_sent[counted] = number + 1
                for fault in self._faults:
                    if (fault.channel, fault.at_message) == (counted, number):
                        happens = fault.what
            return happens

    def die(self) -> None:
        self.is_dead = True  # the rank must not tell others that the first ones to hear of it have ended
        for rank_socket in self.sockets:
            rank_socket.cut()

    def hang(self) -> None:
        self.hangs = True
        self.world.is_over.wait()


class _RankSocket:
    """One end of a socket pair."""

    def __init__(self, end: socket.socket, channel: Channel, fate: _Fate, delays: random.Random | None) -> None:
        self._end = end
        self._channel = channel
        self._fate = fate
        self._delays = delays
        self._delays_of_received = None if delays is None else random.Random(delays.random())
        self._head = bytearray()
        self._num_left = 0
        """Bytes of the current message that are not sent yet."""

    def fileno(self) -> int:
        return self._end.fileno()

    def sendmsg(self, buffers: Sequence[memoryview], ancillary: Sequence[tuple[int, int, bytes]], flags: int) -> int:
        """Send at most the rest of one message, so that each message begins with a call."""
        if self._fate.hangs:
            self._fate.hang()
        if self._fate.is_dead:
            raise BrokenPipeError("this rank has died")
        first = buffers[0]
        if not self._num_left and not self._head:
            self._delay(self._delays)
            happens = self._fate.next_message(self._channel)
            if happens == "hang":
                self._fate.hang()
            elif happens == "corrupt":
                self._head += bytes(first)  # this part of the head is right
                damaged = bytearray(first)
                damaged[HEAD_BYTES // 2] ^= 4
                self._end.sendall(damaged)
                return self._sent_head()
            elif happens in ("die", "truncate"):
                if happens == "truncate":
                    self._end.sendall(first[: HEAD_BYTES // 2])
                self._fate.die()
                raise BrokenPipeError("this rank has died")
        if self._num_left:
            num_bytes = self._end.send(first, flags)
            self._num_left -= num_bytes
            return num_bytes
        num_bytes = self._end.send(first, flags)
        self._head += first[:num_bytes]
        if len(self._head) == HEAD_BYTES:
            self._sent_head()
        return num_bytes

    def recv_into(self, buffer: memoryview) -> int:
        self._delay(self._delays_of_received)
        if self._fate.hangs:
            self._fate.hang()
        return self._end.recv_into(buffer)

    def shutdown(self, how: int) -> None:
        self._end.shutdown(how)

    def close(self) -> None:
        self._end.close()

    def cut(self) -> None:
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)

    def _sent_head(self) -> int:
        self._num_left = Head.unpack(self._head).payload_bytes
        self._head.clear()
        return HEAD_BYTES

    @staticmethod
    def _delay(delays: random.Random | None) -> None:
        """Sleep for a random time. It is often 0 and sometimes long, because equal delays would keep the order."""
        if delays is not None and delays.random() < 0.4:
            time.sleep(LONGEST_DELAY_S * delays.random() ** 3)


def _stacks(threads: Iterable[threading.Thread]) -> str:
    frames = sys._current_frames()
    found = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None:
            found.append(f"{thread.name}:\n{''.join(traceback.format_stack(frame))}")
    return "\n".join(found)

"""A lane is a process group of gloo in which one thread of each rank begins collectives, so these have one order on all
ranks. Another thread may wait for their ends.

All operations are collectives. If `Work.wait(timeout)` of a collective times out, it only raises, and the work
continues. So a wait is cut into slices, and `Watch` is asked between them. With gloo's `send` and `recv`, a wait that
times out closes all connections of the group. After a failure a group is never destroyed. gloo does not wake a transfer
that was half done when its peer died, and the destructor would wait for it, or abort the process.
"""

from __future__ import annotations

import ctypes
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hf_lohan.ranks.transport.failures import FirstRankFailure, RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.watch import Watch
from hf_lohan.threads import Owner

_SLICE = timedelta(milliseconds=100)
_HEAD = struct.Struct("<IHf")
_INLINE_BYTES = 246
"""Bytes of tag and payload that are sent with the head. Longer payloads take a second collective."""
_SHAPE = struct.Struct("<qq")


class LaneClosedError(Exception):
    """Ends the thread that uses a lane of this rank."""


class BegunWork(NamedTuple):
    """A collective that has begun."""

    what: str
    work: Any


class RankLane:
    """One thread at a time begins operations. Different threads may do so one after the other. One other thread may
    wait for their ends (`finish`)."""

    def __init__(
        self,
        name: str,
        members: Sequence[int],
        watch: Watch,
        failure: FirstRankFailure,
        group: Any,
        *,
        stops_compute: bool,
        interfere: Callable[[str], object] = lambda lane: None,
    ) -> None:
        """``group``: a process group of the members, in their order; None for one member. ``stops_compute``: whether
        the threads that use the lane compute the model, so that a wait keeps the rank from computing. ``interfere`` is
        called with the name before each operation, for tests."""
        self.name = name
        self.members = list(members)
        self.place = self.members.index(watch.ranks.rank)
        """Index of this rank among the members."""
        self.sent_bytes = 0
        """Bytes of payloads for other ranks, except in `agree`."""
        self.agreed_bytes = 0
        """Bytes of payloads of `agree` for other ranks."""
        self.waited_s: dict[int, float] = defaultdict(float)
        """Seconds in which this rank waited for each other rank in `agree`."""
        self._watch = watch
        self._failure = failure
        self._stops_compute = stops_compute
        self._owner = Owner()
        self._number = 0
        self._last_wait_s = 0.0
        self._in_use = threading.RLock()
        self._group = group
        self._has_left = self._is_closed = False
        self._num_inside, self._inside_changes = 0, threading.Lock()
        """Number of threads that are in a call of the group."""
        self._works: list[tuple[int, Any]] = []
        """Collectives that may not have ended, with their numbers."""
        self._interfere = interfere

    def run(self, what: str, begin: Callable[[Any], Any]) -> None:
        """Carry out one collective of all members. ``begin`` gets the group, and returns the work. ``what`` completes
        "rank 0 waited for ...". Raises RankFailedError, RankTimeoutError or RanksDisagreeError."""
        with self._in_use:
            self.finish(self.begin(what, begin))

    def begin(self, what: str, begin: Callable[[Any], Any]) -> BegunWork:
        """Begin a collective for `finish`. See `run`."""
        if not self._owner.is_here:
            raise RuntimeError("this is a forked child of the training process; use the model in the training process")
        if len(self.members) == 1:
            return BegunWork(what, None)
        with self._in_use, self._inside(what):
            self._interfere(self.name)
            self._number += 1
            self._watch.note_position(self.name, self._number, what)
            try:
                work = begin(self._group)
            except RuntimeError as error:  # the group was broken before
                self._watch.raise_cause(what, error, self.members)
            self._works = [*(one for one in self._works if not one[1].is_completed()), (self._number, work)]
            return BegunWork(what, work)

    def finish(self, begun: BegunWork) -> None:
        """Wait for the end of a collective. Raises the errors of `run`. May be called again after an interrupt."""
        self._last_wait_s = 0.0
        what, since_s = begun.what, time.monotonic()
        if begun.work is None or (begun.work.is_completed() and self._is_over(begun.work, what)):
            return
        with self._inside(what), self._watch.waiting(self.name, stops_compute=self._stops_compute):
            while not self._is_over(begun.work, what):
                self._raise_if_over(what)
                self._watch.judge(self.name, what, since_s)
        self._last_wait_s = time.monotonic() - since_s

    @contextmanager
    def _inside(self, what: str) -> Iterator[None]:
        """A context of a thread that calls the group."""
        with self._inside_changes:
            self._num_inside += 1
        try:
            self._raise_if_over(what)
            yield
        finally:
            with self._inside_changes:
                self._num_inside -= 1

    def raise_if_closed(self) -> None:
        """Raise LaneClosedError after `close`."""
        if self._is_closed:
            raise LaneClosedError(f"the lane {self.name} is closed")

    def _raise_if_over(self, what: str) -> None:
        self._failure.raise_if_known(f"waited for {what}")
        self.raise_if_closed()
        if self._has_left:
            rank = self._watch.ranks.rank
            raise RankFailedError(f"rank {rank} closed its connections while it waited for {what}", rank)

    def _is_over(self, work: Any, what: str) -> bool:
        with suppress(RuntimeError):
            work.wait(_SLICE)
            return True
        if not work.is_completed():
            return False
        try:
            work.wait(_SLICE)  # the work may have ended well since the first wait timed out
        except RuntimeError as error:
            self._raise_if_over(what)
            self._watch.raise_cause(what, error, self.members)
        return True

    def agree(self, tag: str, payload: bytes = b"") -> list[bytes]:
        """Return the payloads of all members, in their order. ``tag`` names the call in a few words. Raises
        RanksDisagreeError if a rank is at another call, and the errors of `run`."""
        with self._in_use:
            return self.begin_agree(tag, payload)()

    def begin_agree(self, tag: str, payload: bytes = b"") -> Callable[[], list[bytes]]:
        """Begin an `agree`. Returns a function that waits for its end and returns the payloads."""
        if len(self.members) == 1:
            return lambda: [payload]
        # With a short name, a short payload goes with the head, so `finish` begins no second collective.
        waited_s, name = self._last_wait_s, tag.encode()[: _INLINE_BYTES // 2]
        own = _HEAD.pack(len(payload), len(name), waited_s) + (name + payload)[:_INLINE_BYTES]
        begun = self._begin_exchange(tag, own, _HEAD.size + _INLINE_BYTES)

        def finish() -> list[bytes]:
            told = begun()
            heads = [_HEAD.unpack_from(row) for row in told]
            self._count_wait([wait_s for *_, wait_s in heads], waited_s)
            for rank, row, (_, size, _) in zip(self.members, told, heads, strict=True):
                if (others := row[_HEAD.size :][:size]) != name:
                    raise RanksDisagreeError(
                        f"rank {self._watch.ranks.rank} is at {tag!r} where rank {rank} is at "
                        f"{others.decode(errors='replace')!r}; all ranks must do the same in the same order; look for "
                        "a step, a callback or a save that only some of them run"
                    )
            self.agreed_bytes += len(payload) * (len(self.members) - 1)
            most = max(num_bytes for num_bytes, *_ in heads)
            if len(name) + most <= _INLINE_BYTES:
                starts = [_HEAD.size + size for _, size, _ in heads]
            else:
                told, starts = self._begin_exchange(tag, payload, most)(), [0] * len(told)
            return [
                row[start : start + num_bytes] for row, start, (num_bytes, *_) in zip(told, starts, heads, strict=True)
            ]

        return finish

    def _begin_exchange(self, tag: str, own: bytes, num_bytes: int) -> Callable[[], list[bytes]]:
        # An all-to-all takes half the time of gloo's all_gather, which copies to its own memory.
        num_members = len(self.members)
        mine = torch.frombuffer(bytearray(own.ljust(num_bytes, b"\0") * num_members), dtype=torch.uint8)
        rows = torch.empty(num_members, num_bytes, dtype=torch.uint8)
        begun = self.begin(tag, lambda group: group.alltoall_base(rows.view(-1), mine, [], []))

        def finish() -> list[bytes]:
            self.finish(begun)
            return [row.tobytes() for row in rows.numpy()]

        return finish

    def _count_wait(self, waits_s: Sequence[float], own_s: float) -> None:
        """Attribute this rank's wait in the last exchange to the rank that waited least, because it entered last."""
        last = min(range(len(waits_s)), key=lambda place: waits_s[place])
        if last != self.place:
            self.waited_s[self.members[last]] += own_s

    def barrier(self, tag: str) -> None:
        """Wait until all members have called this."""
        self.agree(tag)

    def broadcast(self, tensor: Tensor, owner: int, tag: str) -> None:
        """Copy the bytes of the owner's tensor to the tensors of all other members. All are contiguous on the CPU, and
        have the same number of bytes."""
        shapes = self.agree(tag, _SHAPE.pack(owner, tensor.nbytes))
        for rank, shape in zip(self.members, shapes, strict=True):
            if shape != shapes[self.place]:
                others_owner, others_bytes = _SHAPE.unpack(shape)
                raise RanksDisagreeError(
                    f"for {tag}, rank {self._watch.ranks.rank} has {tensor.nbytes} bytes of rank {owner}, and rank "
                    f"{rank} has {others_bytes} bytes of rank {others_owner}; load the same model on all ranks"
                )
        if tensor.nbytes:
            self.send_to_all(tensor, owner, tag)

    def send_to_all(self, tensor: Tensor, owner: int, tag: str) -> None:
        """Same as `broadcast`, for a tensor that is not empty and whose size all members know."""
        with self._in_use:
            self.finish(self.begin_to_all(tensor, owner, tag))

    def begin_to_all(self, tensor: Tensor, owner: int, tag: str) -> BegunWork:
        """Begin `send_to_all`, for `finish`."""
        content, options = bytes_of(tensor), torch.distributed.BroadcastOptions()
        options.rootRank = self.members.index(owner)
        if options.rootRank == self.place:
            self.sent_bytes += tensor.nbytes * (len(self.members) - 1)
        return self.begin(tag, lambda group: group.broadcast([content], options))

    def exchange(
        self, sent: Tensor, send_sizes: Sequence[int], received: Tensor, sizes: Sequence[int], tag: str
    ) -> None:
        """Send parts of ``sent``, uint8 of ``sum(send_sizes)``, to the members in their order, and receive their parts
        to ``received``, uint8 of ``sum(sizes)``. Sizes are in bytes, and both ends know them. A part may be empty."""
        with self._in_use:
            self.finish(self.begin_exchange(sent, send_sizes, received, sizes, tag))

    def begin_exchange(
        self, sent: Tensor, send_sizes: Sequence[int], received: Tensor, sizes: Sequence[int], tag: str
    ) -> BegunWork:
        """Begin an `exchange` for `finish`. Both tensors are in use until then."""
        self.sent_bytes += sum(send_sizes) - send_sizes[self.place]
        if len(self.members) == 1:
            received.copy_(sent)
        return self.begin(tag, lambda group: group.alltoall_base(received, sent, list(sizes), list(send_sizes)))

    def close(self) -> None:
        """End this rank's waits in the lane. A rank that waits for this rank there gets an error. Any thread may call
        this."""
        self._is_closed = True
        # A collective that has not ended here will not end. Other ranks that have begun it wait for this rank.
        unfinished = (number for number, work in self._works if not work.is_completed())
        self._watch.note_position(self.name, next(unfinished, self._number + 1) - 1, "")
        self._watch.note_closed(self.name)

    def stop(self) -> None:
        """Make the threads that wait in the lane raise RankFailedError, within a slice."""
        self._has_left = True

    def leave(self, *, has_failed: bool, until_s: float) -> None:
        """Stop using the lane. Waits for threads in a call of the group, until the time ``until_s`` at most. If a rank
        has failed or a collective has not ended, the group stays for the rest of the process."""
        self.stop()
        # At the interpreter's end a thread of Python that returns from C++ would end the process by an abort.
        while self._num_inside and time.monotonic() < until_s:
            time.sleep(0.001)
        if self._group is not None and (has_failed or not all(work.is_completed() for _, work in self._works)):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._group))
        self._group = None


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8. They are its memory if it is contiguous."""
    return tensor.detach().reshape(-1).view(torch.uint8)

"""One rank's connections to all others, with message handlers, waits with timeouts, and failures that name a rank.

Each peer and channel has a thread that receives, and calls the handler of each message. A rank that dies is detected by
the end of its connections. A rank that fails first tells the others. A rank that hangs is detected by a timeout.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import NoReturn

import torch
from torch import Tensor

from hf_lohan.ranks.transport.connection import (
    SLICE_S,
    Connection,
    ConnectionBrokenError,
    CutOffError,
    Handler,
    MessageHandlers,
    Socket,
)
from hf_lohan.ranks.transport.failures import (
    Failure,
    FirstRankFailure,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
)
from hf_lohan.ranks.transport.messages import Channel, DamagedHeadError, Head, Kind, PayloadReader, memory_of
from hf_lohan.ranks.transport.topology import SINGLE_RANK, Ranks
from hf_lohan.threads import Owner, start_thread

BROADCAST_PIECE_BYTES = 4 << 20
_VERDICT_S = 0.5
"""Seconds that other channels wait until the control channel says why a rank is gone."""
_LAST_WORDS_S = 1.0
"""Seconds that `close` waits until the other ranks have received the last messages."""
_HANDLER_ENDS_WITHIN_S = 5.0
_MAX_TEXT_CHARS = 4000
_LENGTHS = struct.Struct("<II")
IN_TURN = ("main", "lengths")
"""Sequences of `all_gather` whose calls a rank's computing thread makes, so that their order is one."""
_SHAPE = struct.Struct("<qq")


@dataclass(eq=False)
class Peer:
    """Another rank, with a connection for each channel."""

    rank: int
    connections: dict[Channel, Connection]
    pid: int = 0
    host: str = ""
    channels_left: set[Channel] = field(default_factory=set)
    num_waiting: int = 0
    """Threads of this rank that wait for the peer."""
    waited_s: float = 0.0
    """Seconds in which at least one thread of this rank waited for the peer. Without the waits in progress."""
    waiting_since_s: float = 0.0

    @property
    def has_left(self) -> bool:
        """Whether the rank said goodbye, and all its messages were handled."""
        return len(self.channels_left) == len(self.connections)

    @property
    def last_heard_s(self) -> float:
        """Time of the last received bytes, by `time.monotonic`."""
        return max(connection.last_heard_s for connection in self.connections.values())

    def __str__(self) -> str:
        return f"rank {self.rank} (pid {self.pid}, {self.host})" if self.pid else f"rank {self.rank}"


class Links:
    """The connections of one rank. All methods except `close` may be called from any thread."""

    def __init__(
        self,
        ranks: Ranks,
        sockets_by_channel_and_peer: Mapping[tuple[Channel, int], Socket],
        timeout_s: float,
    ) -> None:
        """`timeout_s`: seconds that a rank may be silent while this rank waits for it."""
        self.ranks = ranks
        self.timeout_s = timeout_s
        # Enter the lock itself and not the condition. `IoEngine` says why.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when a predicate of `wait_for` may have become true."""
        self._owner = Owner()
        self._failure = FirstRankFailure(ranks.rank, self.changed, self.lock)
        self._handlers = MessageHandlers(self.changed, self.lock, lambda: self._failure.is_known or self._is_closing)
        self._is_closing = False
        self._announcing = threading.Lock()
        """Held while this rank tells the others of a failure, so that `close` does not cut that short."""
        self._num_gathers: dict[str, int] = defaultdict(int)
        """Number of this rank's calls of `all_gather`, by sequence."""
        self._gathered: dict[tuple[str, int], dict[int, tuple[str, bytes]]] = defaultdict(dict)
        """(tag, payload) of each call, by sequence and number, and then by rank."""
        self._waiting_since: dict[int, float] = {}
        """By thread that waits for other ranks, the time by `time.monotonic`."""
        self._broadcasts: dict[int, tuple[Tensor, int]] = {}
        """By owner, the tensor that receives the owner's bytes, and the number of bytes that have arrived."""
        self._handlers.set_handler(Kind.GATHER, self._on_gather)
        self._handlers.set_handler(Kind.BROADCAST, self._on_broadcast)
        self._peers = {
            rank: Peer(
                rank,
                {channel: Connection(sockets_by_channel_and_peer[channel, rank], channel) for channel in Channel},
            )
            for rank in ranks.others
        }
        self._threads = [
            start_thread(
                partial(self._receive, peer, connection),
                f"lohan-rank-{ranks.rank}-from-{peer.rank}-{channel}",
                beside_kernels=channel is Channel.GRADIENTS,  # its handlers add gradients
            )
            for peer in self._peers.values()
            for channel, connection in peer.connections.items()
        ]
        for peer in self._peers.values():
            for channel, connection in peer.connections.items():
                host = socket.gethostname().encode() if channel is Channel.CONTROL else b""
                connection.post(Kind.HELLO, (ranks.rank, ranks.num_ranks, os.getpid()), host)

    @classmethod
    def alone(cls) -> Links:
        """Return links of a single rank, on which every call works and nothing is sent."""
        return cls(SINGLE_RANK, {}, timeout_s=0.0)

    def __enter__(self) -> Links:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self.fail(error)
        self.close()

    # Messages

    def send(
        self,
        peer: int,
        kind: Kind,
        *numbers: int,
        payload: Tensor | bytes | None = None,
        channel: Channel = Channel.CONTROL,
    ) -> None:
        """Send a message. A tensor is sent from its own memory, and may be changed after this returns. Without a tensor
        this does not wait. Nothing is sent to a rank that has left. Raises RankFailedError."""
        self._refuse_in_child()
        receiver = self._peers[peer]
        if self._failure.is_known:
            self._failure.raise_if_known(f"was about to send {kind.name} to rank {peer}")
        connection = receiver.connections[channel]
        if not isinstance(payload, Tensor):
            connection.post(kind, numbers, payload or b"")
            return

        began_s = time.monotonic()

        def refuse_to_wait() -> None:
            self._failure.raise_if_known(f"sent {kind.name} to rank {peer}")
            if time.monotonic() - max(began_s, receiver.last_heard_s, connection.last_accepted_s) > self.timeout_s:
                self._raise_silent([receiver], f"it to take {kind.name}")

        try:
            connection.send(kind, numbers, memory_of(payload), refuse_to_wait)
        except ConnectionBrokenError:
            self._await_verdict(receiver, channel)
            if not receiver.has_left:
                self._failure.raise_if_known(f"sent {kind.name} to rank {peer}")

    def send_all(
        self, kind: Kind, *numbers: int, payload: Tensor | bytes | None = None, channel: Channel = Channel.CONTROL
    ) -> None:
        """Send the same message to every other rank."""
        for peer in self._peers:
            self.send(peer, kind, *numbers, payload=payload, channel=channel)

    def set_handler(self, kind: Kind, handler: Handler) -> None:
        """Call `handler` for every message of a kind, including messages that have already arrived. This replaces the
        previous handler. An exception of the handler is this rank's failure."""
        self._handlers.set_handler(kind, handler)

    def remove_handler(self, kind: Kind) -> None:
        """Remove the handler. Messages of this kind then wait for the next handler."""
        self._handlers.remove_handler(kind)

    @property
    def sent_bytes(self) -> dict[Channel, int]:
        """Bytes of payloads."""
        return self._sum_by_channel(lambda connection: connection.sent_bytes)

    @property
    def received_bytes(self) -> dict[Channel, int]:
        """Bytes of payloads."""
        return self._sum_by_channel(lambda connection: connection.received_bytes)

    @property
    def num_sent(self) -> dict[Channel, int]:
        """Number of sent messages. Each adds a head of `HEAD_BYTES` to its payload."""
        return self._sum_by_channel(lambda connection: connection.num_sent)

    @property
    def waited_s(self) -> dict[int, float]:
        """By other rank, the seconds in which at least one thread of this rank waited for it."""
        with self.lock:
            return {rank: peer.waited_s for rank, peer in self._peers.items()}

    # Collective calls.

    def all_gather(self, tag: str, payload: bytes = b"", *, sequence: str = "main") -> list[bytes]:
        """Return the payloads of all ranks, in rank order. `tag` names the call in a few words. All ranks make the
        calls of one sequence in the same order, one at a time. The sequences `IN_TURN` are ordered among each other,
        too. Raises RankFailedError or RankTimeoutError, and RanksDisagreeError if ranks are at different calls."""
        others = self.ranks.others
        self.raise_if_failed(f"waited for {tag}")
        with self.lock:
            number = self._num_gathers[sequence]
            self._num_gathers[sequence] += 1
            received = self._gathered[sequence, number]
        names = sequence.encode(), tag.encode()
        packed = b"".join((_LENGTHS.pack(len(names[0]), len(names[1])), *names, payload))
        self.send_all(Kind.GATHER, number, payload=packed)

        def is_complete() -> bool:
            missing = [other for other in others if other not in received]
            self._check_order(tag, sequence, number, missing)
            return not missing

        self.wait_for(is_complete, tag, peers=lambda: [other for other in others if other not in received])
        with self.lock:
            del self._gathered[sequence, number]
        return [payload if rank == self.ranks.rank else received[rank][1] for rank in range(self.ranks.num_ranks)]

    def barrier(self, tag: str, *, sequence: str = "main") -> None:
        """Wait until all ranks have called this."""
        self.all_gather(tag, sequence=sequence)

    def broadcast(self, tensor: Tensor, owner: int, tag: str, *, sequence: str = "main") -> None:
        """Copy the bytes of the owner's tensor to the tensors of all other ranks. All tensors are contiguous, on the
        CPU, and of the same number of bytes."""
        is_owner = owner == self.ranks.rank
        num_bytes = len(memory_of(tensor))
        content = tensor.detach().reshape(-1).view(torch.uint8)
        if not is_owner:
            with self.lock:  # the owner sends only after the gather, when all ranks are ready
                self._broadcasts[owner] = (content, 0)
        shapes = self.all_gather(tag, _SHAPE.pack(owner, num_bytes), sequence=sequence)
        for rank, shape in enumerate(shapes):
            if shape != shapes[self.ranks.rank]:
                others_owner, others_bytes = _SHAPE.unpack(shape)
                raise RanksDisagreeError(
                    f"for {tag}, rank {self.ranks.rank} has {num_bytes} bytes of rank {owner}, and rank {rank} has "
                    f"{others_bytes} bytes of rank {others_owner}; load the same model on all ranks"
                )
        if is_owner:
            for start in range(0, num_bytes, BROADCAST_PIECE_BYTES):
                piece = content[start : start + BROADCAST_PIECE_BYTES]
                self.send_all(Kind.BROADCAST, start, payload=piece, channel=Channel.WEIGHTS)
        else:
            self.wait_for(lambda: self._broadcasts[owner][1] == num_bytes, tag, peers=[owner])
            with self.lock:
                del self._broadcasts[owner]

    def _check_order(self, tag: str, sequence: str, number: int, awaited: Collection[int]) -> None:
        """Raise RanksDisagreeError if another rank's call of this number has another tag, or if one of the awaited
        ranks is at a call of another sequence to which this rank comes later. The caller holds the lock."""
        self._check_tag(tag, sequence, number, self.ranks.others)
        for other_sequence in IN_TURN if sequence in IN_TURN else ():
            if other_sequence != sequence:
                self._check_tag(tag, other_sequence, self._num_gathers[other_sequence], awaited)

    def _check_tag(self, tag: str, sequence: str, number: int, of_ranks: Collection[int]) -> None:
        for other, (others_tag, _) in self._gathered.get((sequence, number), {}).items():
            if others_tag != tag and other in of_ranks:
                raise RanksDisagreeError(
                    f"rank {self.ranks.rank} is at {tag!r} where rank {other} is at {others_tag!r} (number {number} "
                    f"of {sequence!r}); all ranks must do the same in the same order; look for a step, a callback or "
                    "a save that only some of them run"
                )

    def _on_gather(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        packed = payload.bytes()
        lengths = _LENGTHS.unpack_from(packed)
        tag_start = _LENGTHS.size + lengths[0]
        content_start = tag_start + lengths[1]
        sequence, tag = packed[_LENGTHS.size : tag_start].decode(), packed[tag_start:content_start].decode()
        with self.lock:
            self._gathered[sequence, numbers[0]][peer] = (tag, packed[content_start:])
            self.notify()

    def _on_broadcast(self, peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
        assert payload is not None
        (start,) = numbers
        with self.lock:
            content, _ = self._broadcasts[peer]
        stop = start + payload.num_bytes
        payload.read_into(content[start:stop])
        with self.lock:
            self._broadcasts[peer] = (content, stop)
            self.notify()

    # Waits and failures.

    def notify(self) -> None:
        """Wake all waits, so that they evaluate their predicates again."""
        with self.lock:
            self.changed.notify_all()

    def wait_for(
        self,
        predicate: Callable[[], object],
        what: str,
        peers: Collection[int] | Callable[[], Collection[int]] | None = None,
        *,
        before: str = "",
        is_noted: bool = True,
    ) -> None:
        """Wait until `predicate` is true. It is called with `lock` held. `what` completes "rank 0 waited for ...".
        `peers`: the ranks that can still make it true; None for all. `before`: the tag of the next `all_gather` after
        this wait. ``is_noted``: whether `waits_since` tells of it. Raises RankFailedError or RankTimeoutError, and
        RanksDisagreeError if a rank is at another tag."""
        began_s = time.monotonic()
        with self.lock, self.note_waiting() if is_noted else contextlib.nullcontext():
            while not predicate():
                self._refuse_in_child()
                awaited = self._peers if peers is None else peers() if callable(peers) else peers
                if before:
                    self._check_order(before, "main", self._num_gathers["main"], awaited)
                self._failure.raise_if_known(f"waited for {what}")
                if self._is_closing:
                    text = f"rank {self.ranks.rank} closed its connections while it waited for {what}"
                    raise RankFailedError(text, self.ranks.rank)
                waited_for = [self._peers[rank] for rank in awaited if rank in self._peers]
                gone = [peer for peer in waited_for if peer.has_left]
                if gone and (peers is not None or len(gone) == len(waited_for)):
                    self._raise_left(gone[0], what)
                silent = self._silent_peers(waited_for, began_s)
                if silent and (peers is not None or len(silent) == len(waited_for)):
                    self._raise_silent(silent, what)
                self._wait_slice(waited_for)

    def _wait_slice(self, waited_for: Collection[Peer]) -> None:
        """Wait for a change, for a short time, and count it as time of these peers. The caller holds the lock."""
        began_s = time.monotonic()
        for peer in waited_for:
            if not peer.num_waiting:
                peer.waiting_since_s = began_s
            peer.num_waiting += 1
        try:
            self.changed.wait(SLICE_S)
        finally:
            for peer in waited_for:
                peer.num_waiting -= 1
                if not peer.num_waiting:
                    peer.waited_s += time.monotonic() - peer.waiting_since_s

    @contextlib.contextmanager
    def note_waiting(self) -> Iterator[None]:
        """Note that this thread waits for other ranks within this context."""
        thread = threading.get_ident()
        is_outer = self._waiting_since.setdefault(thread, now_s := time.monotonic()) is now_s
        try:
            yield
        finally:
            if is_outer:
                del self._waiting_since[thread]

    def waits_since(self, thread: int) -> float | None:
        """Return since when a thread waits for other ranks, by `time.monotonic`; None if it does not."""
        return self._waiting_since.get(thread)

    def raise_if_silent(self, what: str, peers: Collection[int], since_s: float, *, before: str = "") -> None:
        """Raise RankFailedError or RankTimeoutError if these ranks have failed, or were silent for too long after
        `since_s` (`time.monotonic`). This is for waits that do not use `wait_for`, which explains `before`."""
        with self.lock:
            if before:
                self._check_order(before, "main", self._num_gathers["main"], peers)
            self._failure.raise_if_known(f"waited for {what}")
            silent = self._silent_peers([self._peers[rank] for rank in peers], since_s)
            if silent:
                self._raise_silent(silent, what)

    def raise_cause(self, what: str) -> None:
        """Raise as `wait_for` does if another rank is known as the cause of a failure, now or within half a second.
        Call this if an operation that depends on other ranks has failed on this rank."""
        with self.lock:
            self.changed.wait_for(lambda: not self._peers or self._failure.is_known, _VERDICT_S)
        self.raise_if_silent(what, self._peers, since_s=0.0)
        for peer in filter(lambda peer: peer.has_left, self._peers.values()):
            self._raise_left(peer, what)

    def raise_if_failed(self, what: str) -> None:
        """Raise RankFailedError if another rank has failed, or this rank's own exception if this rank has failed.
        `what` completes "while rank 0 ..."."""
        self._failure.raise_if_known(what)

    def add_failure_callback(self, callback: Callable[[RankFailedError], object]) -> None:
        """Call `callback` once, on any thread, when a rank has failed, or now if one has already failed."""
        self._failure.add_callback(callback)

    def set_timeout(self, timeout_s: float) -> None:
        """Set the seconds that a rank may be silent while this rank waits for it."""
        with self.lock:
            self.timeout_s = timeout_s

    def send_heartbeat(self) -> None:
        """Tell the other ranks, which may wait for this rank, that it is working. Call this before a long operation."""
        if not self._failure.is_known:
            self.send_all(Kind.HELLO, self.ranks.rank, self.ranks.num_ranks, os.getpid())

    def fail(self, error: BaseException) -> None:
        """Tell all other ranks that this rank cannot continue. Every later send and wait raises. Does nothing in a
        forked process and after `close`."""
        if not self._owner.is_here or self._is_closing:
            return
        origin, text = (error.rank, str(error)) if isinstance(error, RankFailedError) else (self.ranks.rank, "")
        self._failure.record_failure(Failure(origin, text or f"{type(error).__name__}: {error}", error))
        self._announce_failure()

    def close(self) -> None:
        """Say goodbye, and end all threads. Unless `fail` was called, the other ranks may continue while they do not
        wait for this rank. Does nothing in a forked process."""
        if not self._owner.is_here or self._is_closing:
            return
        self._is_closing = True
        self._announce_failure()
        connections = [connection for peer in self._peers.values() for connection in peer.connections.values()]
        if not self._failure.is_known:  # checked once, because a rank may fail as soon as it is told
            for connection in connections:
                connection.post(Kind.BYE, ())
        until_s = time.monotonic() + _LAST_WORDS_S
        for peer in self._peers.values():
            for channel in peer.connections.keys() - peer.channels_left:
                peer.connections[channel].wait_until_sent(until_s)
        for connection in connections:
            connection.cut()
        self.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_HANDLER_ENDS_WITHIN_S)
        for connection in connections:
            connection.close()

    # Receiving threads.

    def _receive(self, peer: Peer, connection: Connection) -> None:
        channel = connection.channel
        try:
            while (head := connection.receive()) is not None:
                if head.kind == Kind.BYE:
                    peer.channels_left.add(channel)
                    self.notify()
                    return
                self._handle(peer, connection, head)
            self._on_lost(peer, channel, "ended")
        except CutOffError as error:
            self._on_lost(peer, channel, f"ended in the middle of a message of channel {channel}, {error}")
        except DamagedHeadError as error:
            self._failure.record_failure(
                Failure(peer.rank, f"{peer} sent a message of channel {channel} that cannot be read: {error}")
            )
        except BaseException as error:
            if not self._is_closing:
                self._failure.record_failure(Failure(self.ranks.rank, f"{type(error).__name__}: {error}", error))
                self._announce_failure()

    def _handle(self, peer: Peer, connection: Connection, head: Head) -> None:
        reader = PayloadReader(head.payload_bytes, connection.receive_into) if head.payload_bytes else None
        if head.kind == Kind.HELLO:
            self._on_hello(peer, head.numbers, reader)
        elif head.kind == Kind.FAILED:
            assert reader is not None
            (origin, is_senders_own), text = head.numbers, reader.bytes().decode()
            self._failure.record_failure(Failure(origin, f"{peer} failed: {text}" if is_senders_own else text))
        else:
            self._handlers.handle_message(peer.rank, head, reader)
        if reader is not None:
            reader.skip_rest()

    def _on_hello(self, peer: Peer, numbers: tuple[int, ...], reader: PayloadReader | None) -> None:
        rank, num_ranks, pid = numbers
        if (rank, num_ranks) != (peer.rank, self.ranks.num_ranks):
            text = f"rank {rank} of {num_ranks} answered instead of {peer} of {self.ranks.num_ranks}"
            self._failure.record_failure(Failure(peer.rank, text))
        if reader is not None:
            peer.pid, peer.host = pid, reader.bytes().decode()

    def _on_lost(self, peer: Peer, channel: Channel, how: str) -> None:
        """Handle a connection that ended without a goodbye. The control channel ends together with the others, and its
        thread knows the reason."""
        if self._is_closing or self._failure.is_announced:
            return
        if channel is not Channel.CONTROL:
            self._await_verdict(peer, channel)
        self._failure.record_failure(Failure(peer.rank, f"{peer} {how}"))

    def _await_verdict(self, peer: Peer, channel: Channel) -> None:
        """Wait a moment, until the thread of the control channel may know why a connection broke."""
        until_s = time.monotonic() + _VERDICT_S
        with self.lock:
            while not (self._failure.is_known or peer.has_left or self._is_closing) and time.monotonic() < until_s:
                self.changed.wait(until_s - time.monotonic())
        if not self._failure.is_known and not peer.has_left:
            self._failure.record_failure(Failure(peer.rank, f"{peer} closed channel {channel} without a goodbye"))

    # Failures.

    def _announce_failure(self) -> None:
        """Tell the others of a failure, once."""
        with self._announcing:
            failure = self._failure.to_announce()
            if failure is None:
                return
            is_own = failure.error is not None and not isinstance(failure.error, RankFailedError)
            payload = failure.text[:_MAX_TEXT_CHARS].encode()
            for peer in self._peers.values():
                peer.connections[Channel.CONTROL].post(Kind.FAILED, (failure.rank, is_own), payload)

    def _silent_peers(self, peers: Collection[Peer], since_s: float) -> list[Peer]:
        now_s = time.monotonic()
        return [peer for peer in peers if now_s - max(peer.last_heard_s, since_s) > self.timeout_s]

    def _raise_left(self, peer: Peer, what: str) -> NoReturn:
        text = f"{peer} had ended its run while rank {self.ranks.rank} waited for {what}"
        raise RankFailedError(text, peer.rank)

    def _raise_silent(self, silent: Collection[Peer], what: str) -> NoReturn:
        names = " and ".join(str(peer) for peer in silent)
        raise RankTimeoutError(
            f"{names} said nothing for {self.timeout_s:g} s while rank {self.ranks.rank} waited for {what}; find out "
            "what it does (py-spy dump), or raise net_timeout",
            next(iter(silent)).rank,
        )

    def _refuse_in_child(self) -> None:
        if not self._owner.is_here:
            raise RuntimeError("this is a forked child of the training process; use the model in the training process")

    def _sum_by_channel(self, number: Callable[[Connection], int]) -> dict[Channel, int]:
        return {channel: sum(number(peer.connections[channel]) for peer in self._peers.values()) for channel in Channel}


@contextlib.contextmanager
def one_rank_at_a_time(links: Links, tag: str, *, of_all_nodes: bool = False) -> Iterator[None]:
    """A context that all ranks enter. The ranks of a node, or ``of_all_nodes``, run its body one after the other, in
    order. All leave it together, even if some fail in it."""
    ranks = links.ranks
    failure: BaseException | None = None
    num_turns, own_turn, rank = (
        (ranks.num_ranks, ranks.rank, "rank") if of_all_nodes else (ranks.num_local, ranks.local_rank, "local rank")
    )
    for turn in range(num_turns):
        if turn == own_turn:
            try:
                yield
            except BaseException as error:
                failure = error
        links.barrier(f"{tag} of {rank} {turn}")
    if failure is not None:
        raise failure

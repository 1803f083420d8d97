"""One rank's connections to all others: messages with handlers, waits that end, and failures that name a rank.

A thread for each peer and lane receives, and calls the handler of each message. A rank that dies is seen by the end of
its connections, a rank that fails tells the others first, and one that hangs by its silence while it is waited for.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from types import TracebackType
from typing import NoReturn

from torch import Tensor

from hf_lohan.ranks.connection import SLICE_S, Connection, ConnectionBrokenError, CutOffError, Socket
from hf_lohan.ranks.errors import RankFailedError, RankTimeoutError
from hf_lohan.ranks.exchanges import Exchanges
from hf_lohan.ranks.first_failure import Failure, FirstRankFailure
from hf_lohan.ranks.handlers import Handler, Handlers
from hf_lohan.ranks.messages import DamagedHeadError, Head, Kind, Lane, PayloadReader, bytes_of
from hf_lohan.ranks.peer import Peer
from hf_lohan.ranks.topology import ALONE, Ranks
from hf_lohan.threads import Owner, start_thread

_VERDICT_S = 0.5
"""The control lane says why a rank is gone. The others give it so much time."""
_LAST_WORDS_S = 1.0
"""How long closing waits for the others to take what was said."""
_HANDLER_ENDS_WITHIN_S = 5.0
_MAX_TEXT_CHARS = 4000


class Links:
    """Of one rank. All methods but `close` may be called from any thread."""

    def __init__(
        self,
        ranks: Ranks,
        sockets_by_lane_and_peer: Mapping[tuple[Lane, int], Socket],
        timeout_s: float,
    ) -> None:
        """`timeout_s`: how long a rank may be silent while it is waited for."""
        self.ranks = ranks
        self.timeout_s = timeout_s
        # Entered itself, not through the condition: see `IoEngine`.
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        """Notified when something may be true that `wait_for` waits for."""
        self._owner = Owner()
        self._failure = FirstRankFailure(ranks.rank, self.changed, self.lock)
        self._handlers = Handlers(self.changed, self.lock, lambda: self._failure.is_known or self._is_closing)
        self._is_closing = False
        self._exchanges = Exchanges(self)
        self._peers = {
            rank: Peer(rank, {lane: Connection(sockets_by_lane_and_peer[lane, rank], lane) for lane in Lane})
            for rank in ranks.others
        }
        self._threads = [
            start_thread(
                partial(self._receive, peer, connection),
                f"lohan-rank-{ranks.rank}-from-{peer.rank}-{lane}",
                beside_kernels=lane is Lane.GRADIENTS,  # handlers there add
            )
            for peer in self._peers.values()
            for lane, connection in peer.connections.items()
        ]
        for peer in self._peers.values():
            for lane, connection in peer.connections.items():
                host = socket.gethostname().encode() if lane is Lane.CONTROL else b""
                connection.post(Kind.HELLO, (ranks.rank, ranks.num_ranks, os.getpid()), host)

    @classmethod
    def alone(cls) -> Links:
        """Of the only rank: every call works, and nobody is there."""
        return cls(ALONE, {}, timeout_s=0.0)

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
        lane: Lane = Lane.CONTROL,
    ) -> None:
        """Send a message. A tensor is sent from where it lies, and may be changed when this returns; without one this
        does not wait. To a rank that has left nothing is sent. Raises RankFailedError."""
        self._refuse_in_child()
        there = self._peers[peer]
        if self._failure.is_known:
            self._failure.raise_if_known(f"was about to send {kind.name} to rank {peer}")
        connection = there.connections[lane]
        if not isinstance(payload, Tensor):
            connection.post(kind, numbers, payload or b"")
            return

        began_s = time.monotonic()

        def refuse_to_wait() -> None:
            self._failure.raise_if_known(f"sent {kind.name} to rank {peer}")
            if time.monotonic() - max(began_s, there.last_heard_s, connection.last_taken_s) > self.timeout_s:
                self._raise_silent([there], f"it to take {kind.name}")

        try:
            connection.send(kind, numbers, bytes_of(payload), refuse_to_wait)
        except ConnectionBrokenError:
            self._await_verdict(there, lane)
            if not there.has_left:
                self._failure.raise_if_known(f"sent {kind.name} to rank {peer}")

    def send_all(
        self, kind: Kind, *numbers: int, payload: Tensor | bytes | None = None, lane: Lane = Lane.CONTROL
    ) -> None:
        """Send the same message to every other rank."""
        for peer in self._peers:
            self.send(peer, kind, *numbers, payload=payload, lane=lane)

    def on(self, kind: Kind, handler: Handler) -> None:
        """Have `handler` called for every message of a kind, also for those that came already. It takes the place of
        one before it. What it raises is this rank's failure."""
        self._handlers.set(kind, handler)

    def off(self, kind: Kind) -> None:
        """Messages of this kind wait for another handler."""
        self._handlers.remove(kind)

    @property
    def sent_bytes(self) -> dict[Lane, int]:
        """Bytes of payloads."""
        return self._sum_by_lane(lambda connection: connection.sent_bytes)

    @property
    def received_bytes(self) -> dict[Lane, int]:
        """Bytes of payloads."""
        return self._sum_by_lane(lambda connection: connection.received_bytes)

    @property
    def num_sent(self) -> dict[Lane, int]:
        """Messages. Each has a head of `HEAD_BYTES`, too."""
        return self._sum_by_lane(lambda connection: connection.num_sent)

    def sent_bytes_to(self, peer: int) -> dict[Lane, int]:
        """Bytes of payloads."""
        return {lane: connection.sent_bytes for lane, connection in self._peers[peer].connections.items()}

    # What all ranks do together

    def gather(self, tag: str, payload: bytes = b"", *, sequence: str = "main") -> list[bytes]:
        """What every rank gave, in rank order. `tag` says what it is, in a few words. Calls of one sequence are made in
        the same order by all ranks, each by one thread at a time."""
        return self._exchanges.gather(tag, payload, sequence)

    def barrier(self, tag: str, *, sequence: str = "main") -> None:
        """Return when all ranks have called this."""
        self._exchanges.gather(tag, b"", sequence)

    def share(self, tensor: Tensor, owner: int, tag: str, *, sequence: str = "main") -> None:
        """Give the bytes of the owner's tensor to all others' tensors, which have equally many. On the CPU, and
        contiguous."""
        self._exchanges.share(tensor, owner, tag, sequence)

    # Waiting and failing

    def notify(self) -> None:
        """Have those who wait look again."""
        with self.lock:
            self.changed.notify_all()

    def wait_for(
        self,
        predicate: Callable[[], object],
        what: str,
        peers: Collection[int] | Callable[[], Collection[int]] | None = None,
        *,
        before: str = "",
    ) -> None:
        """Wait until `predicate`, which is called with `lock` held. `what` completes "rank 0 waited for ...". `peers`:
        those who can still make it true; None for all. `before`: the tag of what all ranks do together behind this.
        Raises RankFailedError or RankTimeoutError, and RanksDisagreeError where one does something else than that."""
        began_s = time.monotonic()
        with self.lock:
            while not predicate():
                self._refuse_in_child()
                if before:
                    self._exchanges.refuse_others(before)
                self._failure.raise_if_known(f"waited for {what}")
                if self._is_closing:
                    text = f"rank {self.ranks.rank} closed its connections while it waited for {what}"
                    raise RankFailedError(text, self.ranks.rank)
                awaited = self._peers if peers is None else peers() if callable(peers) else peers
                there = [self._peers[rank] for rank in awaited if rank in self._peers]
                gone = [peer for peer in there if peer.has_left]
                if gone and (peers is not None or len(gone) == len(there)):
                    self._raise_left(gone[0], what)
                now_s = time.monotonic()
                silent = [peer for peer in there if now_s - max(peer.last_heard_s, began_s) > self.timeout_s]
                if silent and (peers is not None or len(silent) == len(there)):
                    self._raise_silent(silent, what)
                self.changed.wait(SLICE_S)

    def refuse_silence(self, what: str, peers: Collection[int], since_s: float) -> None:
        """For who waits for these ranks in another way, since `since_s` (`time.monotonic`). Raises RankFailedError or
        RankTimeoutError where that is in vain."""
        with self.lock:
            self._failure.raise_if_known(f"waited for {what}")
            there = [self._peers[rank] for rank in peers]
            now_s = time.monotonic()
            silent = [peer for peer in there if now_s - max(peer.last_heard_s, since_s) > self.timeout_s]
            if silent:
                self._raise_silent(silent, what)

    def raise_cause(self, what: str) -> None:
        """Something else failed here that waited for other ranks: raise as `wait_for` does if one of them is the cause,
        by what this rank knows or is told within half a second."""
        with self.lock:
            self.changed.wait_for(lambda: not self._peers or self._failure.is_known, _VERDICT_S)
        self.refuse_silence(what, self._peers, since_s=0.0)
        for peer in filter(lambda peer: peer.has_left, self._peers.values()):
            self._raise_left(peer, what)

    def raise_if_failed(self, what: str) -> None:
        """Raise RankFailedError, or what failed here, if anything did. `what` completes "while rank 0 ..."."""
        self._failure.raise_if_known(what)

    def when_failed(self, told: Callable[[RankFailedError], object]) -> None:
        """Have `told` called once, on any thread, when a rank has failed; at once if one has."""
        self._failure.when_known(told)

    def allow_silence(self, timeout_s: float) -> None:
        """From now on a rank may be silent for so long while it is waited for."""
        with self.lock:
            self.timeout_s = timeout_s

    def show_life(self) -> None:
        """Let the others, who may wait for this rank, know that it is at work: before what takes long."""
        if not self._failure.is_known:
            self.send_all(Kind.HELLO, self.ranks.rank, self.ranks.num_ranks, os.getpid())

    def fail(self, error: BaseException) -> None:
        """Tell all others that this rank cannot go on. Nothing can be sent or waited for after that. In a forked child:
        do nothing."""
        if not self._owner.is_here:
            return
        origin, text = (error.rank, str(error)) if isinstance(error, RankFailedError) else (self.ranks.rank, "")
        self._failure.note(Failure(origin, text or f"{type(error).__name__}: {error}", error))
        self._tell_failure()

    def close(self) -> None:
        """Say goodbye and end all threads. Without `fail` before, it is a clean end for those who do not wait for this
        rank. In a forked child: do nothing."""
        if not self._owner.is_here or self._is_closing:
            return
        self._is_closing = True
        self._tell_failure()
        connections = [connection for peer in self._peers.values() for connection in peer.connections.values()]
        if not self._failure.is_known:  # once for all: the first to hear it may fail before the last is told
            for connection in connections:
                connection.post(Kind.BYE, ())
        until_s = time.monotonic() + _LAST_WORDS_S
        for peer in self._peers.values():
            for lane in peer.connections.keys() - peer.lanes_left:
                peer.connections[lane].wait_until_sent(until_s)
        for connection in connections:
            connection.cut()
        self.notify()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(_HANDLER_ENDS_WITHIN_S)
        for connection in connections:
            connection.close()

    # Threads that receive

    def _receive(self, peer: Peer, connection: Connection) -> None:
        lane = connection.lane
        try:
            while (head := connection.receive()) is not None:
                if head.kind == Kind.BYE:
                    peer.lanes_left.add(lane)
                    self.notify()
                    return
                self._handle(peer, connection, head)
            self._lose(peer, lane, "ended")
        except CutOffError as error:
            self._lose(peer, lane, f"ended in the middle of a message of lane {lane}, {error}")
        except DamagedHeadError as error:
            self._failure.note(Failure(peer.rank, f"{peer} sent a message of lane {lane} that cannot be read: {error}"))
        except BaseException as error:
            if not self._is_closing:
                self._failure.note(Failure(self.ranks.rank, f"{type(error).__name__}: {error}", error))
                self._tell_failure()

    def _handle(self, peer: Peer, connection: Connection, head: Head) -> None:
        reader = PayloadReader(head.payload_bytes, connection.receive_into) if head.payload_bytes else None
        if head.kind == Kind.HELLO:
            self._greet(peer, head.numbers, reader)
        elif head.kind == Kind.FAILED:
            assert reader is not None
            (origin, is_its_own), text = head.numbers, reader.bytes().decode()
            self._failure.note(Failure(origin, f"{peer} failed: {text}" if is_its_own else text))
        else:
            self._handlers.handle(peer.rank, head, reader)
        if reader is not None:
            reader.drop()

    def _greet(self, peer: Peer, numbers: tuple[int, ...], reader: PayloadReader | None) -> None:
        rank, num_ranks, pid = numbers
        if (rank, num_ranks) != (peer.rank, self.ranks.num_ranks):
            text = f"where {peer} was to answer, rank {rank} of {num_ranks} did; this is one of {self.ranks.num_ranks}"
            self._failure.note(Failure(peer.rank, text))
        if reader is not None:
            peer.pid, peer.host = pid, reader.bytes().decode()

    def _lose(self, peer: Peer, lane: Lane, how: str) -> None:
        """A connection ended without a farewell. The control lane ends with all others, and knows best why."""
        if self._is_closing or self._failure.was_told:
            return
        if lane is not Lane.CONTROL:
            self._await_verdict(peer, lane)
        self._failure.note(Failure(peer.rank, f"{peer} {how}"))

    def _await_verdict(self, peer: Peer, lane: Lane) -> None:
        """Give the thread of a connection that is broken time to say why."""
        until_s = time.monotonic() + _VERDICT_S
        with self.lock:
            while not (self._failure.is_known or peer.has_left or self._is_closing) and time.monotonic() < until_s:
                self.changed.wait(until_s - time.monotonic())
        if not self._failure.is_known and not peer.has_left:
            self._failure.note(Failure(peer.rank, f"{peer} broke off lane {lane}"))

    # Failures

    def _tell_failure(self) -> None:
        """If there is one, tell the others, once."""
        failure = self._failure.to_be_told()
        if failure is None:
            return
        is_its_own = failure.error is not None and not isinstance(failure.error, RankFailedError)
        payload = failure.text[:_MAX_TEXT_CHARS].encode()
        for peer in self._peers.values():
            peer.connections[Lane.CONTROL].post(Kind.FAILED, (failure.rank, is_its_own), payload)

    def _raise_left(self, peer: Peer, what: str) -> NoReturn:
        text = f"{peer} had ended its run while rank {self.ranks.rank} waited for {what}"
        raise RankFailedError(text, peer.rank)

    def _raise_silent(self, silent: Collection[Peer], what: str) -> NoReturn:
        names = " and ".join(str(peer) for peer in silent)
        raise RankTimeoutError(
            f"{names} said nothing for {self.timeout_s:g} s while rank {self.ranks.rank} waited for {what}; see what "
            "it does there (py-spy dump), or allow more time",
            next(iter(silent)).rank,
        )

    def _refuse_in_child(self) -> None:
        if not self._owner.is_here:
            raise RuntimeError("this is a forked child of the process that trains; use the model in that one")

    def _sum_by_lane(self, number: Callable[[Connection], int]) -> dict[Lane, int]:
        return {lane: sum(number(peer.connections[lane]) for peer in self._peers.values()) for lane in Lane}

"""Connections, which send and receive the messages of one channel over a socket to one other rank, and message
handlers.

Sending a small message never waits. If the socket does not accept all bytes at once, a thread sends the rest later. So
a handler may answer on the receiving thread, and two ranks whose sockets are full still read. A tensor is sent from its
own memory, so its sender waits until the socket has accepted all its bytes."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import select
import socket
import struct
import termios
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from hf_lohan.ranks.transport.messages import HEAD_BYTES, Channel, DamagedHeadError, Head, PayloadReader
from hf_lohan.threads import close_object_in_children

SLICE_S = 0.25
"""Seconds between two checks of a wait for failures, signals and timeouts."""
_VIEWS_AT_ONCE = 16


class Socket(Protocol):
    """The part of `socket.socket` that a connection uses."""

    def fileno(self) -> int: ...

    def sendmsg(
        self, buffers: Sequence[memoryview], ancillary: Sequence[tuple[int, int, bytes]], flags: int, /
    ) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class ConnectionBrokenError(ConnectionError):
    """The connection can send nothing more. The receiving thread knows why."""


class CutOffError(ConnectionError):
    """The other end closed in the middle of a message."""


class Connection:
    """A connection to one rank. Any thread may send, and one thread receives."""

    def __init__(self, sock: Socket, channel: Channel) -> None:
        self.channel = channel
        self.sent_bytes = 0
        """Bytes of payloads. Heads are not counted here or in `received_bytes`."""
        self.num_sent = 0
        self.received_bytes = 0
        self.num_received = 0
        self.last_heard_s = time.monotonic()
        self.last_accepted_s = self.last_heard_s
        """Time at which the socket last accepted bytes to send."""
        self._socket = sock
        close_object_in_children(sock)
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._queued_bytes = 0
        """Bytes of all heads and payloads that were ever queued."""
        self._accepted_bytes = 0
        """The part of `_queued_bytes` that the socket has accepted."""
        self._is_broken = False
        self._flusher: threading.Thread | None = None

    def post(self, kind: int, numbers: tuple[int, ...], payload: bytes = b"") -> None:
        """Send a message without waiting. Does nothing on a broken connection."""
        with self._lock:
            if self._is_broken:
                return
            self._enqueue(kind, numbers, memoryview(payload))
            self._flush()
            if self._outgoing and self._flusher is None:
                self._flusher = threading.Thread(target=self._flush_all, name="lohan-rank-flush", daemon=True)
                self._flusher.start()

    def send(
        self, kind: int, numbers: tuple[int, ...], payload: memoryview, refuse_to_wait: Callable[[], object]
    ) -> None:
        """Send a message and wait until its payload may be changed. `refuse_to_wait` is called regularly, and raises to
        end the wait. Raises ConnectionBrokenError."""
        with self._lock:
            self._enqueue(kind, numbers, payload)
            end = self._queued_bytes
            self._flush()
        try:
            while self._accepted_bytes < end and not self._is_broken:
                self._wait_until_writable()
                refuse_to_wait()
                with self._lock:
                    self._flush()
        except BaseException:
            self.cut()  # a part of the message may have been sent, and its memory may change
            raise
        if self._is_broken:
            raise ConnectionBrokenError(f"the connection of channel {self.channel} is broken")

    def receive(self) -> Head | None:
        """Return the next head; None if the other end has closed. Read the payload before the next call."""
        packed = bytearray(HEAD_BYTES)
        num_bytes = self._receive(memoryview(packed))
        if num_bytes == 0:
            return None
        if num_bytes < HEAD_BYTES:
            raise CutOffError(f"after {num_bytes} of the {HEAD_BYTES} bytes of a head")
        head = Head.unpack(packed)
        if head.channel != self.channel or head.sequence_number != self.num_received:
            raise DamagedHeadError(
                f"message {head.sequence_number} of channel {head.channel} came instead of message "
                f"{self.num_received} of channel {self.channel}"
            )
        self.num_received += 1
        self.received_bytes += head.payload_bytes
        return head

    def receive_into(self, view: memoryview) -> None:
        """Fill ``view`` with the next bytes of a payload. Raises CutOffError."""
        num_bytes = self._receive(view)
        if num_bytes < len(view):
            raise CutOffError(f"after {num_bytes} of {len(view)} bytes of a payload")

    def wait_until_sent(self, until_s: float) -> None:
        """Wait until the other system has received all bytes, or until ``until_s`` (`time.monotonic`)."""
        while not self._is_broken and time.monotonic() < until_s and (self._outgoing or self._bytes_in_flight()):
            time.sleep(0.002)

    def cut(self) -> None:
        """End sending and receiving, and wake the threads that wait."""
        self._is_broken = True
        with contextlib.suppress(OSError):  # the other end closed first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Call this after no thread receives any more."""
        self.cut()
        flusher = self._flusher
        if flusher is not None:
            flusher.join()
        with self._lock:
            self._outgoing.clear()
            self._socket.close()

    def _enqueue(self, kind: int, numbers: tuple[int, ...], payload: memoryview) -> None:
        head = Head(kind, self.channel, self.num_sent, numbers, len(payload)).pack()
        self._outgoing.append(memoryview(head))
        if len(payload):
            self._outgoing.append(payload)
        self.num_sent += 1
        self.sent_bytes += len(payload)
        self._queued_bytes += len(head) + len(payload)

    def _flush(self) -> None:
        """Send the bytes that the socket accepts now."""
        while self._outgoing and not self._is_broken:
            views = list(itertools.islice(self._outgoing, _VIEWS_AT_ONCE))
            try:
                num_bytes = self._socket.sendmsg(views, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # the other end is gone, but its last messages can still be read
                self._is_broken = True
                self._outgoing.clear()
                return
            self._accepted_bytes += num_bytes
            self.last_accepted_s = time.monotonic()
            while num_bytes:
                view = self._outgoing.popleft()
                if num_bytes < len(view):
                    self._outgoing.appendleft(view[num_bytes:])
                num_bytes -= min(num_bytes, len(view))

    def _flush_all(self) -> None:
        while True:
            self._wait_until_writable()
            with self._lock:
                self._flush()
                if not self._outgoing or self._is_broken:
                    self._flusher = None
                    return

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        with contextlib.suppress(ValueError, OSError):  # closed meanwhile
            poll.register(self._socket.fileno(), select.POLLOUT)
            poll.poll(SLICE_S * 1e3)

    def _receive(self, view: memoryview) -> int:
        """Fill `view`. Returns the number of received bytes, which is smaller than the view only if the other end has
        closed."""
        num_bytes = 0
        while num_bytes < len(view):
            try:
                num_received = self._socket.recv_into(view[num_bytes:])
            except OSError:  # reset, because the other end closed before it read all our messages
                num_received = 0
            if num_received == 0:
                break
            num_bytes += num_received
            self.last_heard_s = time.monotonic()
        return num_bytes

    def _bytes_in_flight(self) -> int:
        """Return the bytes that the other system (or the other process on this machine) has not received; 0 if it is
        gone."""
        poll = select.poll()
        poll.register(self._socket.fileno(), 0)
        if poll.poll(0):
            return 0
        try:
            packed = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", packed)[0])


Handler = Callable[[int, tuple[int, ...], PayloadReader | None], object]
"""A function that is called with (peer, numbers, payload) on the receiving thread. On `Channel.CONTROL` it must not
wait."""


class MessageHandlers:
    """The handlers, one for each kind of message. Messages may arrive before their handler is set."""

    def __init__(self, changed: threading.Condition, lock: threading.RLock, is_over: Callable[[], bool]) -> None:
        """`lock`: the lock of `changed`. `is_over`: whether messages are no longer handled."""
        self._changed = changed
        self._lock = lock
        self._is_over = is_over
        self._by_kind: dict[int, Handler] = {}
        self._parked: dict[int, deque[tuple[int, tuple[int, ...], bytes]]] = {}
        """Messages of the control channel that arrived before their handler was set."""

    def set_handler(self, kind: int, handler: Handler) -> None:
        while True:
            with self._lock:
                parked = self._parked.get(kind)
                if not parked:
                    self._by_kind[kind] = handler
                    self._changed.notify_all()
                    return
                peer, numbers, payload = parked.popleft()
            handler(peer, numbers, _reader_of_bytes(payload))

    def remove_handler(self, kind: int) -> None:
        with self._lock:
            self._by_kind.pop(kind, None)

    def handle_message(self, peer: int, head: Head, reader: PayloadReader | None) -> None:
        """Call the handler of a message. Without a handler, a message of the control channel is stored, and any other
        channel waits for a handler."""
        with self._lock:
            if head.channel is Channel.CONTROL and head.kind not in self._by_kind:
                message = (peer, head.numbers, reader.bytes() if reader is not None else b"")
                self._parked.setdefault(head.kind, deque()).append(message)
                return
            while head.kind not in self._by_kind:
                if self._is_over():
                    return
                self._changed.wait(SLICE_S)
            handler = self._by_kind[head.kind]
        handler(peer, head.numbers, reader)


def _reader_of_bytes(payload: bytes) -> PayloadReader | None:
    """Return a reader of a payload that was already received."""
    if not payload:
        return None
    rest = memoryview(payload)

    def receive_into(view: memoryview) -> None:
        nonlocal rest
        view[:] = rest[: len(view)]
        rest = rest[len(view) :]

    return PayloadReader(len(payload), receive_into)

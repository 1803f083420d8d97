"""One socket to one other rank, for one lane: whole messages out, and what arrives.

Small messages are never waited for: what the socket does not take at once a thread sends later. So a handler may
answer on the thread that receives, and two ranks whose sockets are full still read. Payloads in tensors are sent from
where they lie, so whoever sends one waits until the socket has taken all of it.
"""

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

from hf_lohan.ranks.messages import HEAD_BYTES, DamagedHeadError, Head, Lane
from hf_lohan.threads import close_object_in_children

SLICE_S = 0.25
"""How long a wait lasts before it looks around: for failures, signals and the time."""
_VIEWS_AT_ONCE = 16


class Socket(Protocol):
    """What is used of a `socket.socket`."""

    def fileno(self) -> int: ...

    def sendmsg(
        self, buffers: Sequence[memoryview], ancillary: Sequence[tuple[int, int, bytes]], flags: int, /
    ) -> int: ...

    def recv_into(self, buffer: memoryview, /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class ConnectionBrokenError(ConnectionError):
    """Nothing more can be sent here. Why is for the thread to say that receives."""


class CutOffError(ConnectionError):
    """The other end went away in the middle of a message."""


class Connection:
    """Sends from any thread, receives on one."""

    def __init__(self, sock: Socket, lane: Lane) -> None:
        self.lane = lane
        self.sent_bytes = 0
        """Of payloads."""
        self.num_sent = 0
        self.received_bytes = 0
        self.num_received = 0
        self.last_heard_s = time.monotonic()
        self.last_taken_s = self.last_heard_s
        """When the socket last took something."""
        self._socket = sock
        close_object_in_children(sock)
        self._lock = threading.Lock()
        self._outgoing: deque[memoryview] = deque()
        self._num_put = 0
        """Bytes, heads and payloads."""
        self._num_taken = 0
        """Bytes that the socket took."""
        self._is_broken = False
        self._flusher: threading.Thread | None = None

    def post(self, kind: int, numbers: tuple[int, ...], payload: bytes = b"") -> None:
        """Send a message without waiting. On a broken connection nothing happens."""
        with self._lock:
            if self._is_broken:
                return
            self._put(kind, numbers, memoryview(payload))
            self._flush()
            if self._outgoing and self._flusher is None:
                self._flusher = threading.Thread(target=self._flush_all, name="lohan-rank-flush", daemon=True)
                self._flusher.start()

    def send(
        self, kind: int, numbers: tuple[int, ...], payload: memoryview, refuse_to_wait: Callable[[], object]
    ) -> None:
        """Send a message and wait until its payload may be changed. `refuse_to_wait` is called now and then, and ends
        the wait by raising. Raises ConnectionBrokenError."""
        with self._lock:
            self._put(kind, numbers, payload)
            until = self._num_put
            self._flush()
        try:
            while self._num_taken < until and not self._is_broken:
                self._wait_until_writable()
                refuse_to_wait()
                with self._lock:
                    self._flush()
        except BaseException:
            self.cut()  # half a message may have been sent, and its memory is not to be relied on any more
            raise
        if self._is_broken:
            raise ConnectionBrokenError(f"the connection of lane {self.lane} is broken")

    def receive(self) -> Head | None:
        """The next head; None where the other end has closed. The payload is to be read before the next call."""
        packed = bytearray(HEAD_BYTES)
        num_bytes = self._receive(memoryview(packed))
        if num_bytes == 0:
            return None
        if num_bytes < HEAD_BYTES:
            raise CutOffError(f"after {num_bytes} of the {HEAD_BYTES} bytes of a head")
        head = Head.unpack(packed)
        if head.lane != self.lane or head.sequence_number != self.num_received:
            raise DamagedHeadError(
                f"message {head.sequence_number} of lane {head.lane} came where number {self.num_received} of lane "
                f"{self.lane} was to come"
            )
        self.num_received += 1
        self.received_bytes += head.payload_bytes
        return head

    def receive_into(self, view: memoryview) -> None:
        """The next bytes of a payload. Raises CutOffError."""
        num_bytes = self._receive(view)
        if num_bytes < len(view):
            raise CutOffError(f"after {num_bytes} of {len(view)} bytes of a payload")

    def wait_until_sent(self, until_s: float) -> None:
        """Wait, but not beyond a time of `time.monotonic`, until the other end's system has all that was sent."""
        while not self._is_broken and time.monotonic() < until_s and (self._outgoing or self._num_under_way()):
            time.sleep(0.002)

    def cut(self) -> None:
        """Nothing is sent or received any more. Wakes who waits for either."""
        self._is_broken = True
        with contextlib.suppress(OSError):  # the other end was first
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """To be called when nobody receives any more."""
        self.cut()
        flusher = self._flusher
        if flusher is not None:
            flusher.join()
        with self._lock:
            self._outgoing.clear()
            self._socket.close()

    def _put(self, kind: int, numbers: tuple[int, ...], payload: memoryview) -> None:
        head = Head(kind, self.lane, self.num_sent, numbers, len(payload)).pack()
        self._outgoing.append(memoryview(head))
        if len(payload):
            self._outgoing.append(payload)
        self.num_sent += 1
        self.sent_bytes += len(payload)
        self._num_put += len(head) + len(payload)

    def _flush(self) -> None:
        """Give the socket what it takes now."""
        while self._outgoing and not self._is_broken:
            views = list(itertools.islice(self._outgoing, _VIEWS_AT_ONCE))
            try:
                num_bytes = self._socket.sendmsg(views, [], socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:  # the other end is gone; what it last said has still to be read
                self._is_broken = True
                self._outgoing.clear()
                return
            self._num_taken += num_bytes
            self.last_taken_s = time.monotonic()
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
        """How many bytes of `view` came: less than all only where the other end has closed."""
        num_bytes = 0
        while num_bytes < len(view):
            try:
                came = self._socket.recv_into(view[num_bytes:])
            except OSError:  # reset: it ended with something of ours unread
                came = 0
            if came == 0:
                break
            num_bytes += came
            self.last_heard_s = time.monotonic()
        return num_bytes

    def _num_under_way(self) -> int:
        """Bytes that the other end's system, or on one machine the other end, has not taken; 0 if it is gone."""
        poll = select.poll()
        poll.register(self._socket.fileno(), 0)
        if poll.poll(0):
            return 0
        try:
            packed = fcntl.ioctl(self._socket.fileno(), termios.TIOCOUTQ, bytes(4))
        except OSError:
            return 0
        return int(struct.unpack("i", packed)[0])

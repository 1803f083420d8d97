"""Who is called for which message, also for those that come before anybody said so."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable

from hf_lohan.ranks.connection import SLICE_S
from hf_lohan.ranks.messages import Head, Lane, PayloadReader

Handler = Callable[[int, tuple[int, ...], PayloadReader | None], object]
"""Of (peer, numbers, payload). Runs on the thread that receives. On `Lane.CONTROL` it must not wait for anything."""


class Handlers:
    """One for each kind of message."""

    def __init__(self, changed: threading.Condition, lock: threading.RLock, is_over: Callable[[], bool]) -> None:
        """`lock` is that of `changed`; `is_over` says whether nothing is handled any more."""
        self._changed = changed
        self._lock = lock
        self._is_over = is_over
        self._by_kind: dict[int, Handler] = {}
        self._parked: dict[int, deque[tuple[int, tuple[int, ...], bytes]]] = {}
        """Messages of the control lane that came before their handler."""

    def set(self, kind: int, handler: Handler) -> None:
        while True:
            with self._lock:
                parked = self._parked.get(kind)
                if not parked:
                    self._by_kind[kind] = handler
                    self._changed.notify_all()
                    return
                peer, numbers, payload = parked.popleft()
            handler(peer, numbers, _reader_of(payload))

    def remove(self, kind: int) -> None:
        with self._lock:
            self._by_kind.pop(kind, None)

    def handle(self, peer: int, head: Head, reader: PayloadReader | None) -> None:
        """Without a handler a message of the control lane is kept for it; in others it waits, and all behind it."""
        with self._lock:
            if head.lane is Lane.CONTROL and head.kind not in self._by_kind:
                message = (peer, head.numbers, reader.bytes() if reader is not None else b"")
                self._parked.setdefault(head.kind, deque()).append(message)
                return
            while head.kind not in self._by_kind:
                if self._is_over():
                    return
                self._changed.wait(SLICE_S)
            handler = self._by_kind[head.kind]
        handler(peer, head.numbers, reader)


def _reader_of(payload: bytes) -> PayloadReader | None:
    """Of one that has come already."""
    if not payload:
        return None
    rest = memoryview(payload)

    def receive_into(view: memoryview) -> None:
        nonlocal rest
        view[:] = rest[: len(view)]
        rest = rest[len(view) :]

    return PayloadReader(len(payload), receive_into)

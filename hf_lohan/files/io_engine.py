"""Asynchronous transfers between aligned memory and data files, within a byte budget.

An `IoEngine` reads and writes pieces with a few threads. An `IoRequest` is one transfer, and `PendingRequests` are the
transfers of a set of files.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from hf_lohan.files.data_file import DataFile, FileBackend, MemorySpan
from hf_lohan.files.directories import SECTOR_BYTES
from hf_lohan.threads import Owner, TaskThreads, raised_anew
from hf_lohan.timeline import SSD_READ, SSD_WRITE, Timeline

logger = logging.getLogger(__name__)

Complete = Callable[[], object]
Verb = Literal["read", "write"]
Need = Literal["urgent", "soon", "any time"]
"""Priority of a piece."""

_MAX_VIEWS = 512
"""Maximum number of buffers in one call, which is half of Linux's IOV_MAX."""


class Content(NamedTuple):
    """A description of the bytes, for the timeline."""

    block: str
    kind: str


ANY_CONTENT = Content("", "bytes")


class Transfer(NamedTuple):
    """A range of bytes in a file, and the pieces of memory for these bytes, in order."""

    file: DataFile
    offset: int
    views: tuple[MemorySpan, ...]

    @property
    def num_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


class IoRequest:
    """One read or write of ``num_bytes``, moved in pieces by the threads of an `IoEngine`."""

    def __init__(
        self,
        num_bytes: int,
        num_pieces: int,
        release: Callable[[int], None],
        complete: Complete | None = None,
        broken: Callable[[BaseException], None] | None = None,
    ) -> None:
        """``complete`` runs after all pieces are transferred and before the request is done, but not for a request
        without pieces. Its exception fails the request. Then ``release`` is called with the number of bytes to return
        to the budget. ``broken`` is called with the exception of a callback."""
        self.num_bytes = num_bytes
        self._num_pending = num_pieces
        self._release = release
        self._complete = complete
        self._broken = broken
        self.error: BaseException | None = None
        """The first error of a piece so far."""
        self._callbacks: list[Callable[[IoRequest], object]] = []
        self._lock = threading.Lock()
        self._finished = threading.Event()
        if num_pieces == 0:
            self._finished.set()

    @classmethod
    def finished(cls) -> IoRequest:
        """Return a request of no bytes, which is done."""
        return cls(0, 0, lambda num_bytes: None)

    def done(self) -> bool:
        """Return whether the request has ended, so that no thread uses its memory."""
        return self._finished.is_set()

    def wait(self) -> None:
        """Wait until the request is done. Every call raises the first `StorageError` of its pieces."""
        self._finished.wait()
        if self.error is not None:
            raise raised_anew(self.error)

    def add_done_callback(self, callback: Callable[[IoRequest], object]) -> None:
        """Call ``callback(request)`` once, on an I/O thread when the request is done, or now if it already is.

        The callback must be short, and must not start requests or wait for them. An exception in it is a bug. It does
        not fail the request, because the bytes were transferred. But another thread may wait for a result of the
        callback, so the engine raises the exception instead of starting more requests.
        """
        with self._lock:
            if not self._finished.is_set():
                self._callbacks.append(callback)
                return
        self._call(callback)

    def fail(self, error: BaseException) -> None:
        """Skip the rest of the request. Only the engine calls this."""
        with self._lock:
            self.error = self.error or error

    def finish_piece(self, error: BaseException | None) -> None:
        """Count one piece as finished, with its error if it failed. Only the engine calls this."""
        with self._lock:
            self.error = self.error or error
            self._num_pending -= 1
            if self._num_pending:
                return
        if self._complete is not None and self.error is None:
            try:
                self._complete()
            except BaseException as caught:  # `wait` raises it
                self.error = caught
        # The budget is released first, because the waiting thread may need it.
        self._release(self.num_bytes)
        with self._lock:
            self._finished.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            self._call(callback)

    def _call(self, callback: Callable[[IoRequest], object]) -> None:
        try:
            callback(self)
        except BaseException as error:
            if self._broken is None:
                raise
            self._broken(error)


class _Piece(NamedTuple):
    """The part of a request that one thread transfers at a time."""

    request: IoRequest
    verb: Verb
    transfer: Transfer
    of: Content


class IoEngine:
    """A few threads that read and write pieces of at most ``piece_bytes``. Urgent reads start first, then other reads,
    then writes.

    Unfinished requests have at most ``max_inflight_bytes``. `read` and `write` block until their request fits. A larger
    request runs alone. Close the engine after the stores that use it.
    """

    def __init__(
        self,
        num_threads: int,
        piece_bytes: int,
        max_inflight_bytes: int,
        backend: FileBackend | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """``timeline`` receives a task for each piece."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}; the engine needs at least 1")
        if piece_bytes < SECTOR_BYTES or piece_bytes % SECTOR_BYTES:
            raise ValueError(f"piece_bytes is {piece_bytes}; choose a positive multiple of {SECTOR_BYTES}")
        if max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes is {max_inflight_bytes}; choose at least one piece")
        self.num_threads = num_threads
        self._backend = backend or FileBackend()
        self._timeline = timeline or Timeline()
        self._piece_bytes = piece_bytes
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        self._moved_bytes = {"read": 0, "write": 0}
        self._queued: dict[Need, deque[_Piece]] = {"urgent": deque(), "soon": deque(), "any time": deque()}
        self._closed = False
        self._failure: BaseException | None = None
        # Guards the five fields above. It is not taken through the condition, because that is Python code, in which an
        # interrupt could prevent the release of the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._owner = Owner()
        self._here = threading.local()
        self._threads = TaskThreads(num_threads, "lohan-io", begin=partial(setattr, self._here, "is_io_thread", True))

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        return self._moved_bytes["read"]

    @property
    def write_bytes(self) -> int:
        """Bytes written so far."""
        return self._moved_bytes["write"]

    def open_file(self, path: str, *, create: bool = False, is_read_only: bool = False) -> DataFile:
        """Open a data file for this engine. ``create`` creates it, and raises if it exists."""
        return DataFile(path, self._backend, create=create, is_read_only=is_read_only)

    def read(
        self,
        transfers: Sequence[Transfer],
        complete: Complete | None = None,
        *,
        of: Content = ANY_CONTENT,
        is_urgent: bool = False,
    ) -> IoRequest:
        """Start a read. The memory must not be used until the request is done. `IoRequest` describes ``complete``.
        ``of`` is the content, for the timeline. An urgent read starts before others."""
        return self._submit("read", "urgent" if is_urgent else "soon", transfers, complete, of)

    def write(
        self, transfers: Sequence[Transfer], complete: Complete | None = None, *, of: Content = ANY_CONTENT
    ) -> IoRequest:
        """Start a write. The memory must not change until the request is done. Arguments are as in `read`."""
        return self._submit("write", "any time", transfers, complete, of)

    def close(self) -> None:
        """Finish all requests and end the threads. Does nothing in a forked child."""
        if not self._owner.is_here:
            return
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._threads.close()
        while any(self._queued.values()):  # requests that were queued when the threads ended
            self._run_next()

    def _submit(
        self, verb: Verb, need: Need, transfers: Sequence[Transfer], complete: Complete | None, of: Content
    ) -> IoRequest:
        if not self._owner.is_here:
            raise RuntimeError("this forked child of the training process has no I/O threads; do I/O in the parent")
        # An I/O thread that waits here would never free the budget that it waits for.
        assert not hasattr(self._here, "is_io_thread"), "a done-callback must not start requests"
        pieces = _pieces(transfers, self._piece_bytes)
        num_bytes = sum(piece.num_bytes for piece in pieces)
        request = IoRequest(num_bytes, len(pieces), self._release, complete, self._break)
        to_queue = [_Piece(request, verb, piece, of) for piece in pieces]
        with self._lock:
            while not (self._closed or self._failure or self._has_room(request.num_bytes)):
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the I/O engine is closed; open the store again")
            if self._failure is not None:
                raise RuntimeError(f"a callback of the I/O engine failed: {self._failure!r}") from self._failure
            self._inflight_bytes += request.num_bytes
            self._queued[need].extend(to_queue)
        num_submitted = 0
        try:
            for _ in pieces:
                self._threads.submit(self._run_next)
                num_submitted += 1
        except BaseException as interrupt:
            request.fail(interrupt)
            for _ in pieces[num_submitted:]:
                self._run_next()  # one call for each piece, although a call may run another request's piece
            with suppress(BaseException):  # running pieces still use the caller's memory
                request.wait()
            raise
        return request

    def _run_next(self) -> None:
        with self._lock:
            queued = next(filter(None, self._queued.values()), None)
            if queued is None:  # an interrupt came between a submit and its count
                return
            piece = queued.popleft()
        error: BaseException | None = None
        try:
            if piece.request.error is None:  # the rest of a failed request is skipped
                self._move(piece)
        except BaseException as caught:  # the request's `wait` raises it
            error = caught
        piece.request.finish_piece(error)

    def _move(self, piece: _Piece) -> None:
        transfer, of = piece.transfer, piece.of
        move, lane = (transfer.file.read, SSD_READ) if piece.verb == "read" else (transfer.file.write, SSD_WRITE)
        with self._timeline.task(lane, of.kind, block=of.block, num_bytes=transfer.num_bytes):
            move(transfer.offset, transfer.views)
        with self._lock:
            self._moved_bytes[piece.verb] += transfer.num_bytes

    def _has_room(self, num_bytes: int) -> bool:
        return self._inflight_bytes == 0 or self._inflight_bytes + num_bytes <= self._max_inflight_bytes

    def _break(self, error: BaseException) -> None:
        logger.error("a callback of an I/O request failed", exc_info=error)
        with self._lock:
            self._failure = self._failure or error
            self._changed.notify_all()

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._inflight_bytes -= num_bytes
            self._changed.notify_all()


class PendingRequests:
    """Requests that are not done yet."""

    def __init__(self) -> None:
        self._requests: set[IoRequest] = set()
        self._lock = threading.Lock()

    def add(self, request: IoRequest) -> IoRequest:
        """Add a request and return it."""
        with self._lock:
            self._requests.add(request)
        request.add_done_callback(self._forget)
        return request

    def wait(self) -> None:
        """Wait for all requests added so far. Raises the error of a request that fails during this call. Errors of
        earlier requests are raised in the threads that wait for these requests."""
        for request in self._snapshot():
            request.wait()

    def wait_ignoring_errors(self) -> None:
        """Same as `wait`, but raise no errors. `IoRequest.wait` raises them."""
        for request in self._snapshot():
            with suppress(Exception):
                request.wait()

    def _snapshot(self) -> list[IoRequest]:
        with self._lock:
            return list(self._requests)

    def _forget(self, request: IoRequest) -> None:
        with self._lock:
            self._requests.discard(request)


def _pieces(transfers: Sequence[Transfer], piece_bytes: int) -> list[Transfer]:
    """Cut all transfers into pieces, in an order that keeps every file busy until all end together."""
    placed: list[tuple[float, Transfer]] = []
    for transfer in transfers:
        for piece in _cut(transfer, piece_bytes):
            placed.append(((piece.offset - transfer.offset) / transfer.num_bytes, piece))
    return [piece for _, piece in sorted(placed, key=lambda entry: entry[0])]


def _cut(transfer: Transfer, piece_bytes: int) -> Iterator[Transfer]:
    if 0 < transfer.num_bytes <= piece_bytes and len(transfer.views) <= _MAX_VIEWS:
        yield transfer
        return
    offset, views, room_bytes = transfer.offset, list[MemorySpan](), piece_bytes
    for view in transfer.views:
        while view.nbytes:
            views.append(view[:room_bytes])
            room_bytes -= views[-1].nbytes
            view = view[views[-1].nbytes :]
            if room_bytes == 0 or len(views) == _MAX_VIEWS:
                yield Transfer(transfer.file, offset, tuple(views))
                offset, views, room_bytes = offset + piece_bytes - room_bytes, [], piece_bytes
    if views:
        yield Transfer(transfer.file, offset, tuple(views))

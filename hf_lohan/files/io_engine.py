"""Asynchronous transfers between aligned host memory and data files, within a byte budget."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Literal, NamedTuple

from hf_lohan.files.buffers import SECTOR_BYTES
from hf_lohan.files.data_file import DataFile, FileBackend, PosixBackend
from hf_lohan.files.request import IoRequest
from hf_lohan.threads import TaskThreads
from hf_lohan.timeline import SSD_READ, SSD_WRITE, Timeline

Complete = Callable[[], object]
Verb = Literal["read", "write"]
Need = Literal["urgent", "soon", "any time"]
"""When somebody waits for a piece: what is needed first is moved first."""

_MAX_VIEWS = 512
"""Buffers in one call: half of Linux's IOV_MAX."""


class Content(NamedTuple):
    """What bytes are."""

    block: str
    kind: str


ANY_CONTENT = Content("", "bytes")


class Transfer(NamedTuple):
    """One run of bytes in a file and the places in memory, in order, that hold them."""

    file: DataFile
    offset: int
    views: tuple[memoryview, ...]

    @property
    def num_bytes(self) -> int:
        return sum(view.nbytes for view in self.views)


class _Piece(NamedTuple):
    """A part of a request: what one thread moves at a time."""

    request: IoRequest
    verb: Verb
    transfer: Transfer
    of: Content


class IoEngine:
    """A few threads that read and write pieces of at most ``piece_bytes``: urgent reads first, then the others, and
    what is to be written when no read is left to start.

    At most ``max_inflight_bytes`` of unfinished requests exist at a time: `read` and `write` block until
    theirs fits; one that is bigger than the bound goes alone. Close the engine after the stores that use it.
    """

    def __init__(
        self,
        num_threads: int,
        piece_bytes: int,
        max_inflight_bytes: int,
        backend: FileBackend | None = None,
        timeline: Timeline | None = None,
    ) -> None:
        """``timeline``: where each piece is noted."""
        if num_threads < 1:
            raise ValueError(f"num_threads is {num_threads}: the engine needs at least 1")
        if piece_bytes < SECTOR_BYTES or piece_bytes % SECTOR_BYTES:
            raise ValueError(f"piece_bytes is {piece_bytes}: choose a positive multiple of {SECTOR_BYTES}")
        if max_inflight_bytes < 1:
            raise ValueError(f"max_inflight_bytes is {max_inflight_bytes}: choose at least one piece")
        self.num_threads = num_threads
        self._backend = backend or PosixBackend()
        self._timeline = timeline or Timeline()
        self._piece_bytes = piece_bytes
        self._max_inflight_bytes = max_inflight_bytes
        self._inflight_bytes = 0
        self._moved_bytes = {"read": 0, "write": 0}
        self._queued: dict[Need, deque[_Piece]] = {"urgent": deque(), "soon": deque(), "any time": deque()}
        self._closed = False
        # Guards the four above. It is entered itself, not through the condition: that is Python code, in which an
        # interrupt may come before the lock is let go, and then nobody ever gets it again.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._here = threading.local()
        self._threads = TaskThreads(num_threads, "lohan-io", begin=partial(setattr, self._here, "is_io_thread", True))

    @property
    def read_bytes(self) -> int:
        """Bytes read so far."""
        with self._lock:
            return self._moved_bytes["read"]

    @property
    def write_bytes(self) -> int:
        """Bytes written so far."""
        with self._lock:
            return self._moved_bytes["write"]

    @property
    def inflight_bytes(self) -> int:
        """Cost of the requests that are not finished."""
        with self._lock:
            return self._inflight_bytes

    def open_file(self, path: str, *, create: bool = False) -> DataFile:
        """Open a data file for this engine; ``create`` makes it and raises if it exists."""
        return DataFile(path, self._backend, create=create)

    def read(
        self,
        transfers: Sequence[Transfer],
        complete: Complete | None = None,
        *,
        of: Content = ANY_CONTENT,
        is_urgent: bool = False,
    ) -> IoRequest:
        """Start to read; the memory must stay untouched until the request is done. ``complete``: see `IoRequest`;
        ``of``: what it is, for the timeline; ``is_urgent``: it goes before reads that are not."""
        return self._submit("read", "urgent" if is_urgent else "soon", transfers, complete, of)

    def write(
        self, transfers: Sequence[Transfer], complete: Complete | None = None, *, of: Content = ANY_CONTENT
    ) -> IoRequest:
        """Start to write; the memory must stay unchanged until the request is done. ``complete``: see `IoRequest`;
        ``of``: what it is, for the timeline."""
        return self._submit("write", "any time", transfers, complete, of)

    def close(self) -> None:
        """Finish what is in flight and end the threads."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
        self._threads.close()
        while any(self._queued.values()):  # queued before it was closed, and put to the threads after their end
            self._run_next()

    def _submit(
        self, verb: Verb, need: Need, transfers: Sequence[Transfer], complete: Complete | None, of: Content
    ) -> IoRequest:
        # A thread that waits here for room would be missing where the room is made.
        assert not hasattr(self._here, "is_io_thread"), "a done-callback must not start requests"
        pieces = _pieces(transfers, self._piece_bytes)
        request = IoRequest(sum(piece.num_bytes for piece in pieces), len(pieces), self._release, complete)
        to_queue = [_Piece(request, verb, piece, of) for piece in pieces]
        with self._lock:
            while not (self._closed or self._has_room(request.num_bytes)):
                self._changed.wait()
            if self._closed:
                raise RuntimeError("the I/O engine is closed: no request can start")
            self._inflight_bytes += request.num_bytes
            self._queued[need].extend(to_queue)
        num_submitted = 0
        try:
            for _ in pieces:
                self._threads.put(self._run_next)
                num_submitted += 1
        except BaseException as interrupt:
            request.fail(interrupt)
            for _ in pieces[num_submitted:]:
                self._run_next()  # there are as many calls of it as pieces, whoever takes which
            with suppress(BaseException):  # nobody else can: what is under way uses the caller's memory
                request.wait()
            raise
        return request

    def _run_next(self) -> None:
        with self._lock:
            queued = next(filter(None, self._queued.values()), None)
            if queued is None:  # an interrupt came when a thread had been told already, but before that was counted
                return
            piece = queued.popleft()
        error: BaseException | None = None
        try:
            if not piece.request.failed:  # else the rest of it is not worth the disk's time
                self._move(piece)
        except BaseException as caught:  # whatever it is, it belongs to whoever waits
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

    def _release(self, num_bytes: int) -> None:
        with self._lock:
            self._inflight_bytes -= num_bytes
            self._changed.notify_all()


def _pieces(transfers: Sequence[Transfer], piece_bytes: int) -> list[Transfer]:
    """All transfers cut up, in an order that keeps every file busy until all end together."""
    placed: list[tuple[float, Transfer]] = []
    for transfer in transfers:
        for piece in _cut(transfer, piece_bytes):
            placed.append(((piece.offset - transfer.offset) / transfer.num_bytes, piece))
    return [piece for _, piece in sorted(placed, key=lambda entry: entry[0])]


def _cut(transfer: Transfer, piece_bytes: int) -> Iterator[Transfer]:
    if 0 < transfer.num_bytes <= piece_bytes and len(transfer.views) <= _MAX_VIEWS:
        yield transfer
        return
    offset, views, room_bytes = transfer.offset, list[memoryview](), piece_bytes
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

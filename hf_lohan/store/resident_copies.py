"""Copies of records in RAM. A copy equals the bytes on the drives, or is newer than these until the next commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from threading import Lock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_lohan.files import IoRequest

NumChanges = npt.NDArray[np.uint32]


class ResidentCopy:
    """A record's copy in RAM. It holds a granule if it has the granule's newest bytes. These may be on the drive, being
    written, or due for the next commit.

    `Versions` knows which granules exist only in RAM. All others may be forgotten at any time. `drop_drafts` forgets
    all bytes that were written after the last commit, and the next read fetches and verifies the committed bytes.
    Ranges are bytes of the record. They begin and end at granules, or end with the record, unless stated otherwise.
    Thread-safe. No lock is held during a wait.
    """

    def __init__(self, memory: Tensor, granule_bytes: int) -> None:
        """`memory` is an empty uint8 tensor [bytes of the record]."""
        self._memory = memory
        self._granule_bytes = granule_bytes
        num_granules = -(-memory.numel() // granule_bytes)
        self._is_held = np.zeros(num_granules, bool)
        self._is_draft = np.ones(num_granules, bool)
        """Granules that may have been written after the last commit. Dropping drafts changes these."""
        self._num_changes: NumChanges = np.zeros(num_granules, np.uint32)
        self._writes: list[tuple[slice, IoRequest]] = []
        self._lock = Lock()

    def try_read(self, start: int, out: Tensor) -> bool:
        """Fill `out` (uint8, any range) if all granules that it touches are held. Returns whether `out` was filled."""
        part = self._granules(start, out)
        with self._lock:
            self._forget_failed_writes()
            if not self._is_held[part].all():
                return False
            out.copy_(self._memory[start : start + out.numel()])
        return True

    def store(self, start: int, source: Tensor) -> None:
        """Copy bytes that will be written to the store, or that stay only here. If they will be written, call
        `track_write` or `forget` next. ``source`` may be borrowed memory."""
        part = self._granules(start, source)
        with self._lock:
            self._forget_failed_writes()
            self._change(part)
            self._is_held[part] = False  # an interrupt may leave the part half copied
            memory = self._memory[start : start + source.numel()]
            if memory.data_ptr() != source.data_ptr():
                memory.copy_(source)
            self._is_held[part] = True

    def borrow(self, start: int, num_bytes: int) -> Tensor | None:
        """Return the memory of the range, to be changed in place and then passed to `store`; None if a part of it is
        not held. Until `store` the range is not held."""
        memory = self._memory[start : start + num_bytes]
        part = self._granules(start, memory)
        with self._lock:
            self._forget_failed_writes()
            if not self._is_held[part].all():
                return None
            self._change(part)
            self._is_held[part] = False
        return memory

    def held(self, start: int, num_bytes: int) -> Tensor | None:
        """Return the read-only memory of the range; None if a part of it is not held."""
        memory = self._memory[start : start + num_bytes]
        with self._lock:
            return memory if self._is_held[self._granules(start, memory)].all() else None

    def track_write(self, start: int, source: Tensor, request: IoRequest) -> None:
        """Watch the request that writes stored bytes to the drive. If it fails, the bytes are no longer held."""
        with self._lock:
            self._writes.append((self._granules(start, source), request))

    def forget(self, start: int, source: Tensor) -> None:
        """Forget the granules that this range (any) touches, because the drive may have other bytes."""
        part = self._granules(start, source)
        with self._lock:
            self._change(part)
            self._is_held[part] = False

    def wait_for_writes(self, start: int, out: Tensor) -> None:
        """Wait for writes of the granules that this range (any) touches."""
        part = self._granules(start, out)
        with self._lock:
            writes = [request for written, request in self._writes if _overlap(written, part)]
        for request in writes:
            with contextlib.suppress(Exception):  # the writer sees the error
                request.wait()

    def filler(self, start: int, out: Tensor) -> Callable[[int, int], None]:
        """Return a function that copies granules [first, stop) of ``out`` after they are read and verified. It leaves
        out granules that have changed since `filler` was called. Call `filler` before the read begins."""
        part = self._granules(start, out)
        with self._lock:
            before = self._num_changes[part].copy()

        def fill(first: int, stop: int) -> None:
            low, high = first * self._granule_bytes, min(stop * self._granule_bytes, out.numel())
            granules = slice(part.start + first, part.start + stop)
            with self._lock:
                if np.array_equal(self._num_changes[granules], before[first:stop]):
                    self._memory[start + low : start + high].copy_(out[low:high])
                    self._is_held[granules] = True

        return fill

    def commit(self) -> None:
        """Record that all bytes written so far are committed."""
        with self._lock:
            self._is_draft[:] = False

    def drop_drafts(self) -> None:
        """Forget all bytes that were written after the last commit. No request may be in progress."""
        with self._lock:
            self._is_held &= ~self._is_draft
            self._is_draft[:] = False
            self._num_changes += 1
            self._writes.clear()

    def clear(self) -> None:
        """Forget all bytes, because the store's records were cleared. New bytes are drafts."""
        with self._lock:
            self._is_held[:] = False
            self._is_draft[:] = True
            self._num_changes += 1
            self._writes.clear()

    def _change(self, part: slice) -> None:
        self._is_draft[part] = True
        self._num_changes[part] += 1

    def _forget_failed_writes(self) -> None:
        in_progress = []
        for part, request in self._writes:
            if not request.done():
                in_progress.append((part, request))
            elif request.error is not None:
                self._is_held[part] = False
        self._writes = in_progress

    def _granules(self, start: int, tensor: Tensor) -> slice:
        assert 0 <= start <= start + tensor.numel() <= self._memory.numel(), "the range leaves its record"
        return slice(start // self._granule_bytes, -(-(start + tensor.numel()) // self._granule_bytes))


def _overlap(left: slice, right: slice) -> bool:
    return bool(left.start < right.stop and right.start < left.stop)

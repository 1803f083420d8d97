"""One record's bytes in RAM, and which of them may be used instead of the store's."""

from __future__ import annotations

import contextlib
from threading import Lock
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_lohan.files import IoRequest

NumChanges = npt.NDArray[np.uint32]


class Stamp(NamedTuple):
    """How often granules from `first` on had changed when a read of them began."""

    first: int
    num_changes: NumChanges


class ResidentCopy:
    """Holds a granule if its bytes here are the newest: those that the store has, or has under way.

    The store stays the authority. Nothing here is ever written back, so to forget a granule is always right. Ranges
    are bytes of the record; they begin at granules and end at them or with the record, where it is not said otherwise.
    Used by several threads; no lock is held while anything else is waited for.
    """

    def __init__(self, memory: Tensor, granule_bytes: int) -> None:
        """`memory` is uint8 [bytes of the record]; it holds nothing yet."""
        self._memory = memory
        self._granule_bytes = granule_bytes
        num_granules = -(-memory.numel() // granule_bytes)
        self._is_held = np.zeros(num_granules, bool)
        self._is_draft = np.ones(num_granules, bool)
        """Written since the last commit, for all we know: a drop makes them something else."""
        self._num_changes: NumChanges = np.zeros(num_granules, np.uint32)
        self._writes: list[tuple[slice, IoRequest]] = []
        self._lock = Lock()
        self.num_bytes_read = 0

    def read(self, start: int, out: Tensor) -> bool:
        """Fill `out` (uint8, any range) if all granules that it touches are held; else touch nothing and say so."""
        part = self._granules(start, out)
        with self._lock:
            self._forget_failed_writes()
            if not self._is_held[part].all():
                return False
            out.copy_(self._memory[start : start + out.numel()])
            self.num_bytes_read += out.numel()
        return True

    def put(self, start: int, source: Tensor) -> None:
        """Take over what is about to be written to the store. Call `follow` or `forget` then."""
        part = self._granules(start, source)
        with self._lock:
            self._forget_failed_writes()
            self._change(part)
            self._is_held[part] = False  # an interrupt may leave half of it
            self._memory[start : start + source.numel()].copy_(source)
            self._is_held[part] = True

    def follow(self, start: int, source: Tensor, request: IoRequest) -> None:
        """`request` writes to the store what was `put`: if it fails, that is not held."""
        with self._lock:
            self._writes.append((self._granules(start, source), request))

    def forget(self, start: int, source: Tensor) -> None:
        """The granules that this range (any) touches have been changed in the store, or may have been."""
        part = self._granules(start, source)
        with self._lock:
            self._change(part)
            self._is_held[part] = False

    def wait_for_writes(self, start: int, out: Tensor) -> None:
        """Return when no write of the granules that this range (any) touches is under way."""
        part = self._granules(start, out)
        with self._lock:
            writes = [request for written, request in self._writes if _overlap(written, part)]
        for request in writes:
            with contextlib.suppress(Exception):  # for whoever wrote
                request.wait()

    def stamp(self, start: int, out: Tensor) -> Stamp:
        """To be asked for before a read of the store begins, and given to `fill`."""
        part = self._granules(start, out)
        with self._lock:
            return Stamp(part.start, self._num_changes[part].copy())

    def fill(self, start: int, source: Tensor, stamp: Stamp) -> None:
        """Hold what was read from the store, and verified, unless it has changed since `stamp`."""
        part = self._granules(start, source)
        before = stamp.num_changes[part.start - stamp.first : part.stop - stamp.first]
        with self._lock:
            if np.array_equal(self._num_changes[part], before):
                self._memory[start : start + source.numel()].copy_(source)
                self._is_held[part] = True

    def commit(self) -> None:
        """All that was written is committed."""
        with self._lock:
            self._is_draft[:] = False

    def drop(self) -> None:
        """The store has gone back to its last commit; no request is under way."""
        with self._lock:
            self._is_held &= ~self._is_draft
            self._is_draft[:] = False
            self._num_changes += 1
            self._writes.clear()

    def begin_anew(self) -> None:
        """The store's records are other ones from now on, and not committed."""
        with self._lock:
            self._is_held[:] = False
            self._is_draft[:] = True
            self._num_changes += 1
            self._writes.clear()

    def _change(self, part: slice) -> None:
        self._is_draft[part] = True
        self._num_changes[part] += 1

    def _forget_failed_writes(self) -> None:
        under_way = []
        for part, request in self._writes:
            if not request.done():
                under_way.append((part, request))
            elif request.failed:
                self._is_held[part] = False
        self._writes = under_way

    def _granules(self, start: int, tensor: Tensor) -> slice:
        assert 0 <= start <= start + tensor.numel() <= self._memory.numel(), "the range leaves its record"
        return slice(start // self._granule_bytes, -(-(start + tensor.numel()) // self._granule_bytes))


def _overlap(one: slice, other: slice) -> bool:
    return bool(one.start < other.stop and other.start < one.stop)

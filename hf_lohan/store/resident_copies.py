"""Records in RAM: copies of what the drives have, or the only place of their newest version until a commit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from threading import Lock

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_lohan.files import IoRequest
from hf_lohan.store.layout import RecordSpec

NumChanges = npt.NDArray[np.uint32]


def take_copies(
    records: Sequence[RecordSpec], host_empty: Callable[[int], Tensor]
) -> dict[tuple[str, str], ResidentCopy]:
    """Copies of these records by block and kind, with all the memory that they will use. They hold nothing yet.
    `host_empty` makes a page-aligned uint8 tensor [num_bytes]."""
    if not records:
        return {}
    sizes = [record.num_bytes for record in records]
    parts = host_empty(sum(sizes)).split(sizes)
    return {
        (record.block, record.kind): ResidentCopy(part, record.granule_bytes)
        for record, part in zip(records, parts, strict=True)
    }


class ResidentCopy:
    """What a store asks when it reads a record and tells when it writes it. Holds a granule if its bytes here are the
    newest: those that the store has, has under way, or will have by the next commit.

    `Versions` knows which of them are here only. All others may be forgotten at any time. A drop forgets what was
    written since the last commit, be it here only or not, and the next read brings back what is committed, verified.
    Ranges are bytes of the record; they begin at granules and end at them or with the record, where it is not said
    otherwise. Used by several threads; no lock is held while anything else is waited for.
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
        """Bytes that were read from here so far, and not from the SSD."""

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
        """Take over what is about to be written to the store: call `follow` or `forget` then; or what stays here.
        ``source`` may be what was `lent`."""
        part = self._granules(start, source)
        with self._lock:
            self._forget_failed_writes()
            self._change(part)
            self._is_held[part] = False  # an interrupt may leave half of it
            own = self._memory[start : start + source.numel()]
            if own.data_ptr() != source.data_ptr():
                own.copy_(source)
            self._is_held[part] = True

    def lend(self, start: int, num_bytes: int) -> Tensor | None:
        """Its own memory of that range, to be changed in place and then `put`; None where it does not hold all of it.
        Until then it holds nothing of it."""
        own = self._memory[start : start + num_bytes]
        part = self._granules(start, own)
        with self._lock:
            self._forget_failed_writes()
            if not self._is_held[part].all():
                return None
            self._change(part)
            self._is_held[part] = False
        return own

    def held(self, start: int, num_bytes: int) -> Tensor | None:
        """Its own memory of that range, to be read only; None where it does not hold all of it."""
        own = self._memory[start : start + num_bytes]
        with self._lock:
            return own if self._is_held[self._granules(start, own)].all() else None

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

    def filler(self, start: int, out: Tensor) -> Callable[[int, int], None]:
        """To be asked for before a read of the store into ``out`` begins. Called with granules [first, stop) of it once
        they are verified, it holds them, unless they have changed since."""
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
            elif request.error is not None:
                self._is_held[part] = False
        self._writes = under_way

    def _granules(self, start: int, tensor: Tensor) -> slice:
        assert 0 <= start <= start + tensor.numel() <= self._memory.numel(), "the range leaves its record"
        return slice(start // self._granule_bytes, -(-(start + tensor.numel()) // self._granule_bytes))


def _overlap(one: slice, other: slice) -> bool:
    return bool(one.start < other.stop and other.start < one.stop)

"""A store of which some records are read from RAM."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

from torch import Tensor

from hf_lohan.files import IoRequest
from hf_lohan.files.buffers import byte_tensor
from hf_lohan.store.granules import Checksums
from hf_lohan.store.opening import OpenParts
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.resident_copy import ResidentCopy, Stamp
from hf_lohan.store.store import Store


class ResidentStore(Store):
    """A `Store` that keeps copies of some records in RAM: what they hold is not read from the SSD again.

    Writes go to the copy and, as ever, to the store, which stays the authority: it holds all that a commit must
    contain, and copies only hold what it holds. A drop forgets what was written since the last commit; the next read
    brings it back, verified. (Under durability "checkpoint" a write could end at the copy, with `commit` and `close`
    writing what is newer in RAM: `write` and `commit` are the places for that.)
    """

    def __init__(self, parts: OpenParts) -> None:
        super().__init__(parts)
        self._copies: dict[tuple[str, str], ResidentCopy] = {}

    def keep_copies(self, names: Iterable[tuple[str, str]], host_empty: Callable[[int], Tensor]) -> None:
        """Take memory for copies of the records with these (block, kind) `names`, once, all that they will use. They
        hold nothing yet. `host_empty` makes a page-aligned uint8 tensor [num_bytes]."""
        assert not self._copies, "memory is taken once"
        records = [self.files.layout.record(block, kind) for block, kind in names]
        if not records:
            return
        memory = host_empty(sum(record.num_bytes for record in records))
        stops = list(accumulate(record.num_bytes for record in records))
        self._copies = {
            (record.block, record.kind): ResidentCopy(
                memory[stop - record.num_bytes : stop], record.granule_numel * record.itemsize
            )
            for record, stop in zip(records, stops, strict=True)
        }

    @property
    def resident_read_bytes(self) -> int:
        """Bytes that were read from copies so far, and not from the SSD."""
        return sum(copy.num_bytes_read for copy in self._copies.values())

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """See `Store.read`."""
        copy = self._copies.get((block, kind))
        if copy is None:
            return super().read(block, kind, start_numel, out, is_urgent=is_urgent)
        start, content = start_numel * out.element_size(), byte_tensor(out)
        if copy.read(start, content):
            return RecordRead.of_memory()
        copy.wait_for_writes(start, content)
        stamp = copy.stamp(start, content)
        read = super().read(block, kind, start_numel, out, is_urgent=is_urgent)
        return _FillingRead(read, out, copy, start, stamp)

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest:
        """See `Store.write`."""
        copy = self._copies.get((block, kind))
        if copy is None:
            return super().write(block, kind, start_numel, source, checksums=checksums)
        start, content = start_numel * source.element_size(), byte_tensor(source)
        copy.put(start, content)
        try:
            request = super().write(block, kind, start_numel, source, checksums=checksums)
        except BaseException:
            copy.forget(start, content)
            raise
        copy.follow(start, content, request)
        return request

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `Store.read_unaligned`."""
        copy = self._copies.get((block, kind))
        if copy is not None:
            start, content = start_numel * out.element_size(), byte_tensor(out)
            if copy.read(start, content):
                return
            copy.wait_for_writes(start, content)
        super().read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor) -> None:
        """See `Store.write_unaligned`. It is for loading: a copy takes it over when it is read."""
        copy = self._copies.get((block, kind))
        try:
            super().write_unaligned(block, kind, start_numel, source, bounce)
        finally:
            if copy is not None:
                copy.forget(start_numel * source.element_size(), byte_tensor(source))

    def commit(self, *args: Any, **options: Any) -> None:
        """See `Store.commit`."""
        super().commit(*args, **options)
        for copy in self._copies.values():
            copy.commit()

    def drop(self) -> None:
        """See `Store.drop`."""
        super().drop()
        for copy in self._copies.values():
            copy.drop()

    def begin_anew(self) -> None:
        """See `Store.begin_anew`."""
        super().begin_anew()
        for copy in self._copies.values():
            copy.begin_anew()


class _FillingRead(RecordRead):
    """A read of the store that fills a copy with what it has verified."""

    def __init__(self, read: RecordRead, out: Tensor, copy: ResidentCopy, start: int, stamp: Stamp) -> None:
        self._read = read
        self._out = out.view(-1)
        self._copy = copy
        self._start = start
        self._stamp = stamp

    @property
    def num_bytes(self) -> int:
        return self._read.num_bytes

    @property
    def is_verified(self) -> bool:
        return self._read.is_verified

    def done(self) -> bool:
        return self._read.done()

    def arrive(self) -> None:
        self._read.arrive()

    def verify(self, first: int, stop: int) -> None:
        self._read.verify(first, stop)
        granule_numel = self._read.granule_numel
        part = self._out[first * granule_numel : stop * granule_numel]
        self._copy.fill(self._start + first * granule_numel * part.element_size(), byte_tensor(part), self._stamp)

    def wait(self) -> None:
        self.arrive()
        if not self.is_verified:
            self.verify(0, self._read.num_granules)

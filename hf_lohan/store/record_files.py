"""Reads and writes records as tensors by (block, kind), from either home, any path, or RAM."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from hf_lohan.device import DeviceHasher, Lane
from hf_lohan.files import CorruptionError, Extent, ForeignStoreError, IoEngine, IoRequest, StorageError
from hf_lohan.files.data_file import DeviceSpan, MemorySpan, byte_tensor, sector_view
from hf_lohan.files.io_engine import Content, PendingRequests
from hf_lohan.store.home_files import HomeFiles
from hf_lohan.store.layout import GRANULE_NUMEL, RecordSpec, StoreLayout, granules_of
from hf_lohan.store.ram_home import RamHome
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.versions import Checksums, Home, Homes, TieCodes, Versions
from hf_lohan.threads import Owner


def checksums(source: Tensor, granule_bytes: int) -> Checksums:
    """Return the xxh3 hash (64 bits) of each granule of ``source``, a contiguous tensor in RAM. The last granule may be
    short."""
    content = byte_tensor(source).numpy().data
    starts = range(0, len(content), granule_bytes)
    return np.array([xxhash.xxh3_64_intdigest(content[start : start + granule_bytes]) for start in starts], np.uint64)


_WRITE_BACK_DEPTH = 3
"""While RAM is written back, at most this number of requests plus one are in progress."""

HashGranules = Callable[[Tensor, int], Checksums]
BeforeWrite = Callable[[bool], None]
_Files = TypeVar("_Files", bound="RecordFiles")


class RecordFiles:
    """Records in one or two homes. The checksum of each granule is computed for each write, and verified after each
    read.

    Tensors are contiguous, on the CPU, and of their record's dtype. `read` and `write` take whole granules (or up to
    the record's end) at sector-aligned addresses, and after `use_device` also memory of the device. The ``_unaligned``
    methods take any range, and use a bounce buffer. A bounce buffer is an aligned uint8 tensor of at least one granule.
    Nothing else may use it meanwhile. Two requests on the same granule must not be in progress together if one of them
    writes.

    A record may have a copy in RAM (`RamHome`), which is read instead of the drive. Writes go to both. While
    `ram.keeps_new` is set, they go only to RAM until `write_back`.
    """

    def __init__(
        self,
        homes: Sequence[HomeFiles],
        versions: Versions,
        engine: IoEngine,
        *,
        before_write: BeforeWrite = lambda tears: None,
        hash_granules: HashGranules = checksums,
    ) -> None:
        """``before_write`` is called before each write starts. Its argument is True if the write changes committed
        bytes. ``hash_granules`` computes checksums (benchmarks replace it)."""
        self.versions = versions
        self.layout = homes[0].layout
        self.ram = RamHome(self.layout, versions)
        self._homes = tuple(homes)
        self._engine = engine
        self._before_write = before_write
        self._hash_granules = hash_granules
        self._requests = PendingRequests()
        self._owner = Owner()
        self._hasher: DeviceHasher | None = None

    @classmethod
    def create_files(
        cls,
        layout: StoreLayout,
        directories: Sequence[str],
        name: str,
        engine: IoEngine,
        *,
        hash_granules: HashGranules = checksums,
    ) -> RecordFiles:
        """Create scratch files of one home, and replace existing files. Raises the errors of `HomeFiles.create`."""
        home = HomeFiles.create(layout, directories, name, engine, is_scratch=True)
        return RecordFiles([home], Versions(layout.records, num_homes=1), engine, hash_granules=hash_granules)

    def use_device(self, hasher: DeviceHasher | None) -> None:
        """Read and write device memory too. ``hasher`` computes checksums on the device. With None nothing changes."""
        self._hasher = hasher

    def reads_to_device(self, block: str, kind: str) -> bool:
        """Return whether a record can be read to device memory, which needs a hasher and no copy in RAM."""
        return self._hasher is not None and (block, kind) not in self.ram.copies

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        """All records in their order on disk."""
        return self.layout.records

    @property
    def closed(self) -> bool:
        return self._homes[0].closed

    @property
    def size_bytes(self) -> int:
        """Exact size of all files together."""
        return sum(home.layout.total_bytes for home in self._homes)

    def has(self, block: str, kind: str) -> bool:
        return self.layout.has(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """Start to fill ``out`` [numel] with the record's elements from ``start_numel`` on. Drafts are read in
        preference to committed elements. Urgent reads overtake other reads.

        Waiting for the read, or verifying parts of it, raises `CorruptionError` if the bytes differ from the written
        bytes. Nothing may use device memory when a read to it starts.
        """
        return self._read(block, kind, self.layout.offset_in(block, kind, start_numel), out, is_urgent)

    def _read(self, block: str, kind: str, offset: int, out: Tensor, is_urgent: bool = False) -> RecordRead:
        granules = self._granules_of(block, kind, offset, out)
        content = byte_tensor(out)
        copy = self.ram.copies.get((block, kind))
        fill: Callable[[int, int], None] | None = None
        if copy is not None:
            if copy.try_read(granules.start_byte, content):
                return RecordRead.of_memory()
            copy.wait_for_writes(granules.start_byte, content)
            fill = copy.filler(granules.start_byte, content)  # made before the read begins, so that it notices changes
        view = self._view(content)
        homes, expected = self.versions.live(block, kind, granules.first, granules.stop)
        transfers = []
        for run in homes:
            part = granules.bytes_of(run.first, run.stop)
            if run.home is Home.NOWHERE:
                self._zero(content[part])
            elif run.home is Home.RAM:
                self.ram.read_granules(block, kind, run.first, content[part])
            else:
                transfers += self._homes[run.home].transfers(
                    block, kind, run.first * granules.granule_bytes, view[part]
                )

        def check(low: int, high: int) -> None:
            for run in homes:
                begin, end = max(run.first - granules.first, low), min(run.stop - granules.first, high)
                if begin < end and run.home in (Home.FIRST, Home.SECOND):
                    part = content[begin * granules.granule_bytes : end * granules.granule_bytes]
                    is_wrong = self._hashes_of(part, granules.granule_bytes) != expected[begin:end]
                    if is_wrong.any():
                        raise self._corruption(block, kind, run.home, granules.first + begin + int(np.argmax(is_wrong)))
            if fill is not None:
                fill(low, high)

        request = self._requests.add(self._engine.read(transfers, of=Content(block, kind), is_urgent=is_urgent))
        return RecordRead(request, out.numel(), self.layout.record(block, kind).granule_numel, check)

    def read_from_ram(self, block: str, kind: str, start_numel: int, out: Tensor) -> bool:
        """Fill ``out`` [numel], which may begin and end at any element, and return True if a copy in RAM has all of it.
        If not, return False."""
        copy = self.ram.copies.get((block, kind))
        offset = self.layout.offset_in(block, kind, start_numel)
        return copy is not None and copy.try_read(offset * out.element_size(), byte_tensor(out))

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest:
        """Start to write ``source`` [numel] to the record's elements from ``start_numel`` on.

        ``checksums`` has the checksums of ``source``. With None they are computed. Device memory needs them. If the
        request fails, these elements must be written again or dropped before a commit.
        """
        offset = self.layout.offset_in(block, kind, start_numel)
        copy = self.ram.copies.get((block, kind))
        if copy is None:
            return self._write(block, kind, offset, source, checksums)
        start_byte, content = offset * source.element_size(), byte_tensor(source)
        if self.ram.keeps_new:
            granules = self._granules_of(block, kind, offset, source)
            self.ram.store_granules(block, kind, granules.first, granules.stop, content)
            return IoRequest.finished()
        copy.store(start_byte, content)
        try:
            request = self._write(block, kind, offset, source, checksums)
        except BaseException:
            copy.forget(start_byte, content)
            raise
        copy.track_write(start_byte, content, request)
        return request

    def write_back(self) -> None:
        """Write all data that exists only in RAM, and wait until it is in the files (not yet synced). Nobody else may
        write meanwhile. Raises `CapacityError` or `StorageError`, and then the data stays in RAM."""
        in_progress: deque[IoRequest] = deque()
        for block, kind, offset, values in self.ram.unwritten():
            in_progress.append(self._write(block, kind, offset, values, None))
            if len(in_progress) > _WRITE_BACK_DEPTH:  # leaves room for reads of weights
                in_progress.popleft().wait()
        while in_progress:
            in_progress.popleft().wait()

    def _write(
        self,
        block: str,
        kind: str,
        offset: int,
        source: Tensor,
        checksums: Checksums | None,
        *,
        may_tear: bool = True,
    ) -> IoRequest:
        granules = self._granules_of(block, kind, offset, source)
        assert checksums is None or len(checksums) == granules.stop - granules.first, "each granule needs a checksum"
        view = self._view(byte_tensor(source))
        tears = False
        if self.versions.overwrites(block, kind, granules.first, granules.stop):
            checksums = self.checksums(block, kind, source) if checksums is None else checksums
            # Writing the same bytes again (such as reloaded frozen weights) does not tear the commit.
            tears = self.versions.tears(block, kind, granules.first, checksums)
        if tears and not may_tear:
            raise ForeignStoreError(f"{kind} of {block} differs from the last commit, which is its only version")
        self._before_write(tears)
        if tears:
            self.versions.mark_torn()
        targets = (
            self.versions.begin_write(block, kind, granules.first, granules.stop)
            if granules.first < granules.stop
            else []
        )
        transfers = []
        for run in targets:
            part = view[granules.bytes_of(run.first, run.stop)]
            transfers += self._homes[run.home].transfers(block, kind, run.first * granules.granule_bytes, part)

        def end_write() -> None:
            of_source = self.checksums(block, kind, source) if checksums is None else checksums
            self.versions.end_write(block, kind, granules.first, targets, of_source)

        return self._requests.add(self._engine.write(transfers, end_write, of=Content(block, kind)))

    def checksums(self, block: str, kind: str, source: Tensor) -> Checksums:
        """Return the checksum of each granule of ``source`` [numel], for `write`. This is cheapest while ``source`` is
        in the CPU cache."""
        assert source.is_contiguous() and source.device.type == "cpu"
        return self._hash_granules(source, self.layout.record(block, kind).granule_bytes)

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """Fill ``out`` [numel] through ``bounce``, at any address and from any element on. Blocks until done."""
        offset = self.layout.offset_in(block, kind, start_numel)
        copy = self.ram.copies.get((block, kind))
        start_byte, content = offset * out.element_size(), byte_tensor(out)
        if copy is not None and copy.try_read(start_byte, content):
            return
        for low, high, first, staged in self._windows(block, kind, offset, out, bounce):
            self._read(block, kind, first, staged).wait()
            out[low - offset : high - offset].copy_(staged[low - first : high - first])

    def write_unaligned(
        self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor, *, may_tear: bool = True
    ) -> None:
        """Write ``source`` [numel] through ``bounce``, from any address to any element. Blocks until done.

        Granules that are partly covered are read, changed and written, so nothing else may write to them. This is for
        loading. The next read fills a copy in RAM. Without ``may_tear`` this raises `ForeignStoreError` before it
        changes a committed granule that has one home.
        """
        offset = self.layout.offset_in(block, kind, start_numel)
        granule_numel, copy = self.layout.record(block, kind).granule_numel, self.ram.copies.get((block, kind))
        for low, high, first, staged in self._windows(block, kind, offset, source, bounce):
            last = (staged.numel() - 1) // granule_numel * granule_numel
            partial = {0: low > first, last: high < first + staged.numel() or (last == 0 and low > first)}
            for edge in (edge for edge, is_partial in partial.items() if is_partial):
                self._read(block, kind, first + edge, staged[edge : edge + granule_numel]).wait()
            staged[low - first : high - first].copy_(source[low - offset : high - offset])
            try:
                self._write(block, kind, first, staged, None, may_tear=may_tear).wait()
            finally:
                if copy is not None:
                    copy.forget(first * source.element_size(), byte_tensor(staged))

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """Return the files and extents of a whole record's current version; None if a part is being written or was
        never written."""
        record = self.layout.record(block, kind)
        if not self.versions.is_written(block, kind, 0, record.num_granules):
            return None
        extents: list[tuple[str, Extent]] = []
        for run in self.versions.live(block, kind, 0, record.num_granules)[0]:
            start, stop = run.first * record.granule_bytes, min(run.stop * record.granule_bytes, record.num_bytes)
            extents += self._homes[run.home].extents(block, kind, start, stop - start)
        return extents

    def tie_codes(self, block: str, start_numel: int, numel: int) -> Tensor:
        """Return the tie codes (int16) of ``numel`` elements of the residuals of a block's masters. ``start_numel``
        begins a run."""
        first, stop = self._runs_of(block, start_numel, numel)
        return torch.from_numpy(self.versions.tie_codes(block, first, stop))

    def set_tie_codes(self, block: str, start_numel: int, numel: int, codes: Tensor) -> None:
        """Replace the tie codes of elements that are written next. ``start_numel`` begins a run."""
        first, stop = self._runs_of(block, start_numel, numel)
        assert len(codes) == stop - first, f"{len(codes)} tie codes for {stop - first} runs"
        self.versions.set_tie_codes(block, first, codes.numpy())

    def all_tie_codes(self) -> dict[str, tuple[int, TieCodes]]:
        """Return the first element and the tie codes of each record of residuals, by block."""
        return {
            record.block: (record.first, self.tie_codes(record.block, record.first, record.numel).numpy())
            for record in self.records
            if record.kind == "master_residual"
        }

    def take_tie_codes(self, shards: Iterable[Mapping[str, tuple[int, TieCodes]]]) -> None:
        """Set the tie codes of this store's residuals. ``shards`` has `all_tie_codes` of stores with all elements."""
        own = {record.block: record for record in self.records if record.kind == "master_residual"}
        for shard in shards:
            for block in own.keys() & shard.keys():
                first, codes = shard[block]
                begin, end = own[block].first, own[block].first + own[block].numel
                low, high = max(first, begin), min(first + len(codes) * GRANULE_NUMEL, end)
                if low < high:
                    runs = slice((low - first) // GRANULE_NUMEL, granules_of(high - first, GRANULE_NUMEL))
                    self.set_tie_codes(block, low, high - low, torch.tensor(codes[runs]))

    def _runs_of(self, block: str, start_numel: int, numel: int) -> tuple[int, int]:
        offset = self.layout.offset_in(block, "master_residual", start_numel)
        assert offset % GRANULE_NUMEL == 0, f"element {offset} of the residuals of {block} is not the start of a run"
        return offset // GRANULE_NUMEL, granules_of(offset + numel, GRANULE_NUMEL)

    def draft(self) -> tuple[Homes, Checksums, TieCodes]:
        """Make all writes durable, and return their versions for `Versions.commit`.

        Raises the errors of `sync`, and `StorageError` if a write failed and was not repeated.
        """
        self.sync()
        if incomplete := self.versions.first_in_flux():
            block, kind, granule = incomplete
            path, file_offset, element = self._locate(block, kind, Home.FIRST, granule)
            raise StorageError(
                f"{kind} of {block} is incomplete from element {element} on after a failed write, in",
                path=path,
                offset=file_offset,
                advice="check the drive and resume from the last step or a checkpoint",
            )
        return self.versions.draft()

    def sync(self) -> None:
        """Wait until every write that has started is on the drive.

        Raises `CapacityError` or `StorageError`, including when a request in progress fails. The error of an earlier
        request is raised only in the thread that waits for it.
        """
        self._requests.wait()
        for home in self._homes:
            home.sync()

    def wait_until_idle(self) -> None:
        """Wait until no request is in progress. Errors are raised only in the threads that wait for the requests."""
        self._requests.wait_ignoring_errors()

    def close(self) -> None:
        """Wait for requests, close the files, and delete scratch files. Idempotent. Does nothing in a forked process,
        because it has no I/O threads."""
        if self._owner.is_here:
            self.wait_until_idle()
            for home in self._homes:
                home.close()

    def __enter__(self: _Files) -> _Files:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _view(self, content: Tensor) -> MemorySpan:
        is_on_device = self._hasher is not None and self._hasher.covers(content)
        return DeviceSpan(content) if is_on_device else sector_view(content)

    def _hashes_of(self, content: Tensor, granule_bytes: int) -> Checksums:
        if self._hasher is None or not self._hasher.covers(content):
            return self._hash_granules(content, granule_bytes)
        # The lane needs no event, because the host has waited for the read of the content.
        hashes = self._hasher.hashes(content, granule_bytes, Lane.D2H_ASIDE)
        found: Checksums = hashes.numpy().view(np.uint64)
        return found

    def _zero(self, content: Tensor) -> None:
        if self._hasher is not None and self._hasher.covers(content):
            self._hasher.zero(content)
        else:
            content.zero_()

    def _granules_of(self, block: str, kind: str, offset: int, tensor: Tensor) -> _GranuleRange:
        """Return the granules that ``tensor`` fills if its first element is at ``offset`` of the record."""
        record = self._checked(block, kind, offset, tensor)
        granule_numel, stop = record.granule_numel, offset + tensor.numel()
        if offset == stop:
            return _GranuleRange(0, 0, record.granule_bytes)
        assert offset % granule_numel == 0, f"element {offset} of {kind} of {block} is not the start of a granule"
        is_whole = stop == record.numel or stop % granule_numel == 0
        assert is_whole, f"element {stop} of {kind} of {block} is not the end of a granule"
        return _GranuleRange(offset // granule_numel, granules_of(stop, granule_numel), record.granule_bytes)

    def _checked(self, block: str, kind: str, offset: int, tensor: Tensor) -> RecordSpec:
        assert not self.closed, "the files are closed"
        record = self.layout.record(block, kind)
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype == record.dtype, f"{kind} of {block} is {record.dtype}, but the tensor is {dtype}"
        assert 0 <= offset <= offset + tensor.numel() <= record.numel, "the range leaves its record"
        return record

    def _windows(
        self, block: str, kind: str, offset: int, tensor: Tensor, bounce: Tensor
    ) -> Iterator[tuple[int, int, int, Tensor]]:
        """Split a range into parts that fit the bounce buffer. Yields the part's elements [low, high) of the record,
        the first element of the granules that cover it, and the granules' part of the buffer."""
        record = self._checked(block, kind, offset, tensor)
        granule_numel, stop = record.granule_numel, offset + tensor.numel()
        staging = bounce[: bounce.numel() // record.itemsize * record.itemsize].view(tensor.dtype)
        room_numel = staging.numel() // granule_numel * granule_numel
        assert room_numel, f"a bounce buffer has at least one granule of {granule_numel} elements"
        if offset == stop:
            return
        for first in range(offset // granule_numel * granule_numel, stop, room_numel):
            low, high = max(offset, first), min(stop, first + room_numel)
            last = min(first + granules_of(high - first, granule_numel) * granule_numel, record.numel)
            yield low, high, first, staging[: last - first]

    def _locate(self, block: str, kind: str, home: Home, granule: int) -> tuple[str, int, int]:
        """Return the path of a granule, the offset of its first byte in the file, and the number of its first
        element."""
        record = self.layout.record(block, kind)
        path, extent = self._homes[home].extents(block, kind, granule * record.granule_bytes, 1)[0]
        return path, extent.file_offset, record.first + granule * record.granule_numel

    def _corruption(self, block: str, kind: str, home: Home, granule: int) -> CorruptionError:
        path, file_offset, element = self._locate(block, kind, home, granule)
        return CorruptionError(
            f"{kind} of {block} is damaged from element {element} on (wrong checksum) in",
            path=path,
            offset=file_offset,
            advice="check the drive and the memory, and resume from a checkpoint",
        )


class _GranuleRange(NamedTuple):
    """Granules [first, stop) of a record."""

    first: int
    stop: int
    granule_bytes: int

    @property
    def start_byte(self) -> int:
        return self.first * self.granule_bytes

    def bytes_of(self, first: int, stop: int) -> slice:
        """Return the slice of these granules in the range's bytes."""
        return slice((first - self.first) * self.granule_bytes, (stop - self.first) * self.granule_bytes)

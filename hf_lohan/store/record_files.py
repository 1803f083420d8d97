"""Records as tensors see them: read and written by (block, kind), whichever home and path holds their bytes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

import numpy as np
from torch import Tensor

from hf_lohan.files import CorruptionError, Extent, IoEngine, IoRequest, StorageError
from hf_lohan.files.buffers import byte_tensor, sector_view
from hf_lohan.files.io_engine import Content
from hf_lohan.files.requests_under_way import RequestsUnderWay
from hf_lohan.store.granules import Checksums, checksums, granules_of
from hf_lohan.store.home_files import HomeFiles
from hf_lohan.store.layout import RecordSpec, StoreLayout
from hf_lohan.store.record_read import RecordRead
from hf_lohan.store.unaligned import Units, read_range, write_range
from hf_lohan.store.versions import Home, Homes, Versions


class RecordFiles:
    """Records in one or two homes, with a checksum for each granule: taken when it is written, checked after each read.

    Tensors are contiguous, on the CPU and of their record's dtype. `read` and `write` take whole granules (or the
    record's end) at sector-aligned addresses; the ``_unaligned`` pair takes any range, through a bounce buffer. Two
    requests that touch the same granule, one of them a write, must not be under way together.
    """

    def __init__(self, homes: Sequence[HomeFiles], versions: Versions, engine: IoEngine) -> None:
        self.versions = versions
        self.layout = homes[0].layout
        self.before_write: Callable[[bool], None] | None = None
        """Called before each write is started, with whether it overwrites what is committed with something else."""
        self.hash_granules: Callable[[Tensor, int], Checksums] = checksums
        """Hashes memory granule by granule; benchmarks put something else in its place."""
        self._homes = tuple(homes)
        self._engine = engine
        self._requests = RequestsUnderWay()

    @classmethod
    def create(
        cls,
        layout: StoreLayout,
        directories: Sequence[str],
        name: str,
        engine: IoEngine,
        *,
        is_scratch: bool = False,
    ) -> RecordFiles:
        """New files, of one home, in place of any old ones. See `HomeFiles.create`."""
        home = HomeFiles.create(layout, directories, name, engine, is_scratch=is_scratch)
        return cls([home], Versions(layout.records, num_homes=1), engine)

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        return self.layout.records

    @property
    def closed(self) -> bool:
        return self._homes[0].closed

    @property
    def size_bytes(self) -> int:
        """Exact size of all its files together."""
        return sum(home.size_bytes for home in self._homes)

    @property
    def home_layouts(self) -> tuple[StoreLayout, ...]:
        """Where its bytes lie on each path, by home."""
        return tuple(home.layout for home in self._homes)

    def has(self, block: str, kind: str) -> bool:
        return self.layout.has(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """Start to fill ``out`` [numel] with the record's elements from ``start_numel`` on, before reads that are not
        urgent if this ``is_urgent``.

        Waiting for it, or verifying parts of it, fails with `CorruptionError` if they are not what was written.
        """
        first, stop = self._granules(block, kind, start_numel, out)
        content = byte_tensor(out)
        view = sector_view(content)
        homes, expected = self.versions.live(block, kind, first, stop)
        granule_numel = self.layout.record(block, kind).granule_numel
        granule_bytes = granule_numel * out.element_size()
        transfers = []
        for run in homes:
            part = slice((run.first - first) * granule_bytes, (run.stop - first) * granule_bytes)
            if run.home is Home.NOWHERE:
                content[part].zero_()
            else:
                transfers += self._homes[run.home].transfers(block, kind, run.first * granule_bytes, view[part])

        def check(low: int, high: int) -> None:
            for run in homes:
                begin, end = max(run.first - first, low), min(run.stop - first, high)
                if begin < end and run.home is not Home.NOWHERE:
                    found = self.hash_granules(content[begin * granule_bytes : end * granule_bytes], granule_bytes)
                    is_wrong = found != expected[begin:end]
                    if is_wrong.any():
                        raise self._corruption(block, kind, run.home, first + begin + int(np.argmax(is_wrong)))

        request = self._requests.add(self._engine.read(transfers, of=Content(block, kind), is_urgent=is_urgent))
        return RecordRead(request, out.numel(), granule_numel, check)

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest:
        """Start to put ``source`` [numel] at the record's elements from ``start_numel`` on.

        ``checksums`` are those of ``source``, if they are known already. If the request fails, these elements must be
        written again, or dropped, before a commit.
        """
        first, stop = self._granules(block, kind, start_numel, source)
        assert checksums is None or len(checksums) == stop - first, "a checksum for each granule"
        view = sector_view(source)
        granule_bytes = self._granule_bytes(block, kind)
        if self.versions.overwrites(block, kind, first, stop):
            checksums = self.checksums(block, kind, source) if checksums is None else checksums
            self._announce_write(block, kind, first, checksums)
        else:
            self._announce_write(block, kind, first, None)
        targets = self.versions.begin_write(block, kind, first, stop) if first < stop else []
        transfers = []
        for run in targets:
            part = view[(run.first - first) * granule_bytes : (run.stop - first) * granule_bytes]
            transfers += self._homes[run.home].transfers(block, kind, run.first * granule_bytes, part)

        def note() -> None:
            of_source = self.checksums(block, kind, source) if checksums is None else checksums
            self.versions.end_write(block, kind, first, targets, of_source)

        return self._requests.add(self._engine.write(transfers, note, of=Content(block, kind)))

    def checksums(self, block: str, kind: str, source: Tensor) -> Checksums:
        """Of each granule of ``source`` [numel], of that record. To be given to `write`, by who has it in his
        cache just now."""
        assert source.is_contiguous() and source.device.type == "cpu"
        return self.hash_granules(source, self._granule_bytes(block, kind))

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """Fill ``out`` [numel], at any address and from any element on, through ``bounce``; return when done.

        ``bounce`` is an aligned uint8 buffer of at least one granule that nobody else uses meanwhile.
        """
        start = self._start_byte(block, kind, start_numel, out)
        read_range(start, byte_tensor(out), bounce, self._units(block, kind), self._mover(self.read, block, kind, out))

    def write_unaligned(self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor) -> None:
        """Write ``source`` [numel] from any address to any element, through ``bounce``; return when done.

        Granules that are only partly covered are read, changed and written, so nothing else may write to them.
        """
        start = self._start_byte(block, kind, start_numel, source)
        read, write = (self._mover(move, block, kind, source) for move in (self.read, self.write))
        write_range(start, byte_tensor(source), bounce, self._units(block, kind), read, write)

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """Files and places of a whole record as it is now; None if some of it is being written, or never was."""
        record = self.layout.record(block, kind)
        num_granules = record.num_granules
        if not self.versions.is_written(block, kind, 0, num_granules):
            return None
        found: list[tuple[str, Extent]] = []
        granule_bytes = self._granule_bytes(block, kind)
        for run in self.versions.live(block, kind, 0, num_granules)[0]:
            start, stop = run.first * granule_bytes, min(run.stop * granule_bytes, record.num_bytes)
            found += self._homes[run.home].extents(block, kind, start, stop - start)
        return found

    def draft(self) -> tuple[Homes, Checksums]:
        """Make all that was written durable; returns its versions, for `Versions.commit`.

        Raises as `sync`, and `StorageError` where a write failed and was not repeated.
        """
        self.sync()
        if found := self.versions.first_in_flux():
            block, kind, granule = found
            path, offset = self._place(block, kind, Home.FIRST, granule)
            raise StorageError(
                f"{kind} of {block} was not written whole, from element {self._element(block, kind, granule)} on, to",
                path=path,
                offset=offset,
                advice="write it again before you commit, or resume from a checkpoint",
            )
        return self.versions.draft()

    def sync(self) -> None:
        """Return when every write started before is on the medium.

        Raises `CapacityError` or `StorageError`, also that of a request under way that fails; one that failed before
        told whoever waits for it.
        """
        self._requests.wait()
        for home in self._homes:
            home.sync()

    def settle(self) -> None:
        """Return when no request is under way any more. Errors are for whoever waits for it."""
        self._requests.settle()

    def close(self) -> None:
        """Close the files once no request touches them, and delete scratch files; then do nothing."""
        self.settle()
        for home in self._homes:
            home.close()

    def remove(self) -> None:
        """Close and delete the files."""
        self.close()
        for home in self._homes:
            home.remove()

    def __enter__(self) -> RecordFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _granules(self, block: str, kind: str, start_numel: int, tensor: Tensor) -> tuple[int, int]:
        self._start_byte(block, kind, start_numel, tensor)
        granule_numel = self.layout.record(block, kind).granule_numel
        stop_numel = start_numel + tensor.numel()
        if start_numel == stop_numel:
            return 0, 0
        assert start_numel % granule_numel == 0, f"element {start_numel} of {kind} of {block} begins no granule"
        is_end = stop_numel == self.layout.record(block, kind).numel
        assert is_end or stop_numel % granule_numel == 0, f"element {stop_numel} of {kind} of {block} ends no granule"
        return start_numel // granule_numel, granules_of(stop_numel, granule_numel)

    def _granule_bytes(self, block: str, kind: str) -> int:
        record = self.layout.record(block, kind)
        return record.granule_numel * record.itemsize

    def _start_byte(self, block: str, kind: str, start_numel: int, tensor: Tensor) -> int:
        assert not self.closed, "the files are closed"
        record = self.layout.record(block, kind)
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype == record.dtype, f"{kind} of {block} is {record.dtype}, the tensor {dtype}"
        assert 0 <= start_numel <= start_numel + tensor.numel() <= record.numel, "the range leaves its record"
        return start_numel * record.itemsize

    def _units(self, block: str, kind: str) -> Units:
        record = self.layout.record(block, kind)
        return Units(self._granule_bytes(block, kind), record.num_bytes)

    def _mover(
        self, move: Callable[[str, str, int, Tensor], IoRequest | RecordRead], block: str, kind: str, like: Tensor
    ) -> Callable[[int, Tensor], None]:
        """``move`` for bytes, that waits."""

        def moved(start_byte: int, staged: Tensor) -> None:
            move(block, kind, start_byte // like.element_size(), staged.view(like.dtype)).wait()

        return moved

    def _announce_write(self, block: str, kind: str, first: int, checksums: Checksums | None) -> None:
        """Tell `before_write`. What overwrites committed bytes with the same ones, as loading frozen weights again
        does, harms no commit."""
        tears = checksums is not None and self.versions.tears(block, kind, first, checksums)
        if self.before_write is not None:
            self.before_write(tears)
        if tears:
            self.versions.mark_torn()

    def _place(self, block: str, kind: str, home: Home, granule: int) -> tuple[str, int]:
        """Path and offset of the first byte of a granule."""
        itemsize = self.layout.record(block, kind).itemsize
        return self._homes[home].place(block, kind, self._element(block, kind, granule) * itemsize)

    def _element(self, block: str, kind: str, granule: int) -> int:
        """The first one of a granule."""
        return granule * self.layout.record(block, kind).granule_numel

    def _corruption(self, block: str, kind: str, home: Home, granule: int) -> CorruptionError:
        path, offset = self._place(block, kind, home, granule)
        return CorruptionError(
            f"{kind} of {block} is damaged: the checksum of its elements from "
            f"{self._element(block, kind, granule)} on is not that of what was written to",
            path=path,
            offset=offset,
            advice="check the drive and the memory; resume from a checkpoint",
        )

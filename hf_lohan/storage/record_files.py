"""Records as tensors see them: read and written by (block, kind), wherever the layout puts their bytes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from threading import Lock
from types import TracebackType

from torch import Tensor

from hf_lohan.storage.buffers import SECTOR_BYTES, byte_tensor, sector_view
from hf_lohan.storage.directories import free_bytes, sync_directory
from hf_lohan.storage.errors import CapacityError, Shortfall, StorageError
from hf_lohan.storage.files import DataFile
from hf_lohan.storage.io_engine import IoEngine, Transfer
from hf_lohan.storage.layout import RecordSpec, StoreLayout
from hf_lohan.storage.request import IoRequest
from hf_lohan.storage.unaligned import MoveSectors, read_range, write_range

Submit = Callable[[Sequence[Transfer]], IoRequest]


class RecordFiles:
    """One preallocated file per path, and the records that lie across them.

    Tensors are contiguous, on the CPU and of their record's dtype. `read` and `write` take whole sectors in
    memory and file, at aligned addresses; the ``_unaligned`` pair takes any range, through a bounce buffer.
    """

    def __init__(
        self, layout: StoreLayout, files: Sequence[DataFile], engine: IoEngine, *, is_scratch: bool = False
    ) -> None:
        self.layout = layout
        self.closed = False
        self._is_scratch = is_scratch
        self._files = tuple(files)
        self._engine = engine
        self._requests: set[IoRequest] = set()
        self._requests_lock = Lock()

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
        """New files full of zeros in place of any old ones; ``is_scratch`` deletes them on `close`.

        Raises `CapacityError` or `StorageError`, and then leaves none of them behind.
        """
        paths = [os.path.join(directory, name) for directory in directories]
        # All go before the first is made: they may share a file system and need each other's room.
        _unlink(paths)
        files: list[DataFile] = []
        try:
            for directory, path, num_bytes in zip(directories, paths, layout.file_bytes, strict=True):
                available_bytes = free_bytes(directory)
                files.append(engine.open_file(path, create=True))
                _allocate(files[-1], num_bytes, available_bytes)
                files[-1].sync()
                sync_directory(directory)
        except BaseException:
            cls(layout, files, engine).remove()
            raise
        return cls(layout, files, engine, is_scratch=is_scratch)

    @classmethod
    def open(
        cls, layout: StoreLayout, directories: Sequence[str], name: str, engine: IoEngine
    ) -> RecordFiles:
        """The files that are there; raises `StorageError` if one is missing or not of its exact size."""
        files: list[DataFile] = []
        try:
            for directory, num_bytes in zip(directories, layout.file_bytes, strict=True):
                files.append(engine.open_file(os.path.join(directory, name)))
                found_bytes = os.stat(files[-1].path).st_size
                if found_bytes != num_bytes:
                    raise StorageError(
                        f"found {found_bytes} bytes instead of {num_bytes} in",
                        path=files[-1].path,
                        advice="the store is damaged; delete it and create it again",
                    )
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(layout, files, engine)

    @property
    def records(self) -> tuple[RecordSpec, ...]:
        return self.layout.records

    @property
    def size_bytes(self) -> int:
        """Exact size of all its files together."""
        return self.layout.total_bytes

    def has(self, block: str, kind: str) -> bool:
        return self.layout.has(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> IoRequest:
        """Start to fill ``out`` [numel] with the record's elements from ``start_numel`` on."""
        start = self._start_byte(block, kind, start_numel, out)
        return self._move(self._engine.read, block, kind, start, out)

    def write(self, block: str, kind: str, start_numel: int, source: Tensor) -> IoRequest:
        """Start to put ``source`` [numel] at the record's elements from ``start_numel`` on."""
        start = self._start_byte(block, kind, start_numel, source)
        return self._move(self._engine.write, block, kind, start, source)

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """Fill ``out`` [numel], at any address and from any element on, through ``bounce``; return when done.

        ``bounce`` is an aligned uint8 buffer of at least two sectors that nobody else uses meanwhile.
        """
        start = self._start_byte(block, kind, start_numel, out)
        read, _ = self._sector_movers(block, kind)
        read_range(start, byte_tensor(out), bounce, read)

    def write_unaligned(
        self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor
    ) -> None:
        """Write ``source`` [numel] from any address to any element, through ``bounce``; return when done.

        Sectors that are only partly covered are read, changed and written, so nothing else may write to them.
        """
        start = self._start_byte(block, kind, start_numel, source)
        read, write = self._sector_movers(block, kind)
        write_range(start, byte_tensor(source), bounce, read, write)

    def sync(self) -> None:
        """Return when every write started before is on the medium.

        Raises the error of one under way that fails; one that failed before told whoever waits for it.
        """
        for request in self._unfinished():
            request.wait()
        for file in self._files:
            file.sync()

    def close(self) -> None:
        """Close the files once no request touches them, and delete scratch files; then do nothing."""
        if self.closed:
            return
        self.closed = True
        for request in self._unfinished():
            # Its error is for whoever waits for it. The descriptor must outlive it in any case.
            with suppress(Exception):
                request.wait()
        for file in self._files:
            file.close()
        if self._is_scratch:
            self.remove()

    def remove(self) -> None:
        """Close and delete the files."""
        self.close()
        _unlink(file.path for file in self._files)

    def __enter__(self) -> RecordFiles:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start_byte(self, block: str, kind: str, start_numel: int, tensor: Tensor) -> int:
        record = self.layout.record(block, kind)
        dtype = str(tensor.dtype).removeprefix("torch.")
        assert dtype == record.dtype, f"{kind} of {block} is {record.dtype}, the tensor {dtype}"
        assert 0 <= start_numel <= start_numel + tensor.numel() <= record.numel, "the range leaves its record"
        return start_numel * record.itemsize

    def _move(self, submit: Submit, block: str, kind: str, start: int, tensor: Tensor) -> IoRequest:
        """One request for the sectors of a record from byte ``start`` on, one transfer per path."""
        assert not self.closed, "the record files are closed"
        assert start % SECTOR_BYTES == 0, f"byte {start} of {kind} of {block} is not the start of a sector"
        view = sector_view(tensor)
        # A range of a record is one run in each path's file, however many rows it spans.
        first_offset: dict[int, int] = {}
        views: dict[int, list[memoryview]] = {}
        extents = self.layout.byte_extents(block, kind, start, view.nbytes)
        for path, file_offset, byte_offset, num_bytes in extents:
            first_offset.setdefault(path, file_offset)
            views.setdefault(path, []).append(view[byte_offset - start : byte_offset - start + num_bytes])
        request = submit(
            [Transfer(self._files[path], first_offset[path], tuple(views[path])) for path in views]
        )
        with self._requests_lock:
            self._requests.add(request)
        request.add_done_callback(self._forget)
        return request

    def _sector_movers(self, block: str, kind: str) -> tuple[MoveSectors, MoveSectors]:
        """Synchronous read and write of a record's sectors."""

        def mover(submit: Submit) -> MoveSectors:
            return lambda start, sectors: self._move(submit, block, kind, start, sectors).wait()

        return mover(self._engine.read), mover(self._engine.write)

    def _unfinished(self) -> list[IoRequest]:
        with self._requests_lock:
            return list(self._requests)

    def _forget(self, request: IoRequest) -> None:
        with self._requests_lock:
            self._requests.discard(request)


def _allocate(file: DataFile, num_bytes: int, available_bytes: int) -> None:
    """Free space was checked before, but others write to the disk too: a full one is a `CapacityError`."""
    try:
        file.allocate(num_bytes)
    except StorageError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        shortfall = Shortfall(file.path, num_bytes, available_bytes, "free space (or quota)")
        raise CapacityError([shortfall]) from error


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)

"""The files of one home. A home is one copy of the records. Each path has one preallocated file."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hf_lohan.files import SECTOR_BYTES, CapacityError, DataFile, Extent, IoEngine, StorageError, Transfer
from hf_lohan.files.data_file import MemorySpan
from hf_lohan.files.directories import no_room, sync_directory
from hf_lohan.files.errors import NO_ROOM
from hf_lohan.store.layout import StoreLayout


class HomeFiles:
    """One preallocated file per path. The records are striped over the files."""

    def __init__(self, layout: StoreLayout, files: Sequence[DataFile], *, is_scratch: bool = False) -> None:
        self.layout = layout
        self.closed = False
        self._is_scratch = is_scratch
        self._files = tuple(files)

    @classmethod
    def create(
        cls, layout: StoreLayout, directories: Sequence[str], name: str, engine: IoEngine, *, is_scratch: bool = False
    ) -> HomeFiles:
        """Create files of zeros, and replace existing files. ``is_scratch``: `close` deletes the files.

        Raises `CapacityError` or `StorageError`, and then leaves no file.
        """
        paths = [os.path.join(directory, name) for directory in directories]
        # Remove all old files first, because a new file may need the space of an old file of another path.
        _unlink(paths)
        files: list[DataFile] = []
        try:
            for directory, path, num_bytes in zip(directories, paths, layout.file_bytes, strict=True):
                with _no_room(path, num_bytes):
                    files.append(engine.open_file(path, create=True))
                    files[-1].allocate(num_bytes)
                    files[-1].sync()
                sync_directory(directory)
        except BaseException:
            cls(layout, files).remove()
            raise
        return cls(layout, files, is_scratch=is_scratch)

    @classmethod
    def open(
        cls, layout: StoreLayout, directories: Sequence[str], name: str, engine: IoEngine, *, is_read_only: bool = False
    ) -> HomeFiles:
        """Open existing files. Raises `StorageError` if a file is missing or has the wrong size."""
        files: list[DataFile] = []
        try:
            for directory, num_bytes in zip(directories, layout.file_bytes, strict=True):
                files.append(engine.open_file(os.path.join(directory, name), is_read_only=is_read_only))
                found_bytes = os.stat(files[-1].path).st_size
                if found_bytes != num_bytes:
                    raise StorageError(
                        f"expected {num_bytes} bytes but found {found_bytes} in",
                        path=files[-1].path,
                        advice="the store is damaged; delete it and resume from a checkpoint",
                    )
        except BaseException:
            for file in files:
                file.close()
            raise
        return cls(layout, files)

    def transfers(self, block: str, kind: str, start_byte: int, view: MemorySpan) -> list[Transfer]:
        """Return the transfers, at most one per path, between ``view`` and a record's bytes from ``start_byte`` on."""
        assert start_byte % SECTOR_BYTES == 0, f"byte {start_byte} of {kind} of {block} is not the start of a sector"
        # Any range of a record is contiguous in each path's file.
        first_offset: dict[int, int] = {}
        views: dict[int, list[MemorySpan]] = {}
        extents = self.layout.extents(block, kind, start_byte, view.nbytes)
        for path, file_offset, byte_offset, num_bytes in extents:
            first_offset.setdefault(path, file_offset)
            views.setdefault(path, []).append(view[byte_offset - start_byte : byte_offset - start_byte + num_bytes])
        return [Transfer(self._files[path], first_offset[path], tuple(views[path])) for path in views]

    def extents(self, block: str, kind: str, start_byte: int, num_bytes: int) -> list[tuple[str, Extent]]:
        """Like `StoreLayout.extents`, with the path of each extent's file."""
        extents = self.layout.extents(block, kind, start_byte, num_bytes)
        return [(self._files[extent.path_index].path, extent) for extent in extents]

    def sync(self) -> None:
        """Wait until every finished write is on the drive. Raises `CapacityError` or `StorageError`."""
        for file in self._files:
            with _no_room(file.path, file.unsynced_bytes):
                file.sync()

    def forget_failures(self) -> None:
        """Forget failed syncs, because the unsynced data is no longer needed."""
        for file in self._files:
            file.forget_failure()

    def close(self) -> None:
        """Close the files, and delete scratch files. No transfer may be in progress. Idempotent."""
        if self.closed:
            return
        self.closed = True
        for file in self._files:
            file.close()
        if self._is_scratch:
            self.remove()

    def remove(self) -> None:
        """Close and delete the files."""
        self.close()
        _unlink(file.path for file in self._files)


@contextmanager
def _no_room(path: str, needed_bytes: int) -> Iterator[None]:
    """Raise `CapacityError` for a full disk in this context. The free space was checked earlier, but other programs may
    have used it since."""
    before = no_room(path, needed_bytes)
    try:
        yield
    except StorageError as error:
        if error.errno not in NO_ROOM:
            raise
        raise CapacityError([before]) from error


def _unlink(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)

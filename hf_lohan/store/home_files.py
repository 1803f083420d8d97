"""One home of some records: a preallocated file per path, and where in them each byte of a record lies."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

from hf_lohan.files import SECTOR_BYTES, CapacityError, DataFile, Extent, IoEngine, StorageError, Transfer
from hf_lohan.files.directories import no_room, sync_directory
from hf_lohan.files.errors import NO_ROOM
from hf_lohan.store.layout import StoreLayout


class HomeFiles:
    """One preallocated file per path, and the records that lie across them."""

    def __init__(self, layout: StoreLayout, files: Sequence[DataFile], *, is_scratch: bool = False) -> None:
        self.layout = layout
        self.closed = False
        self._is_scratch = is_scratch
        self._files = tuple(files)

    @classmethod
    def create(
        cls, layout: StoreLayout, directories: Sequence[str], name: str, engine: IoEngine, *, is_scratch: bool = False
    ) -> HomeFiles:
        """New files full of zeros in place of any old ones; ``is_scratch`` deletes them on `close`.

        Raises `CapacityError` or `StorageError`, and then leaves none of them behind.
        """
        paths = [os.path.join(directory, name) for directory in directories]
        # All go before the first is made: they may share a file system and need each other's room.
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
    def open(cls, layout: StoreLayout, directories: Sequence[str], name: str, engine: IoEngine) -> HomeFiles:
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
        return cls(layout, files)

    def transfers(self, block: str, kind: str, start_byte: int, view: memoryview) -> list[Transfer]:
        """What moves ``view`` from or to a record's bytes from ``start_byte`` on: one transfer per path."""
        assert start_byte % SECTOR_BYTES == 0, f"byte {start_byte} of {kind} of {block} is not the start of a sector"
        # A range of a record is one run in each path's file, however many rows it spans.
        first_offset: dict[int, int] = {}
        views: dict[int, list[memoryview]] = {}
        extents = self.layout.extents(block, kind, start_byte, view.nbytes)
        for path, file_offset, byte_offset, num_bytes in extents:
            first_offset.setdefault(path, file_offset)
            views.setdefault(path, []).append(view[byte_offset - start_byte : byte_offset - start_byte + num_bytes])
        return [Transfer(self._files[path], first_offset[path], tuple(views[path])) for path in views]

    def extents(self, block: str, kind: str, start_byte: int, num_bytes: int) -> list[tuple[str, Extent]]:
        """`StoreLayout.extents` with the path of each one's file."""
        extents = self.layout.extents(block, kind, start_byte, num_bytes)
        return [(self._files[extent.path_index].path, extent) for extent in extents]

    def sync(self) -> None:
        """Return when every finished write is on the medium. Raises `CapacityError` or `StorageError`."""
        for file in self._files:
            with _no_room(file.path, file.unsynced_bytes):
                file.sync()

    def forget_failures(self) -> None:
        """Nobody wants what was written since the last `sync` that succeeded."""
        for file in self._files:
            file.forget_failure()

    def close(self) -> None:
        """Close the files, and delete scratch files. No transfer may be under way. A second time does nothing."""
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
    """Free space was checked before, but others write to the disk too: a full one is a `CapacityError`."""
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

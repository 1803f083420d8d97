"""Data files: the requirements of O_DIRECT, the system calls, and a file that transfers all bytes or raises."""

from __future__ import annotations

import errno
import fcntl
import logging
import mmap
import os
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, TypeAlias

import torch

from hf_lohan.files.directories import SECTOR_BYTES, no_room
from hf_lohan.files.errors import INODES, NO_ROOM, StorageError
from hf_lohan.threads import close_in_children, closing, raised_anew
from hf_lohan.wording import exact_bytes

logger = logging.getLogger(__name__)

_NO_FALLOCATE = {errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS}
_ZEROS_BYTES = 4 << 20


class DeviceSpan:
    """Bytes of device memory, which a `FileBackend` moves to or from a file if it can. Slices like a memoryview, and
    keeps the memory alive."""

    __slots__ = ("_content",)

    def __init__(self, content: torch.Tensor) -> None:
        """``content``: uint8 [num_bytes]."""
        assert content.dtype is torch.uint8 and content.is_contiguous()
        self._content = content

    @property
    def nbytes(self) -> int:
        return self._content.numel()

    @property
    def base(self) -> int:
        """Address of the allocation that has the bytes."""
        return self._content.untyped_storage().data_ptr()

    @property
    def offset(self) -> int:
        """Offset of the bytes in the allocation, in bytes."""
        return self._content.data_ptr() - self.base

    def __getitem__(self, part: slice) -> DeviceSpan:
        return DeviceSpan(self._content[part])


MemorySpan: TypeAlias = memoryview | DeviceSpan
"""Memory for a read or a write."""


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a contiguous tensor of any dtype and shape as uint8 ``[num_bytes]``."""
    assert tensor.is_contiguous(), "I/O needs contiguous memory"
    # Each call into torch may release the GIL.
    flat = tensor.detach() if tensor.requires_grad else tensor
    flat = flat if flat.dim() == 1 else flat.reshape(-1)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def sector_view(tensor: torch.Tensor) -> memoryview:
    """Return the memory of ``tensor``, which must be aligned and have whole sectors, as bytes for O_DIRECT."""
    flat = byte_tensor(tensor)
    assert flat.is_cpu, "only a DeviceSpan is device memory for I/O"
    assert flat.numel() % SECTOR_BYTES == 0, f"{flat.numel()} bytes are not whole {SECTOR_BYTES}-byte sectors"
    assert flat.data_ptr() % SECTOR_BYTES == 0 or not flat.numel(), "the buffer's address is not sector-aligned"
    return flat.numpy().data


class DeviceIoError(OSError):
    """The library for device memory refused a read or a write. ``text`` says why."""

    def __init__(self, number: int, text: str) -> None:
        super().__init__(number, text)
        self.text = text


class FileBackend:
    """The system calls of data files, which test doubles replace. Reads and writes may be short. All calls may raise
    ``OSError``."""

    def open(self, path: str, flags: int) -> int:
        return os.open(path, flags, 0o600)

    def close(self, fd: int) -> None:
        os.close(fd)

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        return os.preadv(fd, views, offset)

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        return os.pwritev(fd, views, offset)

    def read_to_device(self, fd: int, offset: int, span: DeviceSpan) -> int:
        raise DeviceIoError(errno.ENOTSUP, "this backend moves no device memory")

    def write_from_device(self, fd: int, offset: int, span: DeviceSpan) -> int:
        raise DeviceIoError(errno.ENOTSUP, "this backend moves no device memory")

    def allocate(self, fd: int, num_bytes: int) -> None:
        os.posix_fallocate(fd, 0, num_bytes)

    def sync(self, fd: int) -> None:
        os.fdatasync(fd)

    def set_buffered(self, fd: int) -> None:
        fcntl.fcntl(fd, fcntl.F_SETFL, fcntl.fcntl(fd, fcntl.F_GETFL) & ~os.O_DIRECT)


class DataFile:
    """An open file. It uses O_DIRECT if the file system supports that, or buffered I/O with one warning.

    Thread-safe. Every failure is a `StorageError` with path and offset.
    """

    def __init__(self, path: str, backend: FileBackend, *, create: bool, is_read_only: bool = False) -> None:
        self.path = path
        self.is_direct = True
        self._backend = backend
        self._fallback_lock = threading.Lock()
        self.unsynced_bytes = 0
        """Bytes written since the last `sync`."""
        self._unsynced_lock = threading.Lock()
        self._sync_failure: StorageError | None = None
        # A new file must not exist, so that it has zeros and our permissions. An existing file must not be a link.
        flags = (os.O_RDONLY if is_read_only else os.O_RDWR) | os.O_CLOEXEC
        flags |= os.O_CREAT | os.O_EXCL if create else os.O_NOFOLLOW
        try:
            try:
                self._fd = backend.open(path, flags | os.O_DIRECT)
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
                if create and os.path.lexists(path):  # some kernels create the file and then refuse to open it
                    os.unlink(path)
                self._fd = backend.open(path, flags)
                self._log_buffered("its file system does not open files with O_DIRECT")
                self.is_direct = False
        except OSError as error:
            raise self._failure("cannot open", error) from error
        close_in_children(self._fd)

    def read(self, offset: int, views: Sequence[MemorySpan]) -> None:
        """Fill ``views`` in order with the bytes from ``offset`` on."""
        self._move("read", offset, views)

    def write(self, offset: int, views: Sequence[MemorySpan]) -> None:
        """Write the bytes of ``views`` in order at ``offset``."""
        self._move("write", offset, views)
        self._count_unsynced(sum(view.nbytes for view in views))

    def allocate(self, num_bytes: int) -> None:
        """Give a new file its full size in zeros. Raises with ``errno`` ENOSPC if the disk is too full."""
        if num_bytes == 0:
            return
        try:
            self._backend.allocate(self._fd, num_bytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise self._failure("cannot reserve space for", error, needed_bytes=num_bytes) from error
            logger.warning("writing %d zeros to %s, because its file system cannot preallocate", num_bytes, self.path)
            self._write_zeros(num_bytes)

    def sync(self) -> None:
        """Wait until all finished writes are on the medium.

        After a failed sync, the kernel drops the data from the page cache, and a second sync would succeed without it.
        So every later call raises the first error, until `forget_failure`.
        """
        if self._sync_failure is not None:
            raise raised_anew(self._sync_failure)
        covered_bytes = self.unsynced_bytes
        try:
            self._backend.sync(self._fd)
        except OSError as error:
            failure = self._failure("cannot sync", error, needed_bytes=covered_bytes)
            self._sync_failure = None if self.is_direct else failure
            raise failure from error
        self._count_unsynced(-covered_bytes)

    def forget_failure(self) -> None:
        """Ignore a failed sync, because the unsynced data is no longer needed."""
        self._sync_failure = None

    def close(self) -> None:
        closing(self._fd)
        self._backend.close(self._fd)

    def _move(self, verb: Literal["read", "write"], offset: int, views: Sequence[MemorySpan]) -> None:
        wanted_bytes = sum(view.nbytes for view in views)
        done_bytes = 0
        while done_bytes < wanted_bytes:
            was_direct = self.is_direct
            try:
                moved_bytes = self._move_some(verb, offset + done_bytes, views)
            except OSError as error:
                if error.errno == errno.EINVAL and was_direct:
                    self._fall_back(f"its file system refuses an O_DIRECT {verb}")
                    continue
                rest_bytes = wanted_bytes - done_bytes
                raise self._failure(f"cannot {verb}", error, offset + done_bytes, needed_bytes=rest_bytes) from error
            if moved_bytes == 0:
                raise StorageError(
                    f"{verb} ended after {done_bytes} of {wanted_bytes} bytes in",
                    path=self.path,
                    offset=offset + done_bytes,
                    errno=errno.EIO,
                    advice="the file was cut off or the disk fails; delete the store and resume from a checkpoint",
                )
            moved_bytes = self._resumable_bytes(moved_bytes)
            done_bytes += moved_bytes
            views = _after(views, moved_bytes)

    def _move_some(self, verb: Literal["read", "write"], offset: int, views: Sequence[MemorySpan]) -> int:
        """Move the first view if it is device memory, or else all host memory before device memory. May be short."""
        first, backend = views[0], self._backend
        if isinstance(first, DeviceSpan):
            return (backend.read_to_device if verb == "read" else backend.write_from_device)(self._fd, offset, first)
        host: list[memoryview] = []
        for view in views:
            if isinstance(view, DeviceSpan):
                break
            host.append(view)
        return (backend.read if verb == "read" else backend.write)(self._fd, offset, host)

    def _resumable_bytes(self, moved_bytes: int) -> int:
        """Return how many bytes of a short call count, because direct I/O can resume only at the start of a sector."""
        if not self.is_direct or moved_bytes % SECTOR_BYTES == 0:
            return moved_bytes
        if moved_bytes < SECTOR_BYTES:
            self._fall_back("it moved less than one sector with O_DIRECT")
            return moved_bytes
        return moved_bytes - moved_bytes % SECTOR_BYTES

    def _fall_back(self, reason: str) -> None:
        with self._fallback_lock:
            if self.is_direct:
                self._log_buffered(reason)
                self._backend.set_buffered(self._fd)
                self.is_direct = False

    def _log_buffered(self, reason: str) -> None:
        logger.warning("using buffered I/O for %s, because %s", self.path, reason)

    def _write_zeros(self, num_bytes: int) -> None:
        zeros = memoryview(mmap.mmap(-1, min(num_bytes, _ZEROS_BYTES)))  # a mapping is aligned
        for offset in range(0, num_bytes, _ZEROS_BYTES):
            self.write(offset, [zeros[: num_bytes - offset]])

    def _count_unsynced(self, num_bytes: int) -> None:
        with self._unsynced_lock:
            self.unsynced_bytes += num_bytes

    def _failure(
        self, problem: str, error: OSError, offset: int | None = None, *, needed_bytes: int = 0
    ) -> StorageError:
        advice = "check the disk, its free space and the permissions of this path"
        if isinstance(error, DeviceIoError):
            advice = f"{error.text}; set gpu_direct: false, and check the drive, its free space and its permissions"
        if error.errno in NO_ROOM:
            missing = no_room(self.path, needed_bytes)
            free = exact_bytes(missing.available_bytes)
            advice = f"it needs {exact_bytes(needed_bytes)} but {free} are free; free some space"
            if missing.limit == INODES:
                advice = f"its file system has no inode left ({free} are free); delete some files"
        return StorageError(problem, path=self.path, offset=offset, errno=error.errno, advice=advice)


def _after(views: Sequence[MemorySpan], num_bytes: int) -> list[MemorySpan]:
    """Return the rest of ``views`` after their first ``num_bytes``."""
    starts = accumulate((view.nbytes for view in views), initial=0)
    rest = [view[max(0, num_bytes - start) :] for view, start in zip(views, starts, strict=False)]
    return [view for view in rest if view.nbytes]

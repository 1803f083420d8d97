"""A directory lock, so that only one process uses a store. The kernel releases it even if the process is killed."""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress

from hf_lohan.files.directories import SECTOR_BYTES, make_directory, no_room
from hf_lohan.files.errors import NO_ROOM, CapacityError, StorageError, StoreInUseError
from hf_lohan.threads import Owner, close_in_children, closing

LOCK_NAME = "lock"
_UNWRITABLE = (errno.EROFS, errno.EACCES, errno.EPERM)


class DirectoryLock:
    """The lock of a store directory, which is created if needed. It is held from construction until `close`.
    ``is_read_only``: the directory exists, and may be one in which this process cannot write.

    Raises `StoreInUseError` with the directory and the pid of the process that holds the lock, or `StorageError` if the
    directory cannot be locked. The lock file is never removed, because then two processes could hold the lock.
    """

    def __init__(self, directory: str, *, is_read_only: bool = False) -> None:
        self._owner = Owner()
        if not is_read_only:
            make_directory(directory)
        file = os.path.join(directory, LOCK_NAME)
        try:
            self._fd, self._names_holder = _open(file, is_read_only=is_read_only)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise CapacityError([no_room(directory, SECTOR_BYTES)]) from error
            advice = "make the directory writable or choose another"
            raise StorageError("cannot open the lock", path=file, errno=error.errno, advice=advice) from error
        try:
            self._lock(directory)
        except BaseException:
            os.close(self._fd)
            raise
        close_in_children(self._fd)  # a data loader's worker may outlive its killed parent

    def close(self) -> None:
        """Release the directory. Does nothing in a forked child."""
        if self._owner.is_here:
            closing(self._fd)
            os.close(self._fd)

    def _lock(self, directory: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._names_holder:
                os.ftruncate(self._fd, 0)
                os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = ""
            with suppress(IsADirectoryError):
                holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip()
            raise StoreInUseError(
                f"the store in {directory} is in use by process {holder or 'unknown'}; end that run or choose "
                "another directory"
            ) from None
        except OSError as error:
            advice = "its file system cannot lock files, or `lock` in it is not a file; choose a local directory"
            raise StorageError("cannot lock", path=directory, errno=error.errno, advice=advice) from error


def _open(file: str, *, is_read_only: bool) -> tuple[int, bool]:
    """Open the file to lock, and return whether it can be written. If the file is missing in a read-only directory,
    open the directory instead."""
    flags = os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT | flags, 0o600), True
    except OSError as error:
        if not (is_read_only and error.errno in _UNWRITABLE):
            raise
    try:
        return os.open(file, os.O_RDONLY | flags), False
    except FileNotFoundError:
        return os.open(os.path.dirname(file), os.O_RDONLY | flags), False

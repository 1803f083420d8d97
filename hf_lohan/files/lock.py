"""One process, one store: a lock that the kernel takes back however its holder ends."""

from __future__ import annotations

import fcntl
import os

from hf_lohan.files.directories import SECTOR_BYTES, make_directory, no_room
from hf_lohan.files.errors import NO_ROOM, CapacityError, StorageError, StoreInUseError
from hf_lohan.threads import Owner, close_in_children, closing

LOCK_NAME = "lock"


class DirectoryLock:
    """Holds a store directory, made if need be, from construction to `close`.

    Raises `StoreInUseError` naming the directory and its holder's pid, `StorageError` if it cannot be locked.
    The file stays: to unlink a locked file would let two processes each hold "the" lock.
    """

    def __init__(self, directory: str) -> None:
        self._owner = Owner()
        make_directory(directory)
        file = os.path.join(directory, LOCK_NAME)
        try:
            self._fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            if error.errno in NO_ROOM:
                raise CapacityError([no_room(directory, SECTOR_BYTES)]) from error
            advice = "make the directory writable or choose another"
            raise StorageError("cannot open the lock", path=file, errno=error.errno, advice=advice) from error
        try:
            self._take(directory)
        except BaseException:
            os.close(self._fd)
            raise
        close_in_children(self._fd)  # a data loader's worker may live on when its parent is killed

    def close(self) -> None:
        """Let the directory go. In a forked child: do nothing."""
        if self._owner.is_here:
            closing(self._fd)
            os.close(self._fd)

    def _take(self, directory: str) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)
        except BlockingIOError:
            holder = os.pread(self._fd, 32, 0).decode(errors="replace").strip() or "unknown"
            raise StoreInUseError(
                f"the store in {directory} is in use by process {holder}: end that run or choose another directory"
            ) from None
        except OSError as error:
            advice = "its file system cannot lock files, or `lock` in it is no file; choose a local one"
            raise StorageError("cannot lock", path=directory, errno=error.errno, advice=advice) from error

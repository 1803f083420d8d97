"""Shares bytes between files instead of copying them, on file systems with reflinks (Btrfs, XFS)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from hf_lohan.files.errors import StorageError


class Extent(NamedTuple):
    """A range of a record's bytes that is contiguous in one file. `path_index` is the index of the file's SSD path."""

    path_index: int
    file_offset: int
    record_byte_offset: int
    num_bytes: int


_FICLONERANGE = 0x4020940D  # _IOW(0x94, 13, struct file_clone_range), as on x86 and Arm
_RANGE = struct.Struct("=qQQQ")  # source fd, source offset, bytes, target offset
_NOT_HERE = (
    *(errno.EOPNOTSUPP, errno.ENOTTY, errno.ENOSYS, errno.EACCES, errno.ETXTBSY),
    errno.EXDEV,  # two file systems
    errno.EINVAL,  # no reflinks here, or blocks larger than our alignment
    errno.EPERM,  # immutable or append-only files, sandboxes
)
"""Errors after which bytes are copied instead, as `cp --reflink=auto` does."""


def clone_range(source_fd: int, source_offset: int, num_bytes: int, target_fd: int, target_offset: int) -> bool:
    """Make a range of the target file share the source's blocks, which takes almost no time and space.

    Offsets and ``num_bytes`` are multiples of the file system's block size (nearly always 4096). The target grows if
    needed. Returns False if these files cannot share blocks and must be copied. Raises `StorageError` for any other
    failure.
    """
    if num_bytes == 0:  # the kernel would clone up to the end of the file
        return True
    try:
        fcntl.ioctl(target_fd, _FICLONERANGE, _RANGE.pack(source_fd, source_offset, num_bytes, target_offset))
    except OSError as error:
        if error.errno in _NOT_HERE:
            return False
        raise StorageError(
            f"cannot clone {num_bytes} bytes into",
            path=_path_of(target_fd),
            offset=target_offset,
            errno=error.errno,
            advice="check the disk and its free space",
        ) from error
    return True


class RecordCloner:
    """Clones whole records to other files. After the first failure it tries no other record, because all would fail."""

    def __init__(self) -> None:
        self._is_possible = True
        self._source_fds: dict[str, int] = {}

    def clone(self, sources: Sequence[tuple[str, Extent]], target_fd: int, target_offset: int) -> bool:
        """Clone a record to ``target_offset``. ``sources`` are its files and extents. Returns False if it failed, maybe
        after some parts were cloned."""
        self._is_possible = self._is_possible and all(
            clone_range(
                self._open(path),
                extent.file_offset,
                extent.num_bytes,
                target_fd,
                target_offset + extent.record_byte_offset,
            )
            for path, extent in sources
        )
        return self._is_possible

    def _open(self, path: str) -> int:
        if path not in self._source_fds:
            self._source_fds[path] = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        return self._source_fds[path]

    def close(self) -> None:
        """Close the source files."""
        while self._source_fds:
            os.close(self._source_fds.popitem()[1])


def _path_of(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return f"file descriptor {fd}"

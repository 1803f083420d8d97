"""Small files that are replaced whole or not at all, and are there to stay."""

from __future__ import annotations

import os
from contextlib import suppress

from hf_lohan.files.directories import free_bytes_beside, sync_directory
from hf_lohan.files.errors import NO_ROOM, CapacityError, Shortfall, StorageError


def replace_durably(file: str, content: bytes) -> None:
    """Write new, fsync, rename, fsync the directory. Private to this user.

    Raises `CapacityError` or `StorageError`. Then the old file is as it was, or, if only the last fsync failed, the new
    one is there and a power cut may bring the old one back.
    """
    fresh = f"{file}.new"
    try:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        _write_new(fresh, content)
        os.replace(fresh, file)
        sync_directory(os.path.dirname(file))
    except OSError as error:
        with suppress(OSError):
            os.unlink(fresh)
        raise write_failure(file, len(content), error) from error


def remove_durably(file: str) -> None:
    """Remove the file, if it is there, to stay removed. Raises `StorageError`."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(file)
            sync_directory(os.path.dirname(file))
    except OSError as error:
        advice = "check that its directory is writable, and the disk"
        raise StorageError("cannot remove", path=file, errno=error.errno, advice=advice) from error


def read_whole(file: str) -> bytes:
    """The content of a small file, which no link may lead elsewhere. Raises OSError."""
    fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with open(fd, "rb") as stream:
        return stream.read()


def write_all(fd: int, content: bytes, offset: int = 0) -> None:
    """Put ``content`` at ``offset``, in as many calls as it takes. Raises OSError."""
    rest = memoryview(content)
    while rest:
        written_bytes = os.pwrite(fd, rest, offset)
        rest, offset = rest[written_bytes:], offset + written_bytes


def write_failure(path: str, needed_bytes: int, error: OSError) -> CapacityError | StorageError:
    """The error to raise when writing ``needed_bytes`` to ``path`` failed."""
    if error.errno in NO_ROOM:
        return CapacityError([Shortfall(path, needed_bytes, free_bytes_beside(path), "free space (or quota)")])
    advice = "check that the directory is there and writable, and the disk"
    return StorageError("cannot write", path=path, errno=error.errno, advice=advice)


def _write_new(file: str, content: bytes) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)

"""Durable small files, which are replaced atomically or appended to."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

from hf_lohan.files.directories import make_folders, no_room, sync_directory
from hf_lohan.files.errors import NO_ROOM, CapacityError, StorageError

_FOREIGN_ADVICE = "delete it, or choose another directory"
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS)
"""Errors of file systems without hard links, such as exFAT."""
_LOG_ADVICE = "the store is damaged; resume from a checkpoint"


def replace_durably(file: str, content: bytes, *, kept_as: str | None = None) -> None:
    """Write a new file, sync it, rename it to ``file``, and sync the directory. Only this user can access the file.
    ``kept_as`` is a second name for the old file in the same folder. This name exists whenever the new file exists.

    Raises `CapacityError` or `StorageError` and leaves the old file unchanged. If only the last sync failed, the new
    file is in place, and a power cut may restore the old file.
    """
    fresh = f"{file}.new"
    try:
        with suppress(FileNotFoundError):
            os.unlink(fresh)
        _write_new(fresh, content)
        if kept_as is not None:
            _keep(file, kept_as)
        os.replace(fresh, file)
        sync_directory(os.path.dirname(file))
    except OSError as error:
        with suppress(OSError):
            os.unlink(fresh)
        raise write_failure(file, len(content), error) from error


def _keep(file: str, kept_as: str) -> None:
    """Give a file a second name, as a hard link or a copy. Raises OSError. Changes of a folder become durable in their
    order, so the caller's later sync of the folder also covers the second name."""
    with suppress(FileNotFoundError):
        os.unlink(kept_as)
    try:
        os.link(file, kept_as)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        _write_new(kept_as, read_whole(file))


def remove_durably(file: str) -> None:
    """Remove the file, if it exists, so that a power cut does not restore it. Raises `StorageError`."""
    try:
        with suppress(FileNotFoundError):
            os.unlink(file)
            sync_directory(os.path.dirname(file))
    except OSError as error:
        raise _removal_failure(file, error) from error


def read_whole(file: str, max_bytes: int = 1 << 30) -> bytes:
    """Return the content of a small file, without following links. Raises FileNotFoundError, or `StorageError` if the
    file cannot be read, is too large, or is not regular (a pipe or device may never end)."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise StorageError("expected a regular file at", path=file, advice=_FOREIGN_ADVICE)
            if status.st_size > max_bytes:
                problem = f"{status.st_size} bytes are more than expected in"
                raise StorageError(problem, path=file, advice=_FOREIGN_ADVICE)
            parts: list[bytes] = []
            while part := os.read(fd, status.st_size - sum(map(len, parts))):
                parts.append(part)
            return b"".join(parts)
        finally:
            os.close(fd)
    except (FileNotFoundError, StorageError):
        raise
    except OSError as error:
        advice = "check its permissions and the disk"
        raise StorageError("cannot read", path=file, errno=error.errno, advice=advice) from error


def write_folder(folder: str, files: Mapping[str, bytes]) -> None:
    """Replace a folder durably by a folder with these files. ``files`` maps names or relative paths to contents. Only
    this user can access the folder. Raises `CapacityError` or `StorageError`."""
    try:
        remove_folder(folder)
        folders = [folder]
        for name in files:
            path = os.path.dirname(os.path.join(folder, name))
            folders += [path] if path not in folders else []
        for path in folders:
            make_folders(path, mode=0o700)
        for name, content in files.items():
            _write_new(os.path.join(folder, name), content)
        for path in reversed(folders):
            sync_directory(path)
        sync_directory(os.path.dirname(folder))
    except StorageError:
        raise
    except OSError as error:
        raise write_failure(folder, sum(map(len, files.values())), error) from error


def remove_folder(folder: str) -> None:
    """Remove a folder and its content, if it exists. A power cut may restore parts. Raises `StorageError`."""
    try:
        if os.path.islink(folder) or os.path.isfile(folder):
            os.unlink(folder)
        for parent, folders, names in os.walk(folder, topdown=False):
            for path in (os.path.join(parent, name) for name in (*names, *folders)):
                if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path)):
                    os.unlink(path)
            os.rmdir(parent)
    except OSError as error:
        raise _removal_failure(folder, error) from error


def write_all(fd: int, content: bytes, offset: int = 0) -> None:
    """Write all of ``content`` at ``offset``. Raises OSError."""
    rest = memoryview(content)
    while rest:
        written_bytes = os.pwrite(fd, rest, offset)
        rest, offset = rest[written_bytes:], offset + written_bytes


def write_failure(path: str, needed_bytes: int, error: OSError) -> CapacityError | StorageError:
    """Return the error to raise after writing ``needed_bytes`` to ``path`` failed."""
    if error.errno in NO_ROOM:
        return CapacityError([no_room(path, needed_bytes)])
    advice = "check that the directory exists and is writable, and check the disk"
    return StorageError("cannot write", path=path, errno=error.errno, advice=advice)


def _removal_failure(path: str, error: OSError) -> StorageError:
    advice = "check that its directory is writable, and check the disk"
    return StorageError("cannot remove", path=path, errno=error.errno, advice=advice)


def _write_new(file: str, content: bytes) -> None:
    fd = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        write_all(fd, content)
        os.fsync(fd)
    finally:
        os.close(fd)


@dataclass(frozen=True, slots=True)
class AppendedLog:
    """A file of appended lines. An append first removes lines that a killed run wrote after its last commit."""

    path: str

    def append(self, committed_bytes: int, lines: bytes) -> int:
        """Append ``lines`` after the first ``committed_bytes``, durably. Returns the new length.

        Raises `CapacityError` or `StorageError`, and then leaves the first ``committed_bytes`` unchanged.
        """
        if not lines:
            return committed_bytes
        is_new = not os.path.lexists(self.path)
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                if os.fstat(fd).st_size < committed_bytes:  # ftruncate would fill the gap with zeros
                    raise StorageError(f"fewer than {committed_bytes} bytes are in", path=self.path, advice=_LOG_ADVICE)
                os.ftruncate(fd, committed_bytes)
                write_all(fd, lines, committed_bytes)
                os.fsync(fd)
            finally:
                os.close(fd)
            if is_new:
                sync_directory(os.path.dirname(self.path))
        except StorageError:
            raise
        except OSError as error:
            raise write_failure(self.path, len(lines), error) from error
        return committed_bytes + len(lines)

    def read(self, start_byte: int, stop_byte: int) -> bytes:
        """Return a range of bytes. Raises `StorageError` if they are missing."""
        if start_byte == stop_byte:
            return b""
        try:
            content = read_whole(self.path)
        except FileNotFoundError:
            raise StorageError("cannot find", path=self.path, advice=_LOG_ADVICE) from None
        if len(content) < stop_byte:
            raise StorageError(f"fewer than {stop_byte} bytes are in", path=self.path, advice=_LOG_ADVICE)
        return content[start_byte:stop_byte]

"""A file that only grows, and of which a commit says how much belongs to it."""

from __future__ import annotations

import os
from dataclasses import dataclass

from hf_lohan.files.directories import sync_directory
from hf_lohan.files.durable_file import read_whole, write_all, write_failure
from hf_lohan.files.errors import StorageError

_ADVICE = "the store is damaged; resume from a checkpoint"


@dataclass(frozen=True, slots=True)
class AppendedLog:
    """Lines behind one another. What a killed run appended after its last commit is cut off when writing goes on."""

    path: str

    def append(self, committed_bytes: int, lines: bytes) -> int:
        """Make ``lines`` follow the first ``committed_bytes``, durably; returns how long the log is then.

        Raises `CapacityError` or `StorageError`, and then the first ``committed_bytes`` are as they were.
        """
        if not lines:
            return committed_bytes
        try:
            self._append(committed_bytes, lines)
        except StorageError:
            raise
        except OSError as error:
            raise write_failure(self.path, len(lines), error) from error
        return committed_bytes + len(lines)

    def read(self, start_byte: int, stop_byte: int) -> bytes:
        """Those bytes of it. Raises `StorageError` if they are not there."""
        if start_byte == stop_byte:
            return b""
        try:
            content = read_whole(self.path)
        except OSError as error:
            raise StorageError("cannot read", path=self.path, errno=error.errno, advice=_ADVICE) from error
        if len(content) < stop_byte:
            raise StorageError(f"{stop_byte} bytes are not in", path=self.path, advice=_ADVICE)
        return content[start_byte:stop_byte]

    def _append(self, committed_bytes: int, lines: bytes) -> None:
        is_new = not os.path.lexists(self.path)
        fd = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(fd).st_size < committed_bytes:  # growing it would put zeros where lines were
                raise StorageError(f"{committed_bytes} bytes are not in", path=self.path, advice=_ADVICE)
            os.ftruncate(fd, committed_bytes)
            write_all(fd, lines, committed_bytes)
            os.fsync(fd)
        finally:
            os.close(fd)
        if is_new:
            sync_directory(os.path.dirname(self.path))

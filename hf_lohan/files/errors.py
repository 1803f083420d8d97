"""Storage errors. Each message is one line that says what to do."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from dataclasses import dataclass

from hf_lohan.wording import exact_bytes

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)
"""Error numbers of a full disk or an exhausted quota."""


class StorageError(OSError):
    """Input or output failed. Has ``errno``, ``path`` and ``offset`` (in bytes, if known)."""

    def __init__(
        self, problem: str, *, path: str, advice: str, errno: int | None = None, offset: int | None = None
    ) -> None:
        where = path if offset is None else f"{path} at byte {offset}"
        reason = "" if errno is None else f" ({os.strerror(errno)})"
        self.message = f"{problem} {where}{reason}: {advice}"
        super().__init__(errno, self.message)
        self.path = path
        self.offset = offset

    def __str__(self) -> str:
        return self.message


class DiskFullError(StorageError):
    """A file of another library, whose size is not known, did not fit."""


class CorruptionError(StorageError):
    """Bytes that were read differ from the written bytes. The message names block, record, path and offset."""


class TornStoreError(ValueError):
    """The store has no complete step, because its run ended while it changed records in place."""


class StoreInUseError(RuntimeError):
    """Another process, or another store in this process, has locked a store directory."""


class ForeignStoreError(ValueError):
    """The directory has files that are not this model's store and must not be overwritten."""


INODES = "inodes"


@dataclass(frozen=True)
class Shortfall:
    """A path that lacks space. ``limit`` is "capacity", "free space" or another limit that was reached."""

    path: str
    needed_bytes: int
    available_bytes: int
    limit: str

    def __str__(self) -> str:
        available = exact_bytes(self.available_bytes)
        if self.limit == INODES:
            return f"the file system of {self.path} has no inode left for another file ({available} are free)"
        return f"{self.path} needs {exact_bytes(self.needed_bytes)} but its {self.limit} is {available}"


class CapacityError(ValueError):
    """The records do not fit on the paths. ``shortfalls`` has the numbers."""

    def __init__(self, shortfalls: Sequence[Shortfall], *, may_delete: str = "") -> None:
        """``may_delete`` names folders that no run needs."""
        self.shortfalls = tuple(shortfalls)
        listed = "; ".join(map(str, self.shortfalls))
        free = f"Free space (you may delete {may_delete})" if may_delete else "Free space"
        super().__init__(f"the store does not fit: {listed}. {free}, raise `capacity` or add an ssd path")

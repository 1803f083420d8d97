"""Where bytes lie: directories, and runs of bytes in their files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class StorePath:
    """A directory of a store and how much it may hold; None: all the free space of its file system."""

    path: str
    capacity_bytes: int | None = None


class Extent(NamedTuple):
    """A run of bytes that is contiguous both in its record and in one path's file."""

    path_index: int
    file_offset: int
    record_byte_offset: int
    num_bytes: int

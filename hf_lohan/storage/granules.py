"""The unit of versions and checksums: a run of elements of one record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash

GRANULE_NUMEL = 16 * 1024
"""Small enough that small parameters waste little when they are rewritten, large enough that 8 bytes of checksum and
one of version are nothing beside it: 32 or 64 KiB of data."""

Checksums = npt.NDArray[np.uint64]


def granules_of(numel: int, granule_numel: int = GRANULE_NUMEL) -> int:
    """How many granules hold ``numel`` elements; the last may be short."""
    return -(-numel // granule_numel)


def checksums(view: memoryview, granule_bytes: int) -> Checksums:
    """xxh3 (64 bits) of each granule of ``view``, the last of which may be short."""
    starts = range(0, view.nbytes, granule_bytes)
    values = (xxhash.xxh3_64_intdigest(view[start : start + granule_bytes]) for start in starts)
    return np.fromiter(values, dtype=np.uint64, count=len(starts))


def runs(values: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of each run of equal neighbours."""
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield int(values[start]), start, stop

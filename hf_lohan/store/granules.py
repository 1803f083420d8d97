"""The unit of versions and checksums: a run of elements of one record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from torch import Tensor

from hf_lohan.store.xxh3 import granule_hashing

GRANULE_NUMEL = 16 * 1024
"""Small enough that small parameters waste little when they are rewritten, large enough that 8 bytes of checksum and
one of version are nothing beside it: 32 or 64 KiB of data."""

Checksums = npt.NDArray[np.uint64]


def granules_of(numel: int, granule_numel: int = GRANULE_NUMEL) -> int:
    """How many granules hold ``numel`` elements; the last may be short."""
    return -(-numel // granule_numel)


def checksums(source: Tensor, granule_bytes: int) -> Checksums:
    """xxh3 (64 bits) of each granule of ``source``, contiguous and in RAM, the last of which may be short."""
    return granule_hashing()(source.data_ptr(), source.nbytes, granule_bytes)


def runs(values: npt.NDArray[np.uint8]) -> Iterator[tuple[int, int, int]]:
    """(value, start, stop) of each run of equal neighbours."""
    content = values.tobytes()
    if content and content.count(content[0]) == len(content):  # nearly always, and then much cheaper
        yield content[0], 0, len(content)
        return
    edges = [0, *(np.flatnonzero(np.diff(values)) + 1).tolist(), len(values)]
    for start, stop in pairwise(edges):
        if start < stop:
            yield int(values[start]), start, stop

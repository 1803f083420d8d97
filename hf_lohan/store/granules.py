"""The unit of versions and checksums: a run of elements of one record."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import xxhash
from torch import Tensor

from hf_lohan.files.buffers import byte_tensor

GRANULE_NUMEL = 16 * 1024
"""Elements in the smallest granule that a model's records have. Small models have these."""
MAX_GRANULE_NUMEL = 256 * 1024
"""Large models have these: their tables of versions stay small, and `xxhash` lets other threads run while it hashes
one. (It does so above 64 KiB.)"""

Checksums = npt.NDArray[np.uint64]


def granules_of(numel: int, granule_numel: int) -> int:
    """How many granules hold ``numel`` elements; the last may be short."""
    return -(-numel // granule_numel)


def checksums(source: Tensor, granule_bytes: int) -> Checksums:
    """xxh3 (64 bits) of each granule of ``source``, contiguous and in RAM, the last of which may be short."""
    content = byte_tensor(source).numpy().data
    starts = range(0, len(content), granule_bytes)
    return np.array([xxhash.xxh3_64_intdigest(content[start : start + granule_bytes]) for start in starts], np.uint64)


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

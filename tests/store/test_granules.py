from __future__ import annotations

import os
from itertools import pairwise

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from xxhash import _xxhash

from hf_lohan.store import GRANULE_NUMEL, MAX_GRANULE_NUMEL, checksums, granules_of
from hf_lohan.store.versions import runs


@pytest.mark.parametrize(
    ("numel", "expected"), [(0, 0), (1, 1), (GRANULE_NUMEL, 1), (GRANULE_NUMEL + 1, 2), (10 * GRANULE_NUMEL, 10)]
)
def test_the_last_granule_may_be_short(numel: int, expected: int) -> None:
    assert granules_of(numel, GRANULE_NUMEL) == expected


def bytes_of(content: bytes | bytearray) -> torch.Tensor:
    return torch.tensor(list(content), dtype=torch.uint8)


@given(st.integers(0, 5000), st.integers(1, 1000))
def test_each_granule_has_the_hash_of_its_own_bytes(num_bytes: int, granule_bytes: int) -> None:
    content = os.urandom(num_bytes)
    found = checksums(bytes_of(content), granule_bytes)
    parts = [content[start : start + granule_bytes] for start in range(0, num_bytes, granule_bytes)]
    assert found.dtype == np.uint64 and found.tolist() == [xxhash.xxh3_64_intdigest(part) for part in parts]


def test_xxhash_releases_the_gil_for_a_large_granule() -> None:
    assert MAX_GRANULE_NUMEL * torch.bfloat16.itemsize > _xxhash._GIL_MINSIZE  # type: ignore[attr-defined]


@given(st.binary(min_size=1, max_size=2000), st.data())
def test_any_flipped_bit_changes_one_checksum(content: bytes, data: st.DataObject) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    flipped = bytearray(content)
    flipped[bit // 8] ^= 1 << bit % 8
    differs = checksums(bytes_of(content), 100) != checksums(bytes_of(flipped), 100)
    assert np.flatnonzero(differs).tolist() == [bit // 800]


@given(st.lists(st.integers(0, 2), max_size=30))
def test_runs_have_their_values_and_are_contiguous(values: list[int]) -> None:
    found = list(runs(np.array(values, np.uint8)))
    assert [value for value, start, stop in found for _ in range(start, stop)] == values
    assert [start for _, start, _ in found] == [0, *(stop for _, _, stop in found)][: len(found)]
    assert all(left[0] != right[0] for left, right in pairwise(found))

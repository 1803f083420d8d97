from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial

import pytest
import torch
import xxhash

from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.store.xxh3 import digest_function, granule_hashing, in_python, one_by_one


@pytest.mark.parametrize("digest", [digest_function(), in_python])
@pytest.mark.parametrize("num_bytes", [0, 1, 16, 17, 128, 129, 240, 241, 1023, 1025, 32768, 65536, 65537])
def test_it_is_xxh3_for_each_of_its_ways_to_treat_a_size(digest: object, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    memory = torch.tensor(list(content), dtype=torch.uint8)
    assert callable(digest) and digest(memory.data_ptr(), num_bytes) == xxhash.xxh3_64_intdigest(content)


@pytest.mark.parametrize("num_bytes", [0, 1, 4095, 4096, 4097, 3 * 4096, 5 * 4096 + 17])
def test_each_granule_is_hashed_the_last_may_be_short(num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    memory = torch.tensor(list(content), dtype=torch.uint8)
    expected = [xxhash.xxh3_64_intdigest(content[start : start + 4096]) for start in range(0, num_bytes, 4096)]
    for hash_granules in (granule_hashing(), partial(one_by_one, digest_function()), partial(one_by_one, in_python)):
        assert hash_granules(memory.data_ptr(), num_bytes, 4096).tolist() == expected


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread that does not let go of Python's lock keeps it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before_s)


def test_others_run_while_a_granule_is_hashed(no_forced_switches: None) -> None:
    hash_granules, granule = granule_hashing(), torch.zeros(GRANULE_NUMEL)
    num_left, stops = 100_000, threading.Event()

    def hash_on() -> None:
        nonlocal num_left
        while num_left and not stops.is_set():
            hash_granules(granule.data_ptr(), granule.nbytes, granule.nbytes)
            num_left -= 1

    thread = threading.Thread(target=hash_on)
    thread.start()
    stops.set()
    thread.join()
    assert num_left > 0

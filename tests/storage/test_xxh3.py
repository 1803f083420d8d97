from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch
import xxhash

from hf_lohan.storage.granules import GRANULE_NUMEL
from hf_lohan.storage.xxh3 import digest_function, in_python


@pytest.mark.parametrize("digest", [digest_function(), in_python])
@pytest.mark.parametrize("num_bytes", [0, 1, 16, 17, 128, 129, 240, 241, 1023, 1025, 32768, 65536, 65537])
def test_it_is_xxh3_for_each_of_its_ways_to_treat_a_size(digest: object, num_bytes: int) -> None:
    content = os.urandom(num_bytes)
    memory = torch.tensor(list(content), dtype=torch.uint8)
    assert callable(digest) and digest(memory.data_ptr(), num_bytes) == xxhash.xxh3_64_intdigest(content)


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """A thread that does not let go of Python's lock keeps it."""
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before_s)


def test_others_run_while_a_granule_is_hashed(no_forced_switches: None) -> None:
    digest, granule = digest_function(), torch.zeros(GRANULE_NUMEL)
    num_left, stops = 100_000, threading.Event()

    def hash_on() -> None:
        nonlocal num_left
        while num_left and not stops.is_set():
            digest(granule.data_ptr(), granule.nbytes)
            num_left -= 1

    thread = threading.Thread(target=hash_on)
    thread.start()
    stops.set()
    thread.join()
    assert num_left > 0

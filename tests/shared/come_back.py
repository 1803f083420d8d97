"""What is given back on an I/O thread comes back after whoever waits for the request has been told."""

from __future__ import annotations

import time
from collections.abc import Callable

from hf_lohan.device import BufferPool

WITHIN_S = 10.0


def comes_true(is_so: Callable[[], bool]) -> bool:
    """Whether it is so now, or soon."""
    gives_up_s = time.monotonic() + WITHIN_S
    while not is_so() and time.monotonic() < gives_up_s:
        time.sleep(0.001)
    return is_so()


def assert_all_come_back(pool: BufferPool) -> None:
    """Nobody keeps a buffer of ``pool``."""
    assert comes_true(lambda: pool.num_free == pool.num_buffers), f"{pool.name} has lost buffers"

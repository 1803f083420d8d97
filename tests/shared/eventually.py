"""Wait for buffers: I/O threads return them shortly after the request ends."""

from __future__ import annotations

import time
from collections.abc import Callable

from hf_lohan.device import BufferPool

WITHIN_S = 60.0


def becomes_true(is_so: Callable[[], bool]) -> bool:
    """Return whether the condition holds within a minute."""
    gives_up_s = time.monotonic() + WITHIN_S
    while not is_so() and time.monotonic() < gives_up_s:
        time.sleep(0.001)
    return is_so()


def check_buffers_return(pool: BufferPool) -> None:
    """Wait until all buffers of `pool` are free."""
    assert becomes_true(lambda: pool.num_free == pool.num_buffers), f"{pool.name} has lost buffers"

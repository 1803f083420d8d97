"""Host memory lent last in, first out."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.device import CpuDevice, HostStack, IntervalStack
from hf_lohan.device.host_stack import CACHE_LINE_BYTES

CAPACITY = 64


@given(
    granularity=st.sampled_from([1, 4, 16]),
    actions=st.lists(st.one_of(st.integers(1, 30), st.integers(-9, -1)), max_size=60),
)
def test_places_never_overlap_and_come_back(granularity: int, actions: list[int]) -> None:
    """A positive action lends so many units, a negative one gives one of the places back, whichever."""
    stack = IntervalStack(CAPACITY, granularity)
    lent: dict[int, int] = {}
    high_water = 0
    for action in actions:
        if action > 0:
            start = stack.push(action)
            top = max((stop for stop in lent.values()), default=0)
            whole = -(-action // granularity) * granularity
            if start is None:
                assert stack.in_use + whole > CAPACITY
                continue
            assert start % granularity == 0 and start >= top
            assert start + whole <= CAPACITY
            lent[start] = start + whole
            high_water = max(high_water, start + whole)
        elif lent:
            start = sorted(lent)[action % len(lent)]
            del lent[start]
            stack.free(start)
        assert stack.in_use == max(lent.values(), default=0)
    assert stack.high_water == high_water
    for start in lent:
        stack.free(start)
    assert stack.in_use == 0
    assert stack.push(CAPACITY) == 0


@pytest.mark.parametrize("length", [0, -1])
def test_a_place_has_a_length(length: int) -> None:
    """Two places that begin at one unit could not be told apart."""
    with pytest.raises(ValueError, match="at least 1"):
        IntervalStack(CAPACITY).push(length)


class Lent:
    """Gives its place back when it goes, as a swapped tensor does; in a cycle, so that only the collector ends it."""

    def __init__(self, stack: IntervalStack, start: int) -> None:
        self.stack, self.start, self.itself = stack, start, self

    def __del__(self) -> None:
        self.stack.free(self.start)


@pytest.mark.timeout(60)
def test_a_destructor_that_runs_in_the_middle_of_a_push_waits_for_nothing() -> None:
    """The collector runs wherever objects are made: here, while the stack's lock is held."""
    stack = IntervalStack(CAPACITY)
    freed = 0

    class Collecting(list[Any]):
        def append(self, place: Any) -> None:
            nonlocal freed
            super().append(place)
            freed += gc.collect()

    stack._places = Collecting()
    gc.collect()
    for _ in range(10):
        start = stack.push(1)
        assert start is not None
        Lent(stack, start)
    assert freed
    gc.collect()
    assert stack.in_use == 0


def test_places_given_back_from_many_threads() -> None:
    """Whoever computes lends, whoever drops the last reference gives back."""
    stack = IntervalStack(CAPACITY)
    held: list[int] = []
    for _ in range(CAPACITY):
        start = stack.push(1)
        assert start is not None
        held.append(start)
    threads = [threading.Thread(target=lambda part=held[i::4]: [stack.free(s) for s in part]) for i in range(4)]
    for thread in threads:
        thread.start()
    while stack.in_use:
        assert stack.push(CAPACITY + 1) is None
    for thread in threads:
        thread.join()
    assert stack.push(CAPACITY) == 0


def test_bytes_of_a_host_stack_do_not_overlap() -> None:
    stack = HostStack(CpuDevice(), 10 * CACHE_LINE_BYTES)
    lent = [stack.push(num_bytes) for num_bytes in (1, CACHE_LINE_BYTES, CACHE_LINE_BYTES + 1)]
    for number, place in enumerate(lent):
        assert place is not None
        place[1].fill_(number + 1)
    for number, place in enumerate(lent):
        assert place is not None
        assert place[1].data_ptr() % CACHE_LINE_BYTES == 0
        assert torch.all(place[1] == number + 1)
    assert stack.bytes_in_use == stack.high_water_bytes == 4 * CACHE_LINE_BYTES
    assert stack.push(7 * CACHE_LINE_BYTES) is None
    for place in reversed(lent):
        assert place is not None
        stack.free(place[0])
    assert stack.bytes_in_use == 0


def test_no_memory_lends_nothing() -> None:
    stack = HostStack(CpuDevice(), 0)
    assert stack.num_bytes == 0
    assert stack.push(1) is None

"""Host memory as a stack with two ends."""

from __future__ import annotations

import gc
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.device import CpuDevice, Event, HostRead, HostStack, IntervalStack, TopPlace
from hf_lohan.device.host_stack import CACHE_LINE_BYTES

CAPACITY = 64


@given(
    granularity=st.sampled_from([1, 4, 16]),
    actions=st.lists(st.one_of(st.integers(1, 30), st.integers(-9, -1)), max_size=60),
)
def test_intervals_never_overlap_and_can_be_allocated_again(granularity: int, actions: list[int]) -> None:
    """A positive action allocates this many units, and a negative action frees some interval."""
    stack = IntervalStack(CAPACITY, granularity)
    allocated: dict[int, int] = {}
    high_water = 0
    for action in actions:
        if action > 0:
            start = stack.push(action)
            top = max((stop for stop in allocated.values()), default=0)
            whole = -(-action // granularity) * granularity
            if start is None:
                assert stack.in_use + whole > CAPACITY
                continue
            assert start % granularity == 0 and start >= top
            assert start + whole <= CAPACITY
            allocated[start] = start + whole
            high_water = max(high_water, start + whole)
        elif allocated:
            start = sorted(allocated)[action % len(allocated)]
            del allocated[start]
            stack.free(start)
        assert stack.in_use == max(allocated.values(), default=0)
    assert stack.high_water == high_water
    for start in allocated:
        stack.free(start)
    assert stack.in_use == 0
    assert stack.push(CAPACITY) == 0


@pytest.mark.parametrize("length", [0, -1])
def test_an_empty_interval_is_refused(length: int) -> None:
    """Two intervals with the same start could not be distinguished."""
    with pytest.raises(ValueError, match="at least 1"):
        IntervalStack(CAPACITY).push(length)


class Owned:
    """Frees its interval in its destructor, like a swapped tensor. It is a reference cycle, so only the collector
    deletes it."""

    def __init__(self, stack: IntervalStack, start: int) -> None:
        self.stack, self.start, self.itself = stack, start, self

    def __del__(self) -> None:
        self.stack.free(self.start)


@pytest.mark.timeout(60)
def test_a_destructor_that_runs_during_a_push_does_not_deadlock() -> None:
    """The collector may run wherever objects are made; here it runs while the stack's lock is held."""
    stack = IntervalStack(CAPACITY)
    freed = 0

    class Collecting(list[Any]):
        def append(self, place: Any) -> None:
            nonlocal freed
            super().append(place)
            freed += gc.collect()

    stack._intervals = Collecting()
    gc.collect()
    for _ in range(10):
        start = stack.push(1)
        assert start is not None
        Owned(stack, start)
    assert freed
    gc.collect()
    assert stack.in_use == 0


def test_intervals_are_freed_from_many_threads() -> None:
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


def test_an_empty_stack_allocates_nothing() -> None:
    stack = HostStack(CpuDevice(), 0)
    assert stack.num_bytes == 0
    assert stack.push(1) is None


@given(
    actions=st.lists(st.tuples(st.sampled_from(["bottom", "top", "free"]), st.integers(1, 500), st.integers(0, 900))),
    capacity=st.integers(0, 1000),
)
def test_memory_of_both_ends_never_overlaps(actions: list[tuple[str, int, int]], capacity: int) -> None:
    """Memory may be freed in any order. Memory at the top lies above the bytes that are left for the bottom."""
    stack = HostStack(CpuDevice(), capacity)
    memory = stack._memory.data_ptr()
    allocated: dict[int, tuple[int, int | TopPlace]] = {}
    for action, num_bytes, leave in actions:
        if action == "free":
            if allocated:
                start = sorted(allocated)[num_bytes % len(allocated)]
                place = allocated.pop(start)[1]
                stack.free(place) if isinstance(place, int) else place.release()
            continue
        allocation: tuple[int | TopPlace, torch.Tensor] | None
        if action == "bottom":
            allocation = stack.push(num_bytes)
        else:
            top = stack.push_top(num_bytes, leave=leave)
            allocation = None if top is None else (top, top.bytes)
        if allocation is None:
            needed = -(-num_bytes // CACHE_LINE_BYTES) * CACHE_LINE_BYTES
            below = max(stack.bytes_in_use, leave if action == "top" else 0)
            assert below + needed + stack.top_bytes_in_use > capacity // CACHE_LINE_BYTES * CACHE_LINE_BYTES
            continue
        start, stop = allocation[1].data_ptr() - memory, allocation[1].data_ptr() - memory + num_bytes
        assert 0 <= start < stop <= capacity and allocation[1].numel() == num_bytes
        assert allocation[1].data_ptr() % CACHE_LINE_BYTES == 0
        assert action == "bottom" or start >= leave
        assert all(stop <= other or other_stop <= start for other, (other_stop, _) in allocated.items())
        allocated[start] = stop, allocation[0]
    assert stack.high_water_bytes <= capacity
    for _, place in allocated.values():
        stack.free(place) if isinstance(place, int) else place.release()
    assert stack.bytes_in_use == stack.top_bytes_in_use == 0


class CountingEvent(Event):
    def __init__(self) -> None:
        self.num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1

    def is_reached(self) -> bool:
        return False


def test_memory_at_the_top_waits_for_the_last_copy_from_freed_memory() -> None:
    """The order of the frees does not matter, and a finished copy is not waited for again."""
    stack = HostStack(CpuDevice(), 10 * CACHE_LINE_BYTES)
    events = [CountingEvent() for _ in range(3)]
    allocated = [stack.push(CACHE_LINE_BYTES) for _ in events]
    for number in (1, 2, 0):
        place = allocated[number]
        stack.free(place[0], HostRead(number, events[number]))
    assert [event.num_waits for event in events] == [0, 0, 0]
    copied_to = stack.push(CACHE_LINE_BYTES)  # the device orders its copies itself
    assert copied_to is not None and [event.num_waits for event in events] == [0, 0, 0]
    first = stack.push_top(9 * CACHE_LINE_BYTES)
    assert first is not None and [event.num_waits for event in events] == [0, 0, 1]
    first.release()
    assert stack.push_top(9 * CACHE_LINE_BYTES) is not None and events[2].num_waits == 1


def test_earlier_copies_are_forgotten() -> None:
    stack = HostStack(CpuDevice(), CACHE_LINE_BYTES)
    for number in range(100):
        place = stack.push(1)
        stack.free(place[0], HostRead(number, CountingEvent()))
    assert len(stack._reads) <= 2


def test_memory_is_replaced_only_while_none_is_allocated() -> None:
    stack = HostStack(CpuDevice())
    stack.reallocate(2 * CACHE_LINE_BYTES)
    assert stack.num_bytes == 2 * CACHE_LINE_BYTES
    top = stack.push_top(1)
    with pytest.raises(AssertionError):
        stack.reallocate(CACHE_LINE_BYTES)
    top.release()
    stack.reallocate(CACHE_LINE_BYTES)
    assert stack.push_top(CACHE_LINE_BYTES + 1) is None

"""Buffer pools: borrowing, waiting, halves and closing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from hf_lohan.device import Buffer, BufferPool, CpuDevice, PoolAborted

BUFFER_BYTES = 4096
PATIENCE_S = 20  # no test takes this long unless it has failed


def pool_of(num_buffers: int) -> BufferPool:
    return BufferPool(CpuDevice(), name="tested", num_buffers=num_buffers, buffer_bytes=BUFFER_BYTES)


class Waiter:
    """A thread that borrows from a pool; `is_waiting` is set when it begins to wait."""

    def __init__(self, pool: BufferPool, threads: ThreadPoolExecutor, *, half: bool = False) -> None:
        self.is_waiting = threading.Event()
        condition = pool._changed
        wait = condition.wait

        def observed_wait(timeout: float | None = None) -> bool:
            self.is_waiting.set()
            return wait(timeout)

        condition.wait = observed_wait  # type: ignore[method-assign]
        self.outcome: Future[Buffer] = threads.submit(pool.acquire, half=half)

    def until_it_waits(self) -> None:
        assert self.is_waiting.wait(PATIENCE_S)


@contextmanager
def threads_of(pool: BufferPool, num_threads: int) -> Iterator[ThreadPoolExecutor]:
    """Threads that borrow from `pool`, which is closed if the test fails."""
    with ThreadPoolExecutor(num_threads) as threads:
        try:
            yield threads
        except BaseException as error:
            pool.abort(error)
            raise


def test_try_acquire_returns_all_buffers_or_none() -> None:
    pool = pool_of(3)
    taken = pool.try_acquire(2)
    assert taken is not None and len(taken) == 2
    assert pool.try_acquire(2) is None
    assert pool.num_free == 1
    taken[0].release()
    assert pool.try_acquire(1, leave=2) is None
    assert pool.try_acquire(1, leave=1) is not None
    pool.abort(OSError("the drive is gone"))
    with pytest.raises(PoolAborted):
        pool.try_acquire()


def test_buffers_do_not_overlap() -> None:
    pool = pool_of(5)
    buffers = [pool.acquire() for _ in range(5)]
    for number, buffer in enumerate(buffers):
        buffer.bytes.fill_(number + 1)
    assert [buffer.bytes.unique().tolist() for buffer in buffers] == [[n + 1] for n in range(5)]
    assert all(buffer.bytes.numel() == BUFFER_BYTES for buffer in buffers)
    assert all(buffer.bytes.data_ptr() % BUFFER_BYTES == 0 for buffer in buffers)  # O_DIRECT needs it


def test_a_view_is_the_buffer_as_another_dtype() -> None:
    buffer = pool_of(1).acquire()
    buffer.bytes.zero_()
    buffer.view(torch.float32, 3, start_byte=8).fill_(1.0)
    everything = buffer.view(torch.float32, BUFFER_BYTES // 4)
    assert everything.nonzero().flatten().tolist() == [2, 3, 4]


def test_acquire_waits_for_a_release() -> None:
    pool = pool_of(2)
    first, second = pool.acquire(), pool.acquire()
    with threads_of(pool, 1) as threads:
        waiter = Waiter(pool, threads)
        waiter.until_it_waits()
        assert not waiter.outcome.done()
        second.release()
        assert waiter.outcome.result(PATIENCE_S) is second
    assert pool.num_free == 0
    first.release()
    assert pool.num_free == 1


def test_the_high_water_mark_is_the_largest_number_of_borrowed_bytes() -> None:
    pool = pool_of(4)
    pool.acquire().release()
    pool.acquire().release()
    assert pool.high_water_bytes == BUFFER_BYTES
    buffers = [pool.acquire() for _ in range(3)]
    for buffer in buffers:
        buffer.release()
    assert pool.high_water_bytes == 3 * BUFFER_BYTES
    assert pool.num_free == 4


def test_many_threads_never_share_a_buffer() -> None:
    pool = pool_of(3)
    borrowed: set[int] = set()
    lock = threading.Lock()
    most = 0

    def borrow(_round: int) -> None:
        nonlocal most
        buffer = pool.acquire()
        with lock:
            assert id(buffer) not in borrowed, "two threads borrowed one buffer"
            borrowed.add(id(buffer))
            most = max(most, len(borrowed))
        buffer.bytes.random_(0, 256)
        with lock:
            borrowed.remove(id(buffer))
        buffer.release()

    with threads_of(pool, 8) as threads:
        for done in [threads.submit(borrow, number) for number in range(400)]:
            done.result(PATIENCE_S)
    assert most <= 3
    assert most * BUFFER_BYTES <= pool.high_water_bytes <= 3 * BUFFER_BYTES
    assert pool.num_free == 3


def test_abort_wakes_all_waiting_threads_with_the_cause() -> None:
    pool = pool_of(1)
    held = pool.acquire()
    cause = OSError("the drive is gone")
    with threads_of(pool, 2) as threads:
        waiters = [Waiter(pool, threads) for _ in range(2)]
        for waiter in waiters:
            waiter.until_it_waits()
        pool.abort(cause)
        for waiter in waiters:
            error = waiter.outcome.exception(PATIENCE_S)
            assert isinstance(error, PoolAborted)
            assert error.__cause__ is cause
            assert "tested" in str(error) and "the drive is gone" in str(error)
    held.release()
    with pytest.raises(PoolAborted):
        pool.acquire()  # although a buffer is free


def test_halves_share_a_buffer_that_is_whole_again_when_both_are_returned() -> None:
    pool = pool_of(2)
    first, second, third = (pool.acquire(half=True) for _ in range(3))
    assert pool.num_free == 0
    for number, half in enumerate((first, second, third)):
        assert half.bytes.numel() == BUFFER_BYTES // 2
        half.bytes.fill_(number + 1)
    assert [half.bytes.unique().tolist() for half in (first, second, third)] == [[1], [2], [3]]
    assert pool.high_water_bytes == 3 * BUFFER_BYTES // 2
    second.release()
    third.release()
    assert pool.num_free == 1
    other = pool.acquire(half=True)
    assert pool.num_free == 1, "a whole buffer was split although a half was free"
    assert other.bytes.data_ptr() == second.bytes.data_ptr()
    other.retain()
    for half in (first, other):
        half.release()
    assert pool.num_free == 1  # retained once more
    other.release()
    assert pool.num_free == 2
    assert pool.acquire().bytes.numel() == BUFFER_BYTES
    assert pool.high_water_bytes == 3 * BUFFER_BYTES // 2


def test_a_thread_that_waits_for_a_whole_buffer_does_not_block_a_half() -> None:
    pool = pool_of(1)
    first, second = pool.acquire(half=True), pool.acquire(half=True)
    with threads_of(pool, 2) as threads:
        for_a_whole, for_a_half = Waiter(pool, threads), Waiter(pool, threads, half=True)
        for waiter in (for_a_whole, for_a_half):
            waiter.until_it_waits()
        second.release()
        half = for_a_half.outcome.result(PATIENCE_S)
        assert half.bytes.data_ptr() == second.bytes.data_ptr()
        half.release()
        assert not for_a_whole.outcome.done()
        first.release()
        assert for_a_whole.outcome.result(PATIENCE_S).bytes.numel() == BUFFER_BYTES


def test_an_empty_pool_has_no_memory() -> None:
    pool = pool_of(0)
    assert (pool.num_free, pool.high_water_bytes) == (0, 0)

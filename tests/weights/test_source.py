"""A load waits for its block's update and for staging buffers; what fails comes to who waits for the block."""

from __future__ import annotations

import errno
import threading

import pytest
import torch
from block_streams import BLOCK_NUMEL, NEVER, NUM_BLOCKS, StreamFactory, write

from hf_lohan.files import StorageError
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.testing.storage_doubles import FaultyBackend


def test_a_forgotten_block_is_read_again(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=2)
    stream.use(stream.blocks[0])
    with_new_weights = torch.full((BLOCK_NUMEL,), 7.0)
    write(stream.reader.store, stream.blocks[0], with_new_weights)
    stream.ring.forget([stream.blocks[0]])
    assert bool((stream.prefetcher.acquire(stream.blocks[0]).weights == 7.0).all())
    stream.ring.unpin(stream.blocks[0])


def test_no_record_is_read_before_its_update_is_there(make_stream: StreamFactory) -> None:
    updated = {f"b{i}": threading.Event() for i in range(NUM_BLOCKS)}
    asked = threading.Semaphore(0)

    def current(name: str) -> None:
        asked.release()
        assert updated[name].wait(60)

    stream = make_stream(num_slots=2, current=current)
    stream.prefetcher.begin_pass(is_training=False)
    assert asked.acquire(timeout=60)
    assert stream.loads == ""
    for block in stream.blocks:
        updated[block.name].set()
        stream.use(block)


def test_a_failed_update_is_raised_where_its_block_is_needed(make_stream: StreamFactory) -> None:
    def current(name: str) -> None:
        if name == "b2":
            raise OSError("the update failed")

    stream = make_stream(num_slots=3, current=current)
    stream.prefetcher.begin_pass(is_training=False)
    with pytest.raises(OSError, match="the update failed"):
        for block in stream.blocks:
            stream.use(block)


def test_two_staging_buffers_serve_late_copies_of_larger_blocks(make_stream: StreamFactory) -> None:
    device = AsyncDevice(0, max_delay_s=1e-3)
    stream = make_stream(num_slots=2, device=device)
    for _ in range(3):
        stream.training_pass()  # looks at every weight
    assert device.num_races == 0


def test_a_failed_read_is_raised_where_the_block_is_needed(make_stream: StreamFactory) -> None:
    backend = FaultyBackend("read", NEVER, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    stream.prefetcher.begin_pass(is_training=True)
    stream.use(stream.blocks[0])
    stream.until_idle()
    backend.fail_on = 1
    with pytest.raises(StorageError) as failed:
        for block in stream.blocks[1:]:
            stream.use(block)
    assert failed.value.errno == errno.EIO


def test_a_later_pass_works_when_the_fault_is_gone(make_stream: StreamFactory) -> None:
    backend = FaultyBackend("read", NEVER, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    for healthy_uses in range(4):
        backend.fail_on = NEVER
        stream.prefetcher.begin_pass(is_training=True)
        for block in stream.blocks[:healthy_uses]:
            stream.use(block)
        backend.fail_on = 1
        with pytest.raises(StorageError):
            for block in [*stream.blocks[healthy_uses:], *reversed(stream.blocks)]:
                stream.use(block)
        backend.fail_on = NEVER
        stream.prefetcher.cancel_pass()
        stream.ring.unpin_all()
        stream.training_pass()  # hangs if a failed load kept its staging buffers or its slot


def test_a_fault_while_reading_ahead_reaches_the_next_acquire(make_stream: StreamFactory) -> None:
    backend = FaultyBackend("read", 1, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    stream.prefetcher.foresee(is_training=True)
    stream.until_idle()  # it has failed by now: nobody has asked yet
    with pytest.raises(StorageError):
        stream.use(stream.blocks[0])


def test_a_fault_while_reading_ahead_that_is_gone_when_the_pass_begins_is_forgotten(
    make_stream: StreamFactory,
) -> None:
    backend = FaultyBackend("read", 1, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    stream.prefetcher.foresee(is_training=True)
    stream.until_idle()
    backend.fail_on = NEVER
    stream.training_pass()

"""Blocks are loaded before their use, in the recorded order, as far as slots allow."""

from __future__ import annotations

import pytest
import torch
from block_streams import BLOCK_NUMEL, NUM_BLOCKS, StreamFactory
from storage_doubles import GatedBackend, SlowBackend

from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.files import FileBackend
from hf_lohan.updates.handover import Handover


@pytest.mark.parametrize("backend", [None, SlowBackend(1e-3)], ids=["fast", "slow"])
def test_blocks_are_loaded_in_order_of_use_and_not_if_they_are_here(
    backend: FileBackend | None, make_stream: StreamFactory
) -> None:
    stream = make_stream(num_slots=2, backend=backend)
    for _ in range(5):
        stream.reader.loads.clear()
        with stream.ring.lock:
            known = [block.name for block in stream.blocks if stream.ring.is_here(block)]
        stream.training_pass()
        forward = "b2 b3 b4 b5" if known else "b0 b1 b2 b3 b4 b5"  # the last pass left b0 and b1 here
        assert stream.loads == f"{forward} b3 b2 b1 b0"


@pytest.mark.parametrize("num_slots", [2, 3, 5, 6])
def test_more_slots_save_loads(num_slots: int, make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=num_slots)
    stream.training_pass()
    assert len(stream.reader.loads) == 2 * NUM_BLOCKS - num_slots
    assert stream.ring.high_water_bytes <= num_slots * 4 * BLOCK_NUMEL


def test_reading_ahead_stops_at_the_last_free_slot(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=3)
    stream.prefetcher.begin_pass(is_training=False)
    first = stream.prefetcher.acquire(stream.blocks[0])
    stream.until_idle()
    assert stream.loads == "b0 b1 b2"
    assert bool((first.weights == 0.0).all())
    stream.ring.unpin(stream.blocks[0])
    stream.until_idle()
    assert stream.loads == "b0 b1 b2 b3"  # b0 made room; b1 and b2 are needed before b4
    for block in stream.blocks[1:]:
        stream.use(block)
    assert stream.loads.startswith("b0 b1 b2 b3 b4 b5")


def test_after_an_evaluation_another_one_is_foreseen(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=3)

    def here() -> set[str]:
        stream.until_idle()
        return {block.name for block in stream.blocks if stream.ring.is_here(block)}

    stream.prefetcher.begin_pass(is_training=False)
    for block in stream.blocks[:-1]:
        stream.use(block)
    last = stream.prefetcher.acquire(stream.blocks[-1])
    # the first layers of the next token are here while the last layer of this token computes
    assert here() == {"b0", "b1", "b5"}
    stream.ring.unpin(stream.blocks[-1])
    assert last.num_pins == 0
    assert here() == {"b0", "b1", "b2"}
    stream.prefetcher.end_pass()
    num_loads = len(stream.reader.loads)
    stream.prefetcher.begin_pass(is_training=True)
    assert here() == {"b0", "b1", "b2"}, "another kind of pass uses the foreseen loads"
    assert len(stream.reader.loads) == num_loads
    stream.prefetcher.cancel_pass()


def test_acquiring_a_block_does_not_wait_for_later_blocks(make_stream: StreamFactory) -> None:
    backend = GatedBackend()
    stream = make_stream(num_slots=2, backend=backend)
    backend.gate.set()
    stream.prefetcher.begin_pass(is_training=False)
    slot = stream.prefetcher.acquire(stream.blocks[0])
    stream.until_idle()  # b1 is here, too
    backend.gate.clear()
    stream.ring.unpin(stream.blocks[0])
    assert stream.prefetcher.acquire(stream.blocks[1]) is not slot  # b2 still waits at the gate
    backend.gate.set()
    stream.ring.unpin(stream.blocks[1])


def test_an_unforeseen_block_is_loaded_first(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=2)
    stream.prefetcher.begin_pass(is_training=False)
    stream.use(stream.blocks[0])
    stream.use(stream.blocks[5])  # the layers between were skipped
    stream.use(stream.blocks[2])
    assert stream.prefetcher.num_urgent >= 1
    stream.prefetcher.end_pass()


def test_the_next_pass_follows_the_order_of_the_last_of_its_kind(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=3)
    order = [stream.blocks[i] for i in (4, 0, 2)]
    stream.prefetcher.begin_pass(is_training=False)
    for block in order:
        stream.use(block)
    stream.prefetcher.end_pass()
    stream.until_idle()
    stream.ring.forget(stream.blocks)
    stream.reader.loads.clear()
    stream.prefetcher.foresee_pass(is_training=False)
    stream.until_idle()
    assert stream.loads == "b4 b0 b2"
    stream.ring.forget(stream.blocks)
    stream.reader.loads.clear()
    stream.prefetcher.foresee_pass(is_training=True)  # this kind has not run yet
    stream.until_idle()
    assert stream.loads == "b0 b1 b2"


def test_a_canceled_pass_does_not_change_the_order(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=2)
    stream.prefetcher.begin_pass(is_training=False)
    stream.use(stream.blocks[3])
    stream.prefetcher.cancel_pass()
    stream.prefetcher.end_pass()
    stream.until_idle()
    stream.ring.forget(stream.blocks)
    stream.reader.loads.clear()
    stream.prefetcher.foresee_pass(is_training=False)
    stream.until_idle()
    assert stream.loads == "b0 b1"


def test_a_pinned_slot_is_never_overwritten(make_stream: StreamFactory) -> None:
    """One of two slots is pinned during the whole pass. All other blocks use the second slot."""
    stream = make_stream(num_slots=2, backend=SlowBackend(2e-4))
    stream.prefetcher.begin_pass(is_training=True)
    pinned = stream.prefetcher.acquire(stream.blocks[0])
    for block in [*stream.blocks[1:], *reversed(stream.blocks[1:])]:
        stream.use(block)
        assert bool((pinned.weights == 0.0).all())
    stream.ring.unpin(stream.blocks[0])


@pytest.mark.parametrize("is_dropped", [False, True])
def test_a_load_that_waits_for_updates_delays_no_other_load(is_dropped: bool, make_stream: StreamFactory) -> None:
    """The update of the first block is late. The next blocks are loaded in the meantime."""
    updates = Handover(CpuDevice())
    stream = make_stream(num_slots=3, delivers=updates.deliver)
    first = stream.blocks[0]
    (chunk,) = first.cut(BLOCK_NUMEL)
    updates.announce([chunk])
    stream.prefetcher.begin_pass(is_training=False)
    with stream.ring.lock:
        # true as soon as its load has begun
        assert stream.ring.changed.wait_for(lambda: stream.ring.is_here(first), timeout=60)
    for block in stream.blocks[1:3]:
        stream.prefetcher.acquire(block)
        stream.ring.unpin(block)
    assert stream.loads.startswith("b1 b2")
    with stream.ring.lock:
        assert stream.ring.slot_of(first).is_loading
    if is_dropped:
        updates.call_off()
        with pytest.raises(RuntimeError, match="dropped"):
            stream.prefetcher.acquire(first)
        stream.prefetcher.begin_pass(is_training=False)
        stream.use(first)
        return
    buffers = BufferPool(CpuDevice(), name="states", num_buffers=1, buffer_bytes=4 * BLOCK_NUMEL)
    updates.hand_over(chunk, torch.full((BLOCK_NUMEL,), 7.0), buffers.acquire())
    assert bool((stream.prefetcher.acquire(first).weights == 7.0).all())
    assert "b0" not in stream.loads


def test_compute_does_not_wait_for_an_ended_thread(make_stream: StreamFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make_stream(num_slots=2)
    monkeypatch.setattr(stream.prefetcher._schedule, "next_load", lambda is_here: [][0])
    for _ in range(2):  # a new pass does not start the thread again
        stream.prefetcher.begin_pass(is_training=False)
        stream.prefetcher._thread.join(timeout=10)
        with pytest.raises(RuntimeError, match="bug of hf_lohan") as raised:
            stream.prefetcher.acquire(stream.blocks[0])
        assert isinstance(raised.value.__cause__, IndexError)
        stream.prefetcher.cancel_pass()

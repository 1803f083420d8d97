"""New parameters come from their update while they are in RAM, and otherwise from the store."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from async_device import AsyncDevice
from paced_device import PacedDevice, SteppedClock
from torch import nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import Buffer, BufferPool, CpuDevice, Event, Lane
from hf_lohan.model import Block, Chunk, lay_out_block
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.updates.handover import BorrowedSlot, Delivery, Handover, NewParams

NUM_CHUNKS = 4


def a_block() -> tuple[Block, list[Chunk]]:
    parameters = {f"p{i}": nn.Parameter(torch.zeros(GRANULE_NUMEL)) for i in range(NUM_CHUNKS)}
    block = lay_out_block("block", SizeClass.LAYER, parameters)
    return block, block.cut(GRANULE_NUMEL)


class Updates:
    """Updates that write the index of each chunk to its elements, in their own buffers."""

    def __init__(self, device: CpuDevice | None = None) -> None:
        self.handover = Handover(device or CpuDevice())
        self.pool = BufferPool(CpuDevice(), name="states", num_buffers=NUM_CHUNKS, buffer_bytes=4 * GRANULE_NUMEL)

    def hand_over(self, chunk: Chunk) -> tuple[NewParams, Event | None, Buffer]:
        """The update keeps the buffer until `note_written`."""
        buffer = self.pool.acquire()
        param = buffer.view(torch.float32, chunk.numel).fill_(float(chunk.index))
        return *self.handover.hand_over(chunk, param, buffer), buffer

    def finish(self, chunk: Chunk) -> Event | None:
        """Hand over, write, and release the buffer."""
        new, copied, buffer = self.hand_over(chunk)
        if copied is not None:
            copied.synchronize()
        self.handover.note_written(new)
        buffer.release()
        return copied


def within_a_minute(work: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """Run `work`, which waits until `meanwhile` has run."""
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        meanwhile()
        working.result(60)


@pytest.mark.parametrize("is_outstanding", [True, False])
def test_deliveries_to_other_slots_do_not_wait_until_a_slot_is_free(is_outstanding: bool) -> None:
    """If updates deliver a block to a slot that compute still reads, only the thread of the load waits. The updates
    also deliver earlier blocks, for which this compute may wait.
    """
    device = PacedDevice(link_bytes_per_s=1e6, flops_per_s=1.0, clock=SteppedClock())
    updates, (block, chunks) = Updates(device), a_block()
    if is_outstanding:
        updates.handover.announce(chunks)
    device.take_flops(100.0)
    free, before_s = device.record(Lane.COMPUTE), device.clock.now_s()
    updates.handover.deliver(block, torch.zeros(block.numel), free)
    lane_ends = device.record(Lane.H2D)
    waited_s = device.clock.now_s() - before_s
    lane_ends.synchronize()
    assert (waited_s, device.clock.now_s() - before_s) == ((100.0, 100.0) if is_outstanding else (0.0, 100.0))
    assert device.num_waits.total() == 1


def test_chunks_without_an_update_are_read_from_the_store() -> None:
    block, _ = a_block()
    delivery = Handover(CpuDevice()).deliver(block, torch.zeros(block.numel))
    delivery.wait()
    assert list(delivery.ranges_to_read()) == [(0, block.numel)]


def test_chunks_with_an_update_to_come_are_delivered_and_not_read() -> None:
    block, chunks = a_block()
    updates, weights = Updates(), torch.full((block.numel,), -1.0)
    updates.handover.announce([chunks[0], chunks[2]])
    delivery = updates.handover.deliver(block, weights)
    assert list(delivery.ranges_to_read()) == [(GRANULE_NUMEL, 2 * GRANULE_NUMEL), (3 * GRANULE_NUMEL, block.numel)]

    def update() -> None:
        for chunk in (chunks[0], chunks[2]):
            assert updates.finish(chunk) is not None

    within_a_minute(delivery.wait, update)
    assert [weights[chunk.start].item() for chunk in chunks] == [0.0, -1.0, 2.0, -1.0]


def test_chunks_updated_before_are_read_once_they_are_written() -> None:
    block, chunks = a_block()
    updates = Updates()
    updates.handover.announce(chunks[:2])
    assert updates.finish(chunks[0]) is None  # no reader
    delivery = updates.handover.deliver(block, torch.zeros(block.numel))
    assert list(delivery.chunks) == [chunks[1]]


def test_a_failure_ends_waits() -> None:
    block, chunks = a_block()
    updates, cause = Updates().handover, OSError("the drive is gone")
    updates.announce(chunks)
    delivery = updates.deliver(block, torch.zeros(block.numel))
    with pytest.raises(OSError, match="drive") as first:
        within_a_minute(delivery.wait, lambda: updates.abort(cause))
    with pytest.raises(OSError, match="drive") as second:
        updates.deliver(block, torch.zeros(block.numel))
    assert first.value is not second.value, "an object that several threads raise collects all their tracebacks"
    assert (first.value.__cause__, second.value.__cause__, cause.__traceback__) == (cause, cause, None)


def test_a_dropped_step_delivers_nothing() -> None:
    block, chunks = a_block()
    updates = Updates()
    updates.handover.announce(chunks)
    delivery = updates.handover.deliver(block, torch.zeros(block.numel))
    with pytest.raises(RuntimeError, match="dropped"):
        within_a_minute(delivery.wait, updates.handover.call_off)
    assert updates.finish(chunks[0]) is None
    assert not updates.handover.deliver(block, torch.zeros(block.numel)).chunks


def test_a_buffer_may_be_overwritten_when_the_event_is_reached() -> None:
    """The device runs copies late, so a write before the event would reach the slot."""
    device = AsyncDevice(max_delay_s=5e-3)
    block, chunks = a_block()
    updates, weights = Updates(device), device.empty(4 * block.numel).view(torch.float32)
    updates.handover.announce(chunks)
    delivery = updates.handover.deliver(block, weights)

    def update() -> None:
        for chunk in chunks:
            _, copied, buffer = updates.hand_over(chunk)
            copied.synchronize()
            buffer.bytes.fill_(0xFF)

    thread = threading.Thread(target=update)
    thread.start()
    delivery.wait()
    thread.join()
    assert [weights[chunk.start].item() for chunk in chunks] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("device", [CpuDevice(), AsyncDevice(max_delay_s=5e-3)], ids=["cpu", "late"])
def test_parameters_that_wait_to_be_written_are_kept_until_they_are_copied(device: CpuDevice) -> None:
    block, chunks = a_block()
    updates, weights = Updates(device), device.empty(4 * block.numel).view(torch.float32)
    updates.handover.announce(chunks[:2])
    new, copied, buffer = updates.hand_over(chunks[1])
    assert copied is None
    delivery = updates.handover.deliver(block, weights)
    assert list(delivery.ranges_to_read()) == [(2 * GRANULE_NUMEL, block.numel)]
    updates.handover.note_written(new)
    buffer.release()
    assert updates.pool.num_free == NUM_CHUNKS - 1  # the delivery reads the buffer
    errors: list[BaseException | None] = []
    delivery.call_at_end(errors.append)
    assert updates.pool.num_free == NUM_CHUNKS
    buffer.bytes.fill_(0xFF)
    assert not errors  # the other chunk is still to come
    copied = updates.finish(chunks[0])
    assert copied is not None and errors == [None]
    assert [weights[chunk.start].item() for chunk in chunks[:2]] == [0.0, 1.0]


def test_written_parameters_are_forgotten() -> None:
    """The caller may have changed the store, so parameters in RAM may be old."""
    block, chunks = a_block()
    updates = Updates()
    updates.handover.announce(chunks)
    for chunk in chunks:
        updates.finish(chunk)
    assert not updates.handover.deliver(block, torch.zeros(block.numel)).chunks
    updates.hand_over(chunks[0])
    updates.handover.forget_written()
    assert not updates.handover.deliver(block, torch.zeros(block.numel)).chunks


@pytest.mark.parametrize("end", ["abort", "call_off"])
def test_a_callback_gets_a_failure_once(end: str) -> None:
    block, chunks = a_block()
    updates = Updates().handover
    updates.announce(chunks)
    errors: list[BaseException | None] = []
    updates.deliver(block, torch.zeros(block.numel)).call_at_end(errors.append)
    assert not errors
    if end == "abort":
        updates.abort(OSError("the drive is gone"))
    updates.call_off()
    (error,) = errors
    assert isinstance(error, OSError if end == "abort" else RuntimeError)


def test_a_second_delivery_of_a_block_waits_for_the_first() -> None:
    """A slot is dropped during a delivery and the block is loaded again. Without this wait the first delivery would
    never end.
    """
    block, chunks = a_block()
    updates = Updates()
    updates.handover.announce(chunks[:1])
    errors: list[BaseException | None] = []
    updates.handover.deliver(block, torch.zeros(block.numel)).call_at_end(errors.append)
    weights = torch.full((block.numel,), -1.0)
    again: list[Delivery] = []

    def deliver_again() -> None:
        again.append(updates.handover.deliver(block, weights))
        again[0].wait()

    within_a_minute(deliver_again, lambda: updates.hand_over(chunks[0]))
    assert errors == [None]
    assert weights[0].item() == 0.0  # copied from the buffer that is still to be written


def test_a_late_callback_of_the_last_update_does_not_end_this_one() -> None:
    block, chunks = a_block()
    updates = Updates()
    before, _, _ = updates.hand_over(chunks[0])
    updates.handover.announce(chunks[:1])
    updates.handover.note_written(before)
    assert updates.handover.deliver(block, torch.zeros(block.numel)).to_come == {chunks[0]}
    updates.hand_over(chunks[0])
    updates.handover.note_written(before)
    assert list(updates.handover.deliver(block, torch.zeros(block.numel)).chunks) == [chunks[0]]


def test_part_of_a_block_comes_from_ram_and_the_rest_from_the_store() -> None:
    updates = Updates()
    block, chunks = a_block()
    new, _, buffer = updates.hand_over(chunks[1])
    start, stop = GRANULE_NUMEL // 2, 5 * GRANULE_NUMEL // 2
    out = torch.full((stop - start,), -1.0)
    updates.handover.settle(block)
    assert updates.handover.copy_new(block, start, out) == [(start, GRANULE_NUMEL), (2 * GRANULE_NUMEL, stop)]
    assert out[: GRANULE_NUMEL - start].eq(-1).all()
    assert out[GRANULE_NUMEL - start : 2 * GRANULE_NUMEL - start].eq(1).all()
    updates.handover.note_written(new)
    assert updates.handover.copy_new(block, start, out) == [(start, stop)]
    buffer.release()
    assert updates.pool.num_free == NUM_CHUNKS


def test_a_reader_of_part_of_a_block_waits_for_announced_updates() -> None:
    updates = Updates()
    block, chunks = a_block()
    updates.handover.announce(chunks[:1])
    assert updates.handover.copy_new(block, 0, torch.empty(GRANULE_NUMEL)) is None
    assert updates.handover.copy_new(block, GRANULE_NUMEL, torch.empty(1)) == [(GRANULE_NUMEL, GRANULE_NUMEL + 1)]
    within_a_minute(lambda: updates.handover.settle(block), lambda: updates.finish(chunks[0]))


def test_a_slot_that_is_taken_back_is_read_from_the_store() -> None:
    returned: list[str] = []
    borrowed = BorrowedSlot(CpuDevice(), torch.arange(4.0), lambda: returned.append("slot"))
    borrowed.give_back()
    assert returned == ["slot"]
    assert borrowed.start_read(0, torch.empty(2)) is None
    borrowed.give_back()
    assert returned == ["slot"]

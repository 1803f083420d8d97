"""New parameters come from their update while they are in RAM, and from the store where they went by already."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from hf_lohan.device import CpuDevice
from hf_lohan.model import Block, Chunk, lay_out_block
from hf_lohan.planner import SizeClass
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.updates.blocks_in_update import BlocksInUpdate, Delivery
from hf_lohan.updates.until_written import UntilWritten

NUM_CHUNKS = 4


def a_block() -> tuple[Block, list[Chunk]]:
    parameters = {f"p{i}": nn.Parameter(torch.zeros(GRANULE_NUMEL)) for i in range(NUM_CHUNKS)}
    block = lay_out_block("block", SizeClass.LAYER, parameters)
    return block, block.cut(GRANULE_NUMEL)


def values_of(chunk: Chunk) -> Tensor:
    return torch.full((chunk.numel,), float(chunk.index))


class Writing:
    """What is written out of a buffer, until `end`."""

    def __init__(self) -> None:
        self.has_ended = False
        self.until_written = UntilWritten(1, [], self._note)

    def _note(self, _error: BaseException | None) -> None:
        self.has_ended = True

    def end(self) -> None:
        self.until_written.one_less()


def written() -> UntilWritten:
    """Of what is in the store already."""
    writing = Writing()
    writing.end()
    return writing.until_written


def within_a_minute(work: Callable[[], object], meanwhile: Callable[[], object]) -> None:
    """`meanwhile` happens while `work` waits, which has to end by it."""
    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        meanwhile()
        working.result(60)


def test_what_nobody_updates_is_read_from_the_store() -> None:
    block, _ = a_block()
    delivery = BlocksInUpdate(CpuDevice()).order(block, torch.zeros(block.numel))
    delivery.wait()
    assert list(delivery.ranges_to_read()) == [(0, block.numel)]


def test_what_is_still_to_be_updated_comes_from_the_update_and_is_not_read() -> None:
    block, chunks = a_block()
    updates, weights = BlocksInUpdate(CpuDevice()), torch.full((block.numel,), -1.0)
    updates.add([chunks[0], chunks[2]])
    delivery = updates.order(block, weights)
    assert list(delivery.ranges_to_read()) == [(GRANULE_NUMEL, 2 * GRANULE_NUMEL), (3 * GRANULE_NUMEL, block.numel)]

    def update() -> None:
        for chunk in (chunks[0], chunks[2]):
            assert updates.hand_over(chunk, values_of(chunk), written()) is not None

    within_a_minute(delivery.wait, update)
    assert [weights[chunk.start].item() for chunk in chunks] == [0.0, -1.0, 2.0, -1.0]


def test_what_went_by_is_read_once_it_is_written() -> None:
    block, chunks = a_block()
    updates = BlocksInUpdate(CpuDevice())
    updates.add(chunks[:2])
    assert updates.hand_over(chunks[0], values_of(chunks[0]), written()) is None  # nobody wants it
    ordered: list[Delivery] = []
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(lambda: ordered.append(updates.order(block, torch.zeros(block.numel))))
        assert not reader.done()  # the store does not have it yet
        updates.discard(chunks[0])
        reader.result(60)
    assert list(ordered[0].chunks) == [chunks[1]]


def test_whoever_waits_is_told_of_a_failure() -> None:
    block, chunks = a_block()
    updates = BlocksInUpdate(CpuDevice())
    updates.add(chunks)
    delivery = updates.order(block, torch.zeros(block.numel))
    with pytest.raises(OSError, match="drive"):
        within_a_minute(delivery.wait, lambda: updates.abort(OSError("the drive is gone")))
    with pytest.raises(OSError, match="drive"):
        updates.order(block, torch.zeros(block.numel))


def test_a_dropped_step_delivers_nothing() -> None:
    block, chunks = a_block()
    updates = BlocksInUpdate(CpuDevice())
    updates.add(chunks)
    delivery = updates.order(block, torch.zeros(block.numel))
    with pytest.raises(RuntimeError, match="dropped"):
        within_a_minute(delivery.wait, updates.clear)
    assert updates.hand_over(chunks[0], values_of(chunks[0]), written()) is None
    again = updates.order(block, torch.zeros(block.numel))
    assert not again.chunks


def test_the_source_is_free_when_the_event_is_reached_and_not_before() -> None:
    """On a device whose copies run late, what is overwritten at once would arrive overwritten."""
    device = AsyncDevice(max_delay_s=5e-3)
    block, chunks = a_block()
    updates, weights = BlocksInUpdate(device), device.empty(4 * block.numel).view(torch.float32)
    updates.add(chunks)
    delivery = updates.order(block, weights)
    source = torch.empty(GRANULE_NUMEL)

    def update() -> None:
        for chunk in chunks:
            source.fill_(chunk.index)
            copied = updates.hand_over(chunk, source, written())
            assert copied is not None
            copied.synchronize()

    thread = threading.Thread(target=update)
    thread.start()
    delivery.wait()
    thread.join()
    assert [weights[chunk.start].item() for chunk in chunks] == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("device", [CpuDevice(), AsyncDevice(max_delay_s=5e-3)], ids=["cpu", "late"])
def test_what_waits_to_be_written_is_copied_and_stays_until_it_is(device: CpuDevice) -> None:
    block, chunks = a_block()
    updates, weights = BlocksInUpdate(device), device.empty(4 * block.numel).view(torch.float32)
    updates.add(chunks[:2])
    source, writing = values_of(chunks[1]), Writing()
    assert updates.hand_over(chunks[1], source, writing.until_written) is None
    delivery = updates.order(block, weights)
    assert list(delivery.ranges_to_read()) == [(2 * GRANULE_NUMEL, block.numel)]
    writing.end()
    assert not writing.has_ended  # somebody reads the buffer
    errors: list[BaseException | None] = []
    delivery.when_ended(errors.append)
    assert writing.has_ended
    source.fill_(-1.0)
    assert not errors  # the other chunk is still to come
    copied = updates.hand_over(chunks[0], values_of(chunks[0]), written())
    assert copied is not None and errors == [None]
    copied.synchronize()
    assert [weights[chunk.start].item() for chunk in chunks[:2]] == [0.0, 1.0]


def test_what_waits_to_be_written_is_forgotten_once_all_is() -> None:
    """Whoever waited for the store may change it: what was in RAM is old then."""
    block, chunks = a_block()
    updates, writing = BlocksInUpdate(CpuDevice()), Writing()
    updates.add(chunks)
    for chunk in chunks:
        of_chunk = Writing()
        updates.hand_over(chunk, values_of(chunk), of_chunk.until_written)
        of_chunk.end()
        updates.discard(chunk)
    assert not updates.order(block, torch.zeros(block.numel)).chunks
    updates.hand_over(chunks[0], values_of(chunks[0]), writing.until_written)
    updates.forget_unwritten()
    assert not updates.order(block, torch.zeros(block.numel)).chunks


@pytest.mark.parametrize("end", ["abort", "clear"])
def test_who_asked_to_be_told_is_told_of_a_failure_once(end: str) -> None:
    block, chunks = a_block()
    updates = BlocksInUpdate(CpuDevice())
    updates.add(chunks)
    errors: list[BaseException | None] = []
    updates.order(block, torch.zeros(block.numel)).when_ended(errors.append)
    assert not errors
    if end == "abort":
        updates.abort(OSError("the drive is gone"))
    updates.clear()
    (error,) = errors
    assert isinstance(error, OSError if end == "abort" else RuntimeError)


def test_a_block_that_was_forgotten_while_it_came_is_ordered_again_when_it_has_come() -> None:
    """Else nobody would end the first delivery, and its slot would load for ever."""
    block, chunks = a_block()
    updates, writing = BlocksInUpdate(CpuDevice()), Writing()
    updates.add(chunks[:1])
    errors: list[BaseException | None] = []
    updates.order(block, torch.zeros(block.numel)).when_ended(errors.append)
    weights = torch.full((block.numel,), -1.0)

    def order_again() -> None:
        updates.order(block, weights).wait()

    within_a_minute(order_again, lambda: updates.hand_over(chunks[0], values_of(chunks[0]), writing.until_written))
    assert errors == [None]
    assert weights[0].item() == 0.0  # from where it waits to be written


def test_a_callback_of_the_last_update_that_comes_late_does_not_end_this_one() -> None:
    block, chunks = a_block()
    updates, writing = BlocksInUpdate(CpuDevice()), Writing()
    updates.add(chunks[:1])
    updates.discard(chunks[0])  # of an update before
    updates.hand_over(chunks[0], values_of(chunks[0]), writing.until_written)
    updates.discard(chunks[0])
    assert list(updates.order(block, torch.zeros(block.numel)).chunks) == [chunks[0]]

"""A load waits for the update of its block and for staging buffers. Its error is raised where the block is acquired."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from block_streams import BLOCK_NUMEL, NEVER, NUM_BLOCKS, StreamFactory
from storage_doubles import FaultyBackend
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice, Lane
from hf_lohan.files import StorageError
from hf_lohan.model import lay_out_block
from hf_lohan.updates import Delivery
from hf_lohan.weights import LocalWeights, Slot


def test_no_record_is_read_before_its_update(make_stream: StreamFactory) -> None:
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
        stream.training_pass()  # this checks every weight
    assert device.num_races == 0


def test_a_pass_works_after_the_fault_has_ended(make_stream: StreamFactory) -> None:
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


def test_a_fault_of_a_foreseen_load_is_raised_by_the_next_acquire(make_stream: StreamFactory) -> None:
    backend = FaultyBackend("read", 1, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    stream.prefetcher.foresee_pass(is_training=True)
    stream.until_idle()  # the load has failed, and no thread has acquired the block yet
    with pytest.raises(StorageError):
        stream.use(stream.blocks[0])


def test_a_fault_of_a_foreseen_load_is_forgotten_if_it_ends_before_the_pass(make_stream: StreamFactory) -> None:
    backend = FaultyBackend("read", 1, errno.EIO, sticky=True)
    stream = make_stream(num_slots=2, backend=backend)
    stream.prefetcher.foresee_pass(is_training=True)
    stream.until_idle()
    backend.fail_on = NEVER
    stream.training_pass()


class HeldReads:
    """Reads of a store that end when `may_end` is set. Reads of the block `fails` raise."""

    def __init__(self) -> None:
        self.ordered: list[str] = []
        self.may_end = threading.Event()
        self.fails = ""

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> Any:
        self.ordered.append(block)
        return HeldRead(self, block, out)


class HeldRead:
    def __init__(self, reads: HeldReads, block: str, out: Tensor) -> None:
        self._reads, self._block, self._out = reads, block, out

    def wait_for_bytes(self) -> None:
        assert self._reads.may_end.wait(60)

    def wait(self) -> None:
        self.wait_for_bytes()
        if self._block == self._reads.fails:
            raise OSError(f"{self._block} cannot be read")
        self._out.fill_(float(self._block[1:]))


class OverlappingLoads:
    """Three blocks with a slot each, and how their loads ended."""

    def __init__(self, device: CpuDevice) -> None:
        self.device, self.reads = device, HeldReads()
        staging = BufferPool(device, name="staging", num_buffers=2, buffer_bytes=4 * BLOCK_NUMEL)
        self.source = LocalWeights(device, self.reads, staging, lambda block, weights, free: Delivery(weights))
        names = ("b0", "b1", "b2")
        self.blocks = [
            lay_out_block(name, SizeClass.EXPERT, {name: nn.Parameter(torch.zeros(BLOCK_NUMEL))}) for name in names
        ]
        memory = [device.empty(4 * BLOCK_NUMEL).view(torch.float32) for _ in names]
        self.slots = [Slot(weights, SizeClass.EXPERT) for weights in memory]
        self.ended: dict[str, BaseException | None] = {}

    def begin(self, number: int) -> None:
        block = self.blocks[number]
        self.source.begin_load(block, self.slots[number], partial(self.ended.__setitem__, block.name))

    def is_right(self, number: int) -> bool:
        self.device.record(Lane.H2D).synchronize()
        return bool((self.slots[number].weights[:BLOCK_NUMEL] == number).all())


@pytest.mark.parametrize("make_device", [CpuDevice, lambda: AsyncDevice(0, max_delay_s=2e-4)])
def test_the_next_reads_are_ordered_before_the_previous_ones_end(make_device: Callable[[], CpuDevice]) -> None:
    loads = OverlappingLoads(make_device())
    loads.begin(0)
    assert loads.reads.ordered == ["b0"] and not loads.ended
    thread = threading.Thread(target=loads.begin, args=(1,))
    thread.start()
    while len(loads.reads.ordered) < 2:
        time.sleep(1e-3)
    assert not loads.ended, "the reads of the second load are ordered while the first load runs"
    loads.reads.may_end.set()
    thread.join()
    assert loads.ended == {"b0": None} and loads.is_right(0)
    loads.begin(2)
    assert loads.ended == {"b0": None, "b1": None} and loads.is_right(1)
    loads.source.finish_loads()
    assert loads.ended["b2"] is None and loads.is_right(2)


def test_a_block_that_catches_up_while_it_loads_goes_through_a_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """When its load began, nobody waited until its slot was free."""
    loads, answers = OverlappingLoads(AsyncDevice(0, max_delay_s=2e-4)), iter([False, True, True, True])
    read, read_to = loads.reads.read, list[int]()

    def noted(block: str, kind: str, start: int, out: Tensor, **settings: Any) -> Any:
        read_to.append(out.data_ptr())
        return read(block, kind, start, out, **settings)

    monkeypatch.setattr(loads.reads, "read", noted)
    monkeypatch.setattr(loads.source, "_reads_to_device", lambda block, kind: next(answers))
    loads.reads.may_end.set()
    for number in range(2):
        loads.begin(number)
        loads.source.finish_loads()
        assert loads.is_right(number)
    slots = [slot.weights.data_ptr() for slot in loads.slots]
    assert read_to[0] not in slots and read_to[1:] == slots[1:2]


@pytest.mark.parametrize("make_device", [CpuDevice, lambda: AsyncDevice(0, max_delay_s=2e-4)])
@pytest.mark.parametrize("failing", [0, 1, 2])
def test_one_of_several_overlapping_loads_fails_alone(make_device: Callable[[], CpuDevice], failing: int) -> None:
    loads = OverlappingLoads(make_device())
    loads.reads.may_end.set()
    loads.reads.fails = f"b{failing}"
    for number in range(3):
        loads.begin(number)
    loads.source.finish_loads()
    for number in range(3):
        error = loads.ended[f"b{number}"]
        assert (str(error) == f"b{number} cannot be read") if number == failing else (error is None)
        assert number == failing or loads.is_right(number)
    loads.reads.fails = ""
    for number in range(3):  # all buffers were released
        loads.begin(number)
    loads.source.finish_loads()
    assert set(loads.ended.values()) == {None} and all(map(loads.is_right, range(3)))

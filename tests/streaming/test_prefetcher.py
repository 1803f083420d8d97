"""Blocks come ahead of use, in the recorded order, as far as the slots allow; errors come to who waits for them."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from hf_lohan.blocks import Block, lay_out_block
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.optim import master_format
from hf_lohan.planner import PoolPlan, SizeClass
from hf_lohan.runtime import ParameterAccess
from hf_lohan.storage import (
    GRANULE_NUMEL,
    FileBackend,
    IoEngine,
    ModelIdentity,
    RecordRead,
    RecordSpec,
    StorageError,
    Store,
    StorePath,
)
from hf_lohan.streaming.prefetcher import ParameterLoader, Prefetcher
from hf_lohan.streaming.slot_ring import Slot, SlotRing
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.testing.storage_doubles import FaultyBackend, GatedBackend, SlowBackend
from hf_lohan.updates import Delivery

NUM_BLOCKS = 6
BLOCK_NUMEL = 5 * GRANULE_NUMEL
CHUNK_NUMEL = GRANULE_NUMEL
NEVER = 1 << 60


class NotingReader:
    """Notes which blocks are read, in which order."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.loads: list[str] = []

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> RecordRead:
        if start_numel == 0:
            self.loads.append(block)
        return self.store.read(block, kind, start_numel, out)


@dataclass
class Stream:
    """Blocks b0, b1, ... in a store, block i full of the number i, and a prefetcher over them."""

    blocks: list[Block]
    ring: SlotRing
    prefetcher: Prefetcher
    reader: NotingReader
    staging: BufferPool

    @property
    def loads(self) -> str:
        return " ".join(self.reader.loads)

    def use(self, block: Block) -> None:
        """Acquire, look at the weights, release."""
        slot = self.prefetcher.acquire(block)
        assert bool((slot.weights == float(block.name[1:])).all())
        self.ring.unpin(block)

    def training_pass(self) -> None:
        self.prefetcher.begin_pass(is_training=True)
        for block in [*self.blocks, *reversed(self.blocks)]:
            self.use(block)
        self.prefetcher.end_pass()

    def until_idle(self) -> None:
        """Wait until the prefetch thread has nothing that it could do."""

        def nothing_to_do() -> bool:
            loading = any(slot.is_loading for slot in self.ring.slots[SizeClass.LAYER])
            return not loading and self.prefetcher._next() is None

        with self.ring.changed:
            assert self.ring.changed.wait_for(nothing_to_do, timeout=60)


def write(store: Store, block: Block, weight: Tensor) -> None:
    bounce = BufferPool(CpuDevice(), name="bounce", num_buffers=2, buffer_bytes=4 * CHUNK_NUMEL)
    ParameterAccess(store, [block], master_format(torch.float32), bounce).write_parameter(block.slices[0].name, weight)


StreamFactory = Callable[..., Stream]


@pytest.fixture
def make_stream(tmp_path: Path) -> Iterator[StreamFactory]:
    streams: list[Stream] = []
    engines: list[IoEngine] = []

    def make(
        num_slots: int = 2,
        backend: FileBackend | None = None,
        device: CpuDevice | None = None,
        current: Callable[[str], None] = lambda name: None,
    ) -> Stream:
        device = device or CpuDevice()
        blocks = [
            lay_out_block(f"b{i}", SizeClass.LAYER, {f"p{i}": nn.Parameter(torch.full((BLOCK_NUMEL,), float(i)))})
            for i in range(NUM_BLOCKS)
        ]
        folder = StorePath(str(tmp_path / "store"), None)
        identity = ModelIdentity("Tested", NUM_BLOCKS * BLOCK_NUMEL, "0" * 64)
        specs = [RecordSpec(block.name, "param", "float32", block.numel) for block in blocks]
        filling = IoEngine(2, 16384, 1 << 20)
        staging = BufferPool(device, name="staging", num_buffers=2, buffer_bytes=4 * CHUNK_NUMEL)
        with Store.create([folder], specs, model=identity, engine=filling) as store:
            for block in blocks:
                write(store, block, block.slices[0].parameter)
            store.commit()
        filling.close()
        engines.append(IoEngine(2, 16384, 1 << 20, backend))
        plan = PoolPlan(
            chunk_numel=CHUNK_NUMEL,
            num_staging_buffers=2,
            num_state_buffers=0,
            num_gradient_buffers=0,
            num_recall_buffers=0,
            held_blocks=(),
            spilled_blocks=(),
            slot_bytes={SizeClass.LAYER: 4 * BLOCK_NUMEL, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0},
            num_slots={SizeClass.LAYER: num_slots, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0},
        )
        ring = SlotRing(device, plan, torch.float32)
        reader = NotingReader(Store.open([folder], model=identity, engine=engines[-1]))

        def deliver(block: Block, weights: Tensor) -> Delivery:
            current(block.name)
            return Delivery(weights)

        loader = ParameterLoader(device, reader, staging, torch.float32, deliver)
        streams.append(Stream(blocks, ring, Prefetcher(ring, loader, blocks), reader, staging))
        return streams[-1]

    yield make
    for stream in streams:
        stream.prefetcher.close()
        stream.reader.store.close()
    for engine in engines:
        engine.close()


@pytest.mark.parametrize("backend", [None, SlowBackend(1e-3)], ids=["fast", "slow"])
def test_the_order_of_use_is_the_order_of_loading_and_what_is_here_is_not_loaded_again(
    backend: FileBackend | None, make_stream: StreamFactory
) -> None:
    stream = make_stream(num_slots=2, backend=backend)
    for _ in range(5):
        stream.reader.loads.clear()
        with stream.ring.changed:
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
    assert stream.loads == "b0 b1 b2 b3 b4 b5"


def test_what_computes_now_does_not_wait_for_what_comes_later(make_stream: StreamFactory) -> None:
    backend = GatedBackend()
    stream = make_stream(num_slots=2, backend=backend)
    backend.gate.set()
    stream.prefetcher.begin_pass(is_training=False)
    slot = stream.prefetcher.acquire(stream.blocks[0])
    stream.until_idle()  # b1 is here as well
    backend.gate.clear()
    stream.ring.unpin(stream.blocks[0])
    assert stream.prefetcher.acquire(stream.blocks[1]) is not slot  # while b2 hangs in the gate
    backend.gate.set()
    stream.ring.unpin(stream.blocks[1])


def test_a_block_that_nobody_foresaw_goes_first(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=2)
    stream.prefetcher.begin_pass(is_training=False)
    stream.use(stream.blocks[0])
    stream.use(stream.blocks[5])  # the layers between were skipped
    stream.use(stream.blocks[2])
    assert stream.prefetcher.num_unforeseen >= 1
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
    stream.prefetcher.foresee(is_training=False)
    stream.until_idle()
    assert stream.loads == "b4 b0 b2"
    stream.ring.forget(stream.blocks)
    stream.reader.loads.clear()
    stream.prefetcher.foresee(is_training=True)  # this kind has not run yet
    stream.until_idle()
    assert stream.loads == "b0 b1 b2"


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


def test_a_broken_off_pass_teaches_nothing(make_stream: StreamFactory) -> None:
    stream = make_stream(num_slots=2)
    stream.prefetcher.begin_pass(is_training=False)
    stream.use(stream.blocks[3])
    stream.prefetcher.cancel_pass()
    stream.prefetcher.end_pass()
    stream.until_idle()
    stream.ring.forget(stream.blocks)
    stream.reader.loads.clear()
    stream.prefetcher.foresee(is_training=False)
    stream.until_idle()
    assert stream.loads == "b0 b1"


def test_the_oldest_pin_survives_any_prefetching(make_stream: StreamFactory) -> None:
    """Two slots, one pinned for the whole pass: the other one serves all the rest."""
    stream = make_stream(num_slots=2, backend=SlowBackend(2e-4))
    stream.prefetcher.begin_pass(is_training=True)
    pinned: Slot = stream.prefetcher.acquire(stream.blocks[0])
    for block in [*stream.blocks[1:], *reversed(stream.blocks[1:])]:
        stream.use(block)
        assert bool((pinned.weights == 0.0).all())
    stream.ring.unpin(stream.blocks[0])

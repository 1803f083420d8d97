"""Blocks in a store, and a loader of these blocks that notes its reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from slot_plans import plan_of_slots
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice, Event, Lane
from hf_lohan.engine import ParameterAccess
from hf_lohan.files import FileBackend, IoEngine, StorePath
from hf_lohan.model import Block, lay_out_block
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordRead, RecordSpec, Store
from hf_lohan.updates import Delivery
from hf_lohan.weights import LayerLoader, LocalWeights, SlotRing

NUM_BLOCKS = 6
BLOCK_NUMEL = 5 * GRANULE_NUMEL
CHUNK_NUMEL = GRANULE_NUMEL
NEVER = 1 << 60


class NotingReader:
    """Notes the blocks that are read, in order."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.loads: list[str] = []

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        if start_numel == 0:
            self.loads.append(block)
        return self.store.read(block, kind, start_numel, out, is_urgent=is_urgent)


@dataclass
class Stream:
    """Blocks b0, b1, ... in a store, and a loader of these blocks. All elements of block i are i."""

    blocks: list[Block]
    ring: SlotRing
    prefetcher: LayerLoader
    reader: NotingReader
    staging: BufferPool

    @property
    def loads(self) -> str:
        return " ".join(self.reader.loads)

    def use(self, block: Block) -> None:
        """Acquire the block, check its weights and release it."""
        slot = self.prefetcher.acquire(block)
        assert bool((slot.weights == float(block.name[1:])).all())
        self.ring.unpin(block)

    def training_pass(self) -> None:
        self.prefetcher.begin_pass(is_training=True)
        for block in [*self.blocks, *reversed(self.blocks)]:
            self.use(block)
        self.prefetcher.end_pass()

    def until_idle(self) -> None:
        """Wait until the loader's thread has nothing to do."""

        def nothing_to_do() -> bool:
            loading = any(slot.is_loading for slot in self.ring.slots[SizeClass.LAYER])
            return not loading and self.prefetcher.find_load() is None

        with self.ring.lock:
            assert self.ring.changed.wait_for(nothing_to_do, timeout=60)


def write(store: Store, block: Block, weight: Tensor) -> None:
    bounce = BufferPool(CpuDevice(), name="bounce", num_buffers=2, buffer_bytes=4 * CHUNK_NUMEL)
    ParameterAccess(store, [block], bounce).write_parameter(block.slices[0].name, weight)


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
        delivers: Callable[[Block, Tensor], Delivery] = lambda block, weights: Delivery(weights),
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
        plan = plan_of_slots(
            {SizeClass.LAYER: num_slots},
            {SizeClass.LAYER: 4 * BLOCK_NUMEL},
            chunk_numel=CHUNK_NUMEL,
            num_staging_buffers=2,
        )
        ring = SlotRing(device, plan)
        reader = NotingReader(Store.open([folder], model=identity, engine=engines[-1]))

        def deliver(block: Block, weights: Tensor, free: Event | None) -> Delivery:
            if free is not None:
                device.wait(Lane.H2D, free)
            current(block.name)
            return delivers(block, weights)

        loader = LocalWeights(device, reader, staging, deliver)
        streams.append(Stream(blocks, ring, LayerLoader(ring, loader, blocks), reader, staging))
        return streams[-1]

    yield make
    for stream in streams:
        stream.prefetcher.close()
        stream.reader.store.close()
    for engine in engines:
        engine.close()

"""A gradient pipeline over one block of four chunks and a store in memory that notes the order of calls."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.config import Schedule
from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.files import IoRequest
from hf_lohan.model import Block, lay_out_block
from hf_lohan.optim import AdamWGroup
from hf_lohan.store import GRANULE_NUMEL, Checksums, RecordRead
from hf_lohan.updates import ArrivedChunk, GradientPipeline, StepCounts, UpdateSetup
from hf_lohan.updates.worker import Applied

CHUNK_NUMEL = GRANULE_NUMEL
NUM_CHUNKS = 4
GROUP = AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)


class LateCallbacks(IoRequest):
    """Is done at once. Its callbacks run when the test calls `call_back`, as on a slow I/O thread."""

    def __init__(self) -> None:
        super().__init__(0, 0, lambda num_bytes: None)
        self.waiting: list[Callable[[IoRequest], object]] = []

    def add_done_callback(self, callback: Callable[[IoRequest], object]) -> None:
        self.waiting.append(callback)

    def call_back(self) -> None:
        for callback in self.waiting:
            callback(self)


class DoneWhenWaitedFor(IoRequest):
    """Ends when a thread waits for it."""

    def __init__(self, num_bytes: int, finished: Callable[[], None]) -> None:
        super().__init__(num_bytes, 1, lambda num_bytes: finished())

    def wait(self) -> None:
        if not self.done():
            self.finish_piece(None)
        super().wait()


class NothingInRam:
    """The RAM home of a store without copies in RAM."""

    def borrow(self, block: str, kind: str, start_numel: int, numel: int) -> None:
        return None

    def keeps_write(self, block: str, kind: str) -> bool:
        return False


class MemoryStore:
    """Records in memory, and the order of calls: `r0` reads chunk 0, `w0` writes it, `drop` drops drafts."""

    num_homes = 2

    def __init__(self, fail: Exception | None = None) -> None:
        self.ram = NothingInRam()
        self.records: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.fail = fail
        self.has_drafts = False
        self.may_read = threading.Event()
        self.may_read.set()
        self.write_requests: Literal["at_once", "late_callbacks", "when_waited_for"] = "at_once"
        self.late: list[LateCallbacks] = []
        self.num_running = 0
        self._committed: dict[str, Tensor] = {}

    def commit(self) -> None:
        self._committed = {kind: record.clone() for kind, record in self.records.items()}
        self.has_drafts = False

    def drop_drafts(self) -> None:
        assert self.num_running == 0, "a write would land after the drop"
        self.order.append("drop")
        for kind, record in self.records.items():
            record.copy_(self._committed.get(kind, torch.zeros_like(record)))
        self.has_drafts = False

    def _part(self, kind: str, start_numel: int, like: Tensor) -> Tensor:
        record = self.records.setdefault(kind, torch.zeros(NUM_CHUNKS * CHUNK_NUMEL))
        return record[start_numel : start_numel + like.numel()]

    def _note(self, verb: str, start_numel: int) -> None:
        event = f"{verb}{start_numel // CHUNK_NUMEL}"
        if not self.order or self.order[-1] != event:
            self.order.append(event)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> RecordRead:
        if self.fail is not None:
            raise self.fail
        assert self.may_read.wait(60)
        self._note("r", start_numel)
        out.copy_(self._part(kind, start_numel, out))
        return RecordRead.of_memory()

    def checksums(self, block: str, kind: str, source: Tensor) -> Checksums:
        return np.zeros(source.numel() // GRANULE_NUMEL, np.uint64)

    def write(
        self, block: str, kind: str, start_numel: int, source: Tensor, *, checksums: Checksums | None = None
    ) -> IoRequest:
        self._note("w", start_numel)
        self._part(kind, start_numel, source).copy_(source)
        self.has_drafts = True
        match self.write_requests:
            case "at_once":
                return IoRequest.finished()
            case "late_callbacks":
                self.late.append(LateCallbacks())
                return self.late[-1]
            case "when_waited_for":
                self.num_running += 1
                return DoneWhenWaitedFor(source.nbytes, self._finish_write)

    def _finish_write(self) -> None:
        self.num_running -= 1


def pool(name: str, num_buffers: int) -> BufferPool:
    return BufferPool(CpuDevice(), name=name, num_buffers=num_buffers, buffer_bytes=4 * CHUNK_NUMEL)


class Bench:
    """A block with one parameter per chunk, and a pipeline over it."""

    def __init__(
        self,
        schedule: Schedule,
        *,
        hold_gradients: bool,
        fail: Exception | None = None,
        speculates: bool = False,
        lends_gradient_buffers: bool = False,
        make_pipeline: Callable[[UpdateSetup], GradientPipeline] = GradientPipeline,
    ) -> None:
        parameters = {f"p{i}": nn.Parameter(torch.zeros(CHUNK_NUMEL)) for i in range(NUM_CHUNKS)}
        self.block = lay_out_block("block", SizeClass.LAYER, parameters)
        self.chunks = self.block.cut(CHUNK_NUMEL)
        self.store = MemoryStore(fail)
        self.gradients, self.states = pool("gradients", 2 * NUM_CHUNKS), pool("states", 3 * NUM_CHUNKS)
        self.step_counts: StepCounts = dict.fromkeys(self.block.slices, 0)
        self.groups = [GROUP]
        """The last entry has the current hyperparameters."""
        self.pipeline = make_pipeline(
            UpdateSetup(
                device=CpuDevice(),
                blocks=[self.block],
                chunks=self.chunks,
                slices=self.block.slices,
                group_of=lambda part: self.groups[-1],
                step_counts=self.step_counts,
                schedule=schedule,
                holds_gradients=hold_gradients,
                store=self.store,
                states=self.states,
                gradients=self.gradients,
                recall=pool("recall", 0),
                num_arrival_buffers=0 if lends_gradient_buffers else self.gradients.num_buffers,
            )
        )
        self.pipeline.set_speculation(speculates)
        self.applied: list[Applied] = []

    def arrived(self, index: int, value: float) -> ArrivedChunk:
        chunk = self.chunks[index]
        arrived = ArrivedChunk(chunk, self.gradients.acquire(), torch.float32, list(chunk.pieces))
        arrived.landing.fill_(value)
        return arrived

    def read_weights(self) -> Tensor:
        """Read the weights as a load of the block to the device does."""
        weights = torch.full((self.block.numel,), float("nan"))
        delivery = self.pipeline.deliver(self.block, weights)
        for start, stop in delivery.ranges_to_read():
            weights[start:stop] = self.store.records["param"][start:stop]
        delivery.wait()
        return weights

    def hold_up(self) -> threading.Event:
        """Block the pipeline's thread until the event is set."""
        gate = threading.Event()

        def wait() -> None:
            assert gate.wait(60)

        self.pipeline._thread.submit(wait)
        return gate

    def submit_all(self, value: float = 1.0, *, is_final: bool = True) -> None:
        """Submit all chunks, last first, as backward does, before the pipeline's thread runs."""
        gate = self.hold_up()
        for index in reversed(range(NUM_CHUNKS)):
            self.pipeline.submit(self.arrived(index, value), is_final=is_final)
        gate.set()

    def finish_step(self, clip_coefficient: float = 1.0) -> set[Block]:
        """Finish the step, wait for its updates, and commit."""
        self.pipeline.wait_for_norms()
        changed, applied = self.pipeline.finish_step(clip_coefficient, lambda part: GROUP)
        self.applied.append(applied)
        self.pipeline.wait_for_updates()
        self.store.commit()
        return changed

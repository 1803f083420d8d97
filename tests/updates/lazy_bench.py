"""A gradient pipeline over experts in a store of files. Lazy experts take steps with zero gradients later."""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from pathlib import Path

import torch
from torch import Tensor, nn

from hf_lohan.config import Schedule
from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice, mapped_empty
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.model import Block, Chunk, lay_out_block
from hf_lohan.optim import AdamWGroup, MasterFormat
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store
from hf_lohan.updates import ArrivedChunk, GradientPipeline, MissedSteps, StepCounts, UpdateSetup, UpToDateRecords
from hf_lohan.updates.worker import Applied

NUM_EXPERTS = 4
CHUNK_NUMEL = GRANULE_NUMEL
_NUM_ROWS = 3 * GRANULE_NUMEL // 2 // 64
"""With this size one parameter of an expert lies in two chunks, and another parameter follows it."""


def _pool(name: str, num_buffers: int, chunk_numel: int) -> BufferPool:
    return BufferPool(CpuDevice(), name=name, num_buffers=num_buffers, buffer_bytes=4 * chunk_numel)


class LazyBench:
    """Experts with one weight and one bias each, which are parts of two fused parameters."""

    def __init__(
        self,
        folder: Path,
        form: MasterFormat,
        *,
        most: int,
        from_share: float = 0.0,
        hold_gradients: bool = True,
        speculates: bool = False,
        schedule: Schedule = "optimized",
        chunk_numel: int = CHUNK_NUMEL,
    ) -> None:
        """``most``, ``from_share``: see `MissedSteps`."""
        self.folder, self.form = folder, form
        self.weights = nn.Parameter(torch.zeros(NUM_EXPERTS, _NUM_ROWS, 64))
        self.biases = nn.Parameter(torch.zeros(NUM_EXPERTS, 64))
        self.blocks = [self._expert(number) for number in range(NUM_EXPERTS)]
        self.chunks = [chunk for block in self.blocks for chunk in block.cut(chunk_numel)]
        lazy = set(self.blocks) if most else set()
        self.missed = MissedSteps(self.blocks, self.chunks, lazy, most=most, from_share=from_share)
        self.io = IoEngine(2, 1 << 20, 1 << 26)
        self.store = self._opened_store()
        self.records = UpToDateRecords(self.store, self.blocks, self.missed)
        self.step_counts: StepCounts = {part: 0 for block in self.blocks for part in block.slices}
        self.gradients = _pool("gradients", 2 * len(self.chunks), chunk_numel)
        self.states = _pool("states", 2 * form.num_state_buffers_per_chunk, chunk_numel)
        self.group = AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1)
        self.applied: list[Applied | None] = []
        self.pipeline = GradientPipeline(
            UpdateSetup(
                device=CpuDevice(),
                blocks=self.blocks,
                chunks=self.chunks,
                slices=[part for block in self.blocks for part in block.slices],
                group_of=lambda part: self.group,
                step_counts=self.step_counts,
                schedule=schedule,
                holds_gradients=hold_gradients,
                store=self.store,
                states=self.states,
                gradients=self.gradients,
                recall=_pool("recall", 0, chunk_numel),
                num_arrival_buffers=self.gradients.num_buffers,
                missed=self.missed,
            )
        )
        self.pipeline.set_speculation(speculates)

    def _expert(self, number: int) -> Block:
        parameters = {"weights": self.weights, "biases": self.biases}
        parts = {
            name: (number * parameter[0].numel(), (number + 1) * parameter[0].numel())
            for name, parameter in parameters.items()
        }
        return lay_out_block(f"expert{number}", SizeClass.LAYER, parameters, self.form, GRANULE_NUMEL, parts)

    def _opened_store(self) -> Store:
        paths, model = [StorePath(str(self.folder), None)], ModelIdentity("Tested", 1, "0" * 64)
        if self.folder.is_dir():
            return Store.open(paths, model=model, engine=self.io)
        specs = [
            RecordSpec(block.name, kind, str(self.form.state_dtype(kind)).removeprefix("torch."), numel)
            for block in self.blocks
            for kind, numel in [
                ("param", block.numel),
                *((kind, self.form.numel(kind, block.state_numel)) for kind in self.form.state_kinds),
            ]
        ]
        store = Store.create(paths, specs, model=model, engine=self.io, num_homes=2)
        random = torch.Generator().manual_seed(0)
        for block in self.blocks:
            view = mapped_empty(block.param_bytes).view(self.form.working_dtype)
            view.copy_(torch.randn(block.numel, generator=random))
            store.write(block.name, "param", 0, view).wait()
        store.commit()
        return store

    def close(self) -> None:
        self.pipeline.close()
        self.store.close()
        self.io.close()

    def backward(self, touched: Collection[int], seed: int, *, is_final: bool = True) -> None:
        """Run a backward that passes all experts and has gradients for the touched ones."""
        random = torch.Generator().manual_seed(seed)
        for chunk in reversed(self.chunks):
            values = torch.randn(chunk.numel, generator=random)
            if self.blocks.index(chunk.block) in touched:
                self.pipeline.submit(self._arrived(chunk, values), is_final=is_final)
        self.pipeline.note_passed(self.chunks)

    def _arrived(self, chunk: Chunk, values: Tensor) -> ArrivedChunk:
        arrived = ArrivedChunk(chunk, self.gradients.acquire(), torch.float32, list(chunk.pieces))
        arrived.landing.copy_(values)
        for start, stop in chunk.gaps:
            arrived.landing[start:stop].zero_()
        return arrived

    def step(self, touched: Collection[int], seed: int, clip_coefficient: float = 1.0, *, commits: bool = True) -> None:
        self.backward(touched, seed)
        self.finish_step(clip_coefficient, commits=commits)

    def finish_step(self, clip_coefficient: float = 1.0, *, commits: bool = True) -> None:
        self.pipeline.wait_for_norms()
        group = self.group
        _, applied = self.pipeline.finish_step(clip_coefficient, lambda part: group)
        self.applied.append(applied)
        if commits:
            self.commit()

    def commit(self) -> None:
        self.pipeline.wait_for_updates()
        packed = self.missed.packed()
        counts = [self.step_counts[part] for block in self.blocks for part in block.slices]
        self.store.commit({"counts": counts}, {"missed": packed} if packed is not None else {})

    def go_back(self) -> None:
        self.pipeline.abandon_step()
        self.pipeline.wait_for_updates()
        self.store.drop_drafts()
        self.restore()

    def restore(self) -> None:
        commit = self.store.committed
        counts = commit.facts.get("counts", [0] * len(self.step_counts))
        self.step_counts.update(zip(self.step_counts, counts, strict=True))
        self.missed.restore(commit.journal.get("missed"))

    def weights_of(self, number: int) -> Tensor:
        """Return the weights as a slot gets them."""
        block = self.blocks[number]
        weights = torch.full((block.numel,), float("nan"), dtype=self.form.working_dtype)
        delivery = self.pipeline.deliver(block, weights)
        for start, stop in delivery.ranges_to_read():
            view = mapped_empty((stop - start) * weights.itemsize).view(weights.dtype)
            self.records.read(block.name, "param", start, view).wait()
            weights[start:stop] = view
        delivery.wait()
        return weights

    def states_of(self, number: int, kinds: Sequence[str] = ()) -> dict[str, Tensor]:
        """Return all records of an expert after its missed steps."""
        self.pipeline.wait_for_updates()
        block, found = self.blocks[number], {}
        for kind in kinds or ("param", *self.form.state_kinds):
            numel = self.records.layout.record(block.name, kind).numel
            dtype = self.form.state_dtype(kind)
            view = mapped_empty(numel * dtype.itemsize).view(dtype)
            self.records.read(block.name, kind, 0, view).wait()
            found[kind] = view
        return found

    def experts_behind(self) -> Set[int]:
        return {number for number, block in enumerate(self.blocks) if self.missed.is_block_behind(block)}


def assert_equal(found: LazyBench, expected: LazyBench) -> None:
    """Check that all records are bitwise equal, and that step counts are equal."""
    for number in range(NUM_EXPERTS):
        states = expected.states_of(number)
        for kind, record in found.states_of(number).items():
            assert torch.equal(record.view(torch.uint8), states[kind].view(torch.uint8)), f"{kind} of expert {number}"
    assert list(found.step_counts.values()) == list(expected.step_counts.values())

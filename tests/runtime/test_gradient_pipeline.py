"""Gradients in, updates out: the schedules, the sums, the norms, and the merging of neighbours."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_lohan.device import Buffer, BufferPool, CpuDevice, PoolAborted
from hf_lohan.optim import AdamWGroup, Segment, master_format
from hf_lohan.planner import SizeClass
from hf_lohan.runtime import Block, Chunk, ParamSlice
from hf_lohan.runtime.block import RECORD_ALIGN_NUMEL, lay_out_block
from hf_lohan.runtime.gradient_arrival import ArrivedChunk, GradientArrivals
from hf_lohan.runtime.gradient_home import GradientHome
from hf_lohan.runtime.gradient_norms import GradientNorms
from hf_lohan.runtime.gradient_pipeline import GradientPipeline, Schedule
from hf_lohan.runtime.state_update import ChunkGradient, StateUpdater, merge_segments
from hf_lohan.storage import IoRequest

CHUNK_NUMEL = RECORD_ALIGN_NUMEL
NUM_CHUNKS = 4
GROUP = AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
OTHER_GROUP = AdamWGroup(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)


class MemoryStore:
    """Records in memory, and the order of what was asked of them: `r0` reads chunk 0, `w0` writes it."""

    def __init__(self, fail: Exception | None = None) -> None:
        self.records: dict[str, Tensor] = {}
        self.order: list[str] = []
        self.fail = fail

    def _part(self, kind: str, start_numel: int, like: Tensor) -> Tensor:
        record = self.records.setdefault(kind, torch.zeros(NUM_CHUNKS * CHUNK_NUMEL))
        return record[start_numel : start_numel + like.numel()]

    def _note(self, verb: str, start_numel: int) -> None:
        event = f"{verb}{start_numel // CHUNK_NUMEL}"
        if not self.order or self.order[-1] != event:
            self.order.append(event)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor) -> IoRequest:
        if self.fail is not None:
            raise self.fail
        self._note("r", start_numel)
        out.copy_(self._part(kind, start_numel, out))
        return IoRequest(0, 0, lambda num_bytes: None)

    def write(self, block: str, kind: str, start_numel: int, source: Tensor) -> IoRequest:
        self._note("w", start_numel)
        self._part(kind, start_numel, source).copy_(source)
        return IoRequest(0, 0, lambda num_bytes: None)


def pool(name: str, num_buffers: int) -> BufferPool:
    return BufferPool(CpuDevice(), name=name, num_buffers=num_buffers, buffer_bytes=4 * CHUNK_NUMEL)


class Bench:
    """A block of one parameter a chunk, and a pipeline over it."""

    def __init__(self, schedule: Schedule, *, hold_gradients: bool, fail: Exception | None = None) -> None:
        parameters = {f"p{i}": nn.Parameter(torch.zeros(CHUNK_NUMEL)) for i in range(NUM_CHUNKS)}
        self.block = lay_out_block("block", SizeClass.LAYER, parameters)
        self.chunks = self.block.cut(CHUNK_NUMEL)
        self.store = MemoryStore(fail)
        self.gradients, self.states = pool("gradients", NUM_CHUNKS + 1), pool("states", 9)
        self.norms = GradientNorms(self.block.slices)
        self.pipeline = GradientPipeline(
            StateUpdater(self.store, self.states, master_format(torch.float32)),
            GradientHome(pool("recall", 0), frozenset(), None),
            [self.block],
            lambda part: GROUP,
            self.norms,
            self.gradients,
            schedule=schedule,
            hold_gradients=hold_gradients,
        )

    def arrived(self, index: int, value: float) -> ArrivedChunk:
        chunk = self.chunks[index]
        arrived = ArrivedChunk(chunk, self.gradients.acquire(), torch.float32, list(chunk.pieces))
        arrived.landing.fill_(value)
        return arrived

    def hold_up(self) -> threading.Event:
        """Keep the pipeline from doing anything until the event is set."""
        gate = threading.Event()

        def wait() -> None:
            assert gate.wait(60)

        self.pipeline._commands.put(wait)
        return gate

    def submit_all(self, value: float = 1.0) -> None:
        """All chunks at once, last first, as backward does: before the pipeline can do anything."""
        gate = self.hold_up()
        for index in reversed(range(NUM_CHUNKS)):
            self.pipeline.submit(self.arrived(index, value), is_final=True)
        gate.set()

    def finish_step(self, clip_coefficient: float = 1.0) -> set[Block]:
        """Finish the step and wait for it."""
        self.pipeline.measure()
        changed = self.pipeline.finish_step(clip_coefficient, lambda part: GROUP)
        self.pipeline.settle()
        return changed


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    benches: list[Bench] = []

    def make(schedule: Schedule = "optimized", **settings: Any) -> Bench:
        benches.append(Bench(schedule, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.pipeline.close()


def test_optimized_reads_the_next_chunk_before_it_writes_the_last(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("optimized", hold_gradients=False)
    bench.submit_all()
    bench.finish_step()
    assert bench.store.order == ["r3", "r2", "w3", "r1", "w2", "r0", "w1", "w0"]


def test_naive_takes_one_chunk_after_another(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("naive", hold_gradients=False)
    bench.submit_all()
    bench.finish_step()
    assert bench.store.order == ["r3", "w3", "r2", "w2", "r1", "w1", "r0", "w0"]


@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_held_gradients_are_applied_only_by_the_step_first_block_first(
    schedule: Schedule, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench(schedule, hold_gradients=True)
    bench.submit_all()
    bench.pipeline.measure()  # a barrier: all has been taken in
    assert bench.store.order == []
    bench.finish_step()
    reads = [event for event in bench.store.order if event.startswith("r")]
    assert reads == ["r0", "r1", "r2", "r3"]


@pytest.mark.parametrize("hold_gradients", [True, False])
@pytest.mark.parametrize("schedule", ["optimized", "naive", "serial"])
def test_every_schedule_gives_all_buffers_back_and_the_same_numbers(
    schedule: Schedule, hold_gradients: bool, make_bench: Callable[..., Bench]
) -> None:
    bench = make_bench(schedule, hold_gradients=hold_gradients)
    reference = nn.Parameter(torch.zeros(NUM_CHUNKS * CHUNK_NUMEL))
    optimizer = torch.optim.AdamW([reference], lr=GROUP.lr, weight_decay=GROUP.weight_decay, fused=True)
    for step in range(3):
        bench.submit_all(value=step - 0.5)
        assert bench.finish_step() == {bench.block}
        reference.grad = torch.full_like(reference, step - 0.5)
        optimizer.step()
    assert torch.equal(bench.store.records["param"], reference)
    assert {part.num_updates for part in bench.block.slices} == {3}
    for buffers in (bench.gradients, bench.states):
        assert buffers.num_free == buffers.num_buffers


def test_held_updates_hold_nobody_up_but_those_who_read_their_block(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench("optimized", hold_gradients=True)
    bench.submit_all()
    bench.pipeline.measure()
    gate = bench.hold_up()
    bench.pipeline.finish_step(1.0, lambda part: GROUP)  # does not wait
    assert bench.store.order == []
    with ThreadPoolExecutor(1) as threads:
        reader = threads.submit(bench.pipeline.wait_until_current, bench.block)
        assert not reader.done()
        gate.set()
        reader.result(60)
    assert [event for event in bench.store.order if event.startswith("w")] == ["w0", "w1", "w2", "w3"]


def test_the_clip_coefficient_scales_once(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(hold_gradients=True)
    bench.submit_all(value=4.0)
    bench.finish_step(0.25)
    assert torch.allclose(bench.store.records["exp_avg"], torch.tensor(0.1))
    bench.submit_all(value=1.0)
    bench.finish_step()
    assert torch.allclose(bench.store.records["exp_avg"], torch.tensor(0.19))


def test_dropped_gradients_are_gone_and_their_buffers_back(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(hold_gradients=True)
    bench.submit_all()
    assert bench.pipeline.drop() == set()
    assert bench.gradients.num_free == bench.gradients.num_buffers
    assert bench.finish_step() == set()
    assert bench.store.order == []


def test_a_failure_wakes_who_waits_for_buffers_and_is_raised_at_the_step(make_bench: Callable[..., Bench]) -> None:
    cause = OSError("the drive is gone")
    bench = make_bench(hold_gradients=False, fail=cause)
    with pytest.raises(PoolAborted, match="the drive is gone") as aborted:
        for _ in range(bench.gradients.num_buffers + 1):  # backward, which nobody told
            bench.pipeline.submit(bench.arrived(0, 1.0), is_final=True)
    assert aborted.value.__cause__ is cause
    with pytest.raises(OSError, match="the drive is gone"):
        bench.finish_step()


# Merging neighbours.


def block_of(*numels: int) -> tuple[Block, Chunk]:
    parameters = {f"p{i}": nn.Parameter(torch.zeros(numel, 1)) for i, numel in enumerate(numels)}
    block = lay_out_block("block", SizeClass.LAYER, parameters)
    return block, block.cut(1 << 20)[0]


def segments(chunk: Chunk, present: set[int], groups: dict[int, AdamWGroup] | None = None) -> list[Segment]:
    slices = [piece.param_slice for piece in chunk.pieces]
    gradient = ChunkGradient(chunk, None, {slices[index] for index in present})
    return merge_segments(gradient, lambda part: (groups or {}).get(slices.index(part), GROUP))


def test_neighbours_of_one_kind_are_one_run() -> None:
    _, chunk = block_of(64, 100, 32)
    assert segments(chunk, {0, 1, 2}) == [Segment(0, chunk.pieces[-1].stop_in_chunk, GROUP, 1)]


def test_a_parameter_without_gradient_parts_a_run() -> None:
    _, chunk = block_of(64, 100, 32)
    ends = [(piece.start_in_chunk, piece.stop_in_chunk) for piece in chunk.pieces]
    assert segments(chunk, {0, 2}) == [Segment(*ends[0], GROUP, 1), Segment(*ends[2], GROUP, 1)]
    assert segments(chunk, set()) == []


def test_other_hyperparameters_or_another_step_part_a_run() -> None:
    _, chunk = block_of(64, 100, 32)
    chunk.pieces[2].param_slice.num_updates = 5
    found = segments(chunk, {0, 1, 2}, {1: OTHER_GROUP})
    assert [(segment.group, segment.step) for segment in found] == [(GROUP, 1), (OTHER_GROUP, 1), (GROUP, 6)]


# Arrival and norms.


def arrivals_for(block: Block, handed_on: list[ArrivedChunk], buffers: BufferPool) -> GradientArrivals:
    norms = GradientNorms(block.slices)
    return GradientArrivals(CpuDevice(), buffers, block.cut(CHUNK_NUMEL), norms, handed_on.append)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_handed_on_when_complete_with_zeros_in_the_padding(dtype: torch.dtype) -> None:
    block = lay_out_block(
        "block",
        SizeClass.LAYER,
        {name: nn.Parameter(torch.zeros(numel, 1, dtype=dtype)) for name, numel in (("large", 5000), ("small", 3))},
    )
    handed_on: list[ArrivedChunk] = []
    buffers = pool("gradients", 3)
    for buffer in [buffers.acquire() for _ in range(3)]:
        buffer.bytes.fill_(0xFF)  # NaN wherever nobody writes
        buffer.release()
    arrivals = arrivals_for(block, handed_on, buffers)
    large, small = block.slices
    gradients: dict[ParamSlice, Tensor] = {}
    for part, expected in ((large, 2), (small, 3)):
        gradient = torch.randn(part.shape).to(dtype)
        gradients[part], part.parameter.grad = gradient, gradient
        arrivals.take(part, part.parameter)
        assert part.parameter.grad is None
        assert len(handed_on) == expected  # the third chunk is shared
    whole = torch.cat([arrived.wait() for arrived in handed_on])
    for part, gradient in gradients.items():
        assert torch.equal(whole[part.start : part.stop], gradient.flatten().float())
        whole[part.start : part.stop] = 0
    assert not whole.any()


def test_flush_hands_on_what_some_parameter_never_reached() -> None:
    block, _ = block_of(64, 100)
    handed_on: list[ArrivedChunk] = []
    buffers = pool("gradients", 1)
    arrivals = arrivals_for(block, handed_on, buffers)
    first = block.slices[0]
    first.parameter.grad = torch.ones(64, 1)
    arrivals.take(first, first.parameter)
    assert handed_on == []
    arrivals.flush()
    assert [piece.param_slice for piece in handed_on[0].pieces] == [first]
    handed_on[0].buffer.release()
    first.parameter.grad = torch.ones(64, 1)
    arrivals.take(first, first.parameter)
    arrivals.abandon()
    assert buffers.num_free == 1
    assert len(handed_on) == 1


def test_a_sparse_gradient_is_refused_by_name() -> None:
    embedding = nn.Embedding(40, 8, sparse=True)
    table = embedding.weight
    assert isinstance(table, nn.Parameter)
    block = lay_out_block("block", SizeClass.LAYER, {"table": table})
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="table has a sparse gradient"):
        arrivals_for(block, [], pool("gradients", 2)).take(block.slices[0], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_total_norm_is_that_of_torch_to_the_bit(dtype: torch.dtype) -> None:
    block, _ = block_of(64, 5000, 3, 2048, 700)
    norms = GradientNorms(block.slices)
    gradients = [torch.randn(part.shape).to(dtype) for part in block.slices]
    for part, gradient in list(zip(block.slices, gradients, strict=True))[::-1]:  # as backward brings them
        norms.set_first(part, gradient.flatten())
    in_order = [gradient.float() for gradient in gradients]
    assert torch.equal(norms.total(), torch.nn.utils.get_total_norm(in_order, foreach=False))
    norms.clear()
    assert norms.total() == 0.0


def test_a_sum_measured_in_pieces_replaces_the_first_norm() -> None:
    block, _ = block_of(2 * CHUNK_NUMEL)
    part = block.slices[0]
    norms = GradientNorms([part])
    norms.set_first(part, torch.full((2 * CHUNK_NUMEL,), 100.0))
    for chunk in block.cut(CHUNK_NUMEL):
        norms.set_summed(chunk.pieces[0], torch.full((CHUNK_NUMEL,), 0.5))
    assert float(norms.total()) == pytest.approx(0.5 * (2 * CHUNK_NUMEL) ** 0.5)


def test_a_buffer_is_not_released_while_its_writes_run() -> None:
    """The update's buffers come back only after the last of its writes."""
    pending: list[IoRequest] = []
    told: list[object] = []

    class SlowStore(MemoryStore):
        def write(self, block: str, kind: str, start_numel: int, source: Tensor) -> IoRequest:
            pending.append(IoRequest(source.nbytes, 1, lambda num_bytes: None))
            return pending[-1]

    block, chunk = block_of(64)
    states, gradients = pool("states", 3), pool("gradients", 1)
    updater = StateUpdater(SlowStore(), states, master_format(torch.float32))
    buffer: Buffer = gradients.acquire()
    buffer.bytes.zero_()
    update = updater.begin(ChunkGradient(chunk, buffer, set(block.slices)), [])
    updater.finish(update, clip_coefficient=1.0, group_of=lambda part: GROUP, written=told.append)
    assert gradients.num_free == 1
    for request in pending[:-1]:
        request.finish_piece(None)
        assert (states.num_free, told) == (0, [])
    cause = OSError("also badly")
    pending[-1].finish_piece(cause)
    assert (states.num_free, told) == (3, [cause])

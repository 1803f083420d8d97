"""Gradients arrive in chunks and may borrow slots. Their total norm equals torch, and neighbours form segments."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pipeline_bench import CHUNK_NUMEL, GROUP, pool
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice
from hf_lohan.model import Block, Chunk, ParamSlice, lay_out_block
from hf_lohan.optim import AdamWGroup, Segment
from hf_lohan.updates.arrival import BackwardContext, GradientArrivals
from hf_lohan.updates.chunk_update import merge_segments
from hf_lohan.updates.gradients import ArrivedChunk, ChunkGradient, GradientNorms

OTHER_GROUP = replace(GROUP, weight_decay=0.0)


# Segments.


def block_of(*numels: int) -> tuple[Block, Chunk]:
    parameters = {f"p{i}": nn.Parameter(torch.zeros(numel, 1)) for i, numel in enumerate(numels)}
    block = lay_out_block("block", SizeClass.LAYER, parameters)
    return block, block.cut(1 << 20)[0]


def segments(
    chunk: Chunk, present: set[int], groups: dict[int, AdamWGroup] | None = None, steps: dict[int, int] | None = None
) -> list[Segment]:
    slices = [piece.param_slice for piece in chunk.pieces]
    gradient = ChunkGradient(chunk, None, {slices[index] for index in present})
    step_counts = {part: (steps or {}).get(index, 0) for index, part in enumerate(slices)}
    return merge_segments(gradient, lambda part: (groups or {}).get(slices.index(part), GROUP), step_counts)


def test_a_segment_ends_where_settings_change_and_after_a_partial_vector() -> None:
    """It ends at a parameter without a gradient, too."""
    _, chunk = block_of(64, 96, 32)
    assert segments(chunk, {0, 1, 2}) == [Segment(0, chunk.pieces[-1].stop_in_chunk, GROUP, 1)]
    _, chunk = block_of(64, 100, 32)  # the second ends within a vector
    ends = [(piece.start_in_chunk, piece.stop_in_chunk) for piece in chunk.pieces]
    assert segments(chunk, {0, 1, 2}) == [Segment(0, ends[1][1], GROUP, 1), Segment(*ends[2], GROUP, 1)]
    assert segments(chunk, {0, 2}) == [Segment(*ends[0], GROUP, 1), Segment(*ends[2], GROUP, 1)]
    assert segments(chunk, set()) == []
    found = segments(chunk, {0, 1, 2}, {1: OTHER_GROUP}, {2: 5})
    assert [(segment.group, segment.step) for segment in found] == [(GROUP, 1), (OTHER_GROUP, 1), (GROUP, 6)]


# Arrival and norms.


def arrivals_at(block: Block, buffers: BufferPool, **changes: Any) -> GradientArrivals:
    pipeline: dict[str, Any] = {
        "measure_gradient": lambda part, gradient: None,
        "holds_gradients": True,
        "has_gradients": False,
        "count_backward": lambda: 1,
        "wait_for_ranks": nullcontext,
        "held_back": lambda arrived: [],
    }
    return GradientArrivals(
        CpuDevice(),
        buffers,
        block.cut(CHUNK_NUMEL),
        SimpleNamespace(**pipeline | changes),  # type: ignore[arg-type]
    )


def arrivals_for(block: Block, submitted: list[ArrivedChunk], buffers: BufferPool) -> GradientArrivals:
    return arrivals_at(
        block,
        buffers,
        measure_gradient=GradientNorms(block.slices).set_first,
        submit=lambda arrived, **_options: submitted.append(arrived),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_submitted_when_complete_with_zeros_in_the_padding(dtype: torch.dtype) -> None:
    numels = {"large": 2 * CHUNK_NUMEL + 900, "small": 3}
    parameters = {name: nn.Parameter(torch.zeros(numel, 1, dtype=dtype)) for name, numel in numels.items()}
    block = lay_out_block("block", SizeClass.LAYER, parameters)
    submitted: list[ArrivedChunk] = []
    buffers = pool("gradients", 3)
    for buffer in [buffers.acquire() for _ in range(3)]:
        buffer.bytes.fill_(0xFF)  # NaN, unless it is written
        buffer.release()
    arrivals = arrivals_for(block, submitted, buffers)
    large, small = block.slices
    gradients: dict[ParamSlice, Tensor] = {}
    for part, expected in ((large, 2), (small, 3)):
        gradient = torch.randn(part.shape).to(dtype)
        gradients[part], part.parameter.grad = gradient, gradient
        arrivals.take_gradient(part, part.parameter)
        assert part.parameter.grad is None
        assert len(submitted) == expected  # the third chunk is shared
    whole = torch.cat([arrived.wait() for arrived in submitted])
    for part, gradient in gradients.items():
        assert torch.equal(whole[part.start : part.stop], gradient.flatten().float())
        whole[part.start : part.stop] = 0
    assert not whole.any()


def test_flush_submits_incomplete_chunks() -> None:
    block, _ = block_of(64, 100)
    submitted: list[ArrivedChunk] = []
    buffers = pool("gradients", 1)
    arrivals = arrivals_for(block, submitted, buffers)
    first = block.slices[0]
    first.parameter.grad = torch.ones(64, 1)
    arrivals.take_gradient(first, first.parameter)
    assert submitted == []
    arrivals.flush()
    assert [piece.param_slice for piece in submitted[0].pieces] == [first]
    submitted[0].buffer.release()
    first.parameter.grad = torch.ones(64, 1)
    arrivals.take_gradient(first, first.parameter)
    arrivals.abandon_backward()
    assert buffers.num_free == 1
    assert len(submitted) == 1


@pytest.mark.parametrize("is_final", [True, False])
@pytest.mark.parametrize("updates_in_backward", [True, False])
@pytest.mark.parametrize("owns", [True, False])
def test_a_slot_is_borrowed_for_an_update_in_the_final_backward(
    owns: bool, updates_in_backward: bool, is_final: bool
) -> None:
    block, _ = block_of(64)
    submitted: list[tuple[bool, Any]] = []
    slots: Any = SimpleNamespace(borrow_slot=lambda block: f"slot of {block.name}")
    arrivals = arrivals_at(
        block,
        pool("gradients", 2),
        updates_in_backward=updates_in_backward,
        updates_chunk=lambda chunk: owns,
        submit=lambda arrived, *, is_final, borrowed: submitted.append((is_final, borrowed)),
    )
    arrivals.begin_backward(BackwardContext(is_final=is_final, slots=slots))
    arrivals.send_gradient(block.slices[0], torch.ones(64))
    arrivals.send_gradient(block.slices[0], torch.ones(64), has_more=True)
    borrows = is_final and updates_in_backward and owns
    assert submitted == [(is_final, "slot of block" if borrows else None), (False, None)]


def test_a_sparse_gradient_is_refused() -> None:
    embedding = nn.Embedding(40, 8, sparse=True)
    table = embedding.weight
    assert isinstance(table, nn.Parameter)
    block = lay_out_block("block", SizeClass.LAYER, {"table": table})
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(ValueError, match="table has a sparse gradient"):
        arrivals_for(block, [], pool("gradients", 2)).take_gradient(block.slices[0], table)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_total_norm_equals_torch_to_the_bit(dtype: torch.dtype) -> None:
    block, _ = block_of(64, 5000, 3, 2048, 700)
    norms = GradientNorms(block.slices)
    gradients = [torch.randn(part.shape).to(dtype) for part in block.slices]
    for part, gradient in list(zip(block.slices, gradients, strict=True))[::-1]:  # in the order of backward
        norms.set_first(part, gradient.flatten())
    in_order = [gradient.float() for gradient in gradients]
    assert torch.equal(norms.total(), torch.nn.utils.get_total_norm(in_order, foreach=False))
    norms.clear()
    assert norms.total() == 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_total_norm_does_not_depend_on_the_order_in_which_sums_are_measured(seed: int) -> None:
    """Threads measure sums, so the order changes from run to run."""
    generator = torch.Generator().manual_seed(seed)
    block, chunk = block_of(*[64] * 200)
    gradients = [torch.randn(piece.numel, generator=generator).exp() for piece in chunk.pieces]
    in_order = float(torch.nn.utils.get_total_norm(gradients, foreach=False))
    for _ in range(20):
        norms = GradientNorms(block.slices)
        for index in torch.randperm(len(gradients), generator=generator).tolist():
            norms.set_summed(chunk.pieces[index], gradients[index])
        assert float(norms.total()) == in_order


def test_all_norms_are_copied_to_the_host_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each copy waits for the device."""
    block, _ = block_of(64, 5000, 3)
    norms, copied = GradientNorms(block.slices), list[int]()
    for part in block.slices:
        norms.set_first(part, torch.ones(part.numel))
    to_host = Tensor.cpu

    def cpu(tensor: Tensor) -> Tensor:
        copied.append(tensor.numel())
        return to_host(tensor)

    monkeypatch.setattr(Tensor, "cpu", cpu)
    assert norms.total() == norms.total()
    assert norms.first_not_finite() is None
    assert copied == [3]


def test_the_norm_of_chunks_is_more_exact_than_torch() -> None:
    """On a CPU torch adds squares in float32, in eight lanes."""
    num_chunks = 128
    gradient = torch.randn(num_chunks * CHUNK_NUMEL, generator=torch.Generator().manual_seed(0))
    block, _ = block_of(gradient.numel())
    norms = GradientNorms(block.slices)
    norms.set_first(block.slices[0], gradient)
    stock = float(norms.total())
    for chunk in block.cut(CHUNK_NUMEL):
        norms.set_summed(chunk.pieces[0], gradient[chunk.start : chunk.stop])
    exact = float(gradient.double().norm())
    assert abs(float(norms.total()) - exact) <= abs(stock - exact)
    assert float(norms.total()) == pytest.approx(exact, rel=1e-6)


def test_the_norm_of_a_sum_replaces_the_first_norm() -> None:
    block, _ = block_of(2 * CHUNK_NUMEL)
    part = block.slices[0]
    norms = GradientNorms([part])
    norms.set_first(part, torch.full((2 * CHUNK_NUMEL,), 100.0))
    for chunk in block.cut(CHUNK_NUMEL):
        norms.set_summed(chunk.pieces[0], torch.full((CHUNK_NUMEL,), 0.5))
    assert float(norms.total()) == pytest.approx(0.5 * (2 * CHUNK_NUMEL) ** 0.5)

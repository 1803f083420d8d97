"""The places of parameters in a block and the chunks of its records."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hf_lohan.costs import SizeClass
from hf_lohan.model import Block, ChunkPiece, lay_out_block, ranges, round_up
from hf_lohan.model.block import PARAM_ALIGN_NUMEL, with_large_granules
from hf_lohan.store import GRANULE_NUMEL, MAX_GRANULE_NUMEL, RECORD_ALIGN_NUMEL

often = settings(max_examples=150)
CHUNK_NUMELS = st.integers(1, 12).map(lambda n: n * GRANULE_NUMEL)
parameter_kinds = st.tuples(
    st.one_of(st.integers(1, 200), st.integers(1, 3 * GRANULE_NUMEL), st.just(GRANULE_NUMEL)),
    st.booleans(),  # a vector or a matrix with one column
    st.booleans(),  # trainable
)


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    kinds = draw(st.lists(parameter_kinds, min_size=1, max_size=10))
    parameters = {
        f"p{index}": nn.Parameter(torch.empty((numel,) if is_vector else (numel, 1), device="meta"), trainable)
        for index, (numel, is_vector, trainable) in enumerate(kinds)
    }
    return lay_out_block("block", SizeClass.LAYER, parameters)


@often
@given(blocks())
def test_parameters_do_not_overlap_and_start_aligned(block: Block) -> None:
    for before, after in itertools.pairwise(block.slices):
        assert before.stop <= after.start
    for part in block.slices:
        align = GRANULE_NUMEL if part.numel >= GRANULE_NUMEL else PARAM_ALIGN_NUMEL
        assert part.start % align == 0
        assert part.stop <= block.numel
    assert block.numel % RECORD_ALIGN_NUMEL == 0


@often
@given(blocks())
def test_a_parameter_smaller_than_a_granule_lies_within_one(block: Block) -> None:
    for part in block.slices:
        if part.numel < GRANULE_NUMEL:
            assert part.start // GRANULE_NUMEL == (part.stop - 1) // GRANULE_NUMEL


@often
@given(blocks())
def test_frozen_parameters_share_no_granule_with_trainable_ones(block: Block) -> None:
    """No step writes frozen parameters, so their granules need no second copy in the store."""
    frozen = [part for part in block.slices if not part.trainable]
    if not frozen:
        return
    assert block.state_numel % GRANULE_NUMEL == 0
    assert all(part.start >= block.state_numel for part in frozen)


@often
@given(blocks())
def test_trainable_parameters_come_first_and_weights_before_vectors(block: Block) -> None:
    keys = [(not part.trainable, part.parameter.dim() < 2) for part in block.slices]
    assert keys == sorted(keys)
    assert all(part.stop <= block.state_numel for part in block.slices if part.trainable)
    assert block.state_numel <= block.numel
    assert sum(block.unit_numels) == block.state_numel


@often
@given(blocks(), CHUNK_NUMELS)
def test_chunks_hold_every_trainable_element_once(block: Block, chunk_numel: int) -> None:
    chunks = block.cut(chunk_numel)
    owner = torch.full((block.state_numel,), -1, dtype=torch.int64)
    trainable = block.trainable_slices
    for chunk in chunks:
        assert chunk.numel <= chunk_numel
        assert chunk.start % GRANULE_NUMEL == 0
        assert chunk.stop % GRANULE_NUMEL == 0 or chunk.stop == block.numel
        for piece in chunk.pieces:
            place = slice(chunk.start + piece.start_in_chunk, chunk.start + piece.stop_in_chunk)
            assert bool((owner[place] == -1).all())
            owner[place] = trainable.index(piece.param_slice)
            assert piece.param_slice.start + piece.start_in_slice == place.start
    for index, part in enumerate(trainable):
        assert bool((owner[part.start : part.stop] == index).all())
    assert int((owner >= 0).sum()) == sum(part.numel for part in trainable)


@often
@given(blocks(), CHUNK_NUMELS)
def test_gaps_are_the_elements_without_a_parameter(block: Block, chunk_numel: int) -> None:
    for chunk in block.cut(chunk_numel):
        covered = torch.zeros(chunk.numel, dtype=torch.int64)
        for piece in chunk.pieces:
            covered[piece.start_in_chunk : piece.stop_in_chunk] += 1
        for start, stop in chunk.gaps:
            covered[start:stop] += 1
        assert bool((covered == 1).all())


@often
@given(blocks(), CHUNK_NUMELS)
def test_a_parameter_that_fits_a_chunk_lies_in_one(block: Block, chunk_numel: int) -> None:
    pieces: dict[str, list[ChunkPiece]] = {}
    for chunk in block.cut(chunk_numel):
        for piece in chunk.pieces:
            pieces.setdefault(piece.param_slice.name, []).append(piece)
    starts = [p.start for p in block.trainable_slices if p.start % GRANULE_NUMEL == 0]
    unit_of = dict(zip(starts, block.unit_numels, strict=True))
    for part in block.trainable_slices:
        unit_start = max(start for start in starts if start <= part.start)
        if unit_of[unit_start] <= chunk_numel:
            assert len(pieces[part.name]) == 1


@often
@given(blocks())
def test_the_shape_for_planning_has_the_same_sizes(block: Block) -> None:
    shape = block.shape()
    assert shape.param_bytes == 4 * block.numel
    assert shape.num_trainable_params == len(block.trainable_slices)
    chunk_numel = 2 * GRANULE_NUMEL
    assert shape.num_chunks(chunk_numel) == len(block.cut(chunk_numel))


def test_a_frozen_block_has_no_states() -> None:
    frozen = {"w": nn.Parameter(torch.empty(5000), requires_grad=False)}
    block = lay_out_block("block", SizeClass.LAYER, frozen)
    assert (block.state_numel, block.unit_numels, block.cut(GRANULE_NUMEL)) == (0, (), [])
    assert block.numel == 3 * RECORD_ALIGN_NUMEL


@pytest.mark.parametrize(("numel", "step"), [(10, 3), (9, 3), (1, 8), (8, 8)])
def test_ranges_cover_all_elements(numel: int, step: int) -> None:
    assert [i for start, stop in ranges(numel, step) for i in range(start, stop)] == list(range(numel))
    assert round_up(numel, step) == len(list(ranges(numel, step))) * step


def layer(**shapes: tuple[int, ...]) -> Block:
    parameters = {name: nn.Parameter(torch.empty(shape, device="meta")) for name, shape in shapes.items()}
    return lay_out_block("layer", SizeClass.LAYER, parameters)


def test_large_models_have_large_granules_if_little_is_wasted() -> None:
    llama_8b = layer(q=(4096, 4096), k=(1024, 4096), gate=(14336, 4096), norm=(4096,))
    norm = layer(norm=(4096,))
    small = layer(q=(256, 256), gate=(1024, 256), norm=(256,))
    odd = layer(**{f"p{index}": (896, 896) for index in range(32)})  # 3.06 of the largest granules
    for block, granule_numel in ((llama_8b, MAX_GRANULE_NUMEL), (small, GRANULE_NUMEL), (odd, GRANULE_NUMEL)):
        (found,) = with_large_granules([block])
        assert found.granule_numel == granule_numel
        assert found.numel <= 1.01 * sum(part.numel for part in block.slices)
        assert [chunk.start % granule_numel for chunk in found.cut(4 * MAX_GRANULE_NUMEL)].count(0) > 0
    layer_block, norm_block = with_large_granules([llama_8b, norm])
    assert layer_block.granule_numel == norm_block.granule_numel == MAX_GRANULE_NUMEL
    assert norm_block.numel == 4096, "a record smaller than a granule was padded to a granule"

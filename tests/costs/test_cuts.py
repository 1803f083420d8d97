"""Chunks and shards cover a block once. Chunks are bounded, and parameters stay whole if possible."""

from __future__ import annotations

import itertools
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lohan.costs import (
    BlockShape,
    SizeClass,
    balanced_experts,
    cut_for_ranks,
    cut_units,
    most_rows,
    owned_experts,
    shared_segments,
    units_between,
)

GRANULE = 16 * 1024
numels = st.integers(1, 400)
often = settings(max_examples=200)


@settings(max_examples=400)
@given(st.lists(numels, max_size=30), st.integers(1, 500))
def test_chunks_cover_all_units_once_are_bounded_and_cut_no_unit_that_fits(units: list[int], chunk_numel: int) -> None:
    chunks = cut_units(units, chunk_numel)
    edges = [0, *(stop for _, stop in chunks)]
    assert chunks == list(itertools.pairwise(edges)) and edges[-1] == sum(units)
    assert all(0 < stop - start <= chunk_numel for start, stop in chunks)
    for start, numel in zip(itertools.accumulate(units, initial=0), units, strict=False):
        if numel <= chunk_numel:
            assert not set(edges) & set(range(start + 1, start + numel)), f"unit at {start} of {numel} was cut"
    # Two neighbouring chunks that fit together would be one chunk, unless one is a full cut of a large unit.
    assert len(chunks) <= 2 * -(-sum(units) // chunk_numel)
    block = BlockShape(
        name="layer", size_class=SizeClass.LAYER, param_bytes=0, unit_numels=tuple(units), num_trainable_params=0
    )
    assert block.num_chunks(chunk_numel) == len(chunks)


@pytest.mark.parametrize(
    ("units", "chunk_numel", "expected"),
    [
        ([], 10, []),
        ([4, 4, 4], 10, [(0, 8), (8, 12)]),
        ([10, 10], 10, [(0, 10), (10, 20)]),
        ([25, 3], 10, [(0, 10), (10, 20), (20, 28)]),  # the rest of a large unit shares a chunk
        ([3, 25], 10, [(0, 3), (3, 13), (13, 23), (23, 28)]),  # a large unit begins a new chunk
    ],
)
def test_examples_of_cuts(units: list[int], chunk_numel: int, expected: list[tuple[int, int]]) -> None:
    assert cut_units(units, chunk_numel) == expected


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [[GRANULE] * 7, [5 * GRANULE, GRANULE, 2 * GRANULE], [GRANULE]])
def test_every_element_has_one_rank(num_ranks: int, units: list[int]) -> None:
    numel = sum(units) + 3 * GRANULE
    edges = cut_for_ranks(units, numel, num_ranks, granule_numel=GRANULE)
    assert edges[0] == 0 and edges[-1] == numel and len(edges) == num_ranks + 1
    assert list(edges) == sorted(edges)
    assert all(edge % GRANULE == 0 for edge in edges)
    parts = [units_between(units, start, stop) for start, stop in itertools.pairwise(edges)]
    assert sum(map(sum, parts)) == sum(units)


def test_a_small_block_is_cut_between_its_parameters() -> None:
    edges = cut_for_ranks([3 * GRANULE, 5 * GRANULE, 2 * GRANULE], 10 * GRANULE, 2, granule_numel=GRANULE)
    assert edges == (0, 3 * GRANULE, 10 * GRANULE)


def test_a_large_block_is_cut_evenly() -> None:
    units = [4096 * 4096] * 3 + [14336 * 4096] * 3
    edges = cut_for_ranks(units, sum(units), 4, granule_numel=GRANULE)
    parts = [stop - start for start, stop in itertools.pairwise(edges)]
    assert max(parts) <= 1.03 * sum(units) / 4


def test_a_parameter_that_its_optimizer_needs_whole_is_not_cut() -> None:
    units = [4096 * 4096] * 3 + [14336 * 4096] * 3
    edges = cut_for_ranks(units, sum(units), 8, granule_numel=GRANULE, keeps_units=True)
    starts = [sum(units[:index]) for index in range(len(units) + 1)]
    assert set(edges) <= set(starts)


def test_frozen_elements_weigh_less_than_trained_ones() -> None:
    edges = cut_for_ranks([80 * GRANULE], 80 * GRANULE + 640 * GRANULE, 2, granule_numel=GRANULE)
    assert edges == (0, 80 * GRANULE, 720 * GRANULE)


def loads_of(counts: list[list[int]], owners: list[int], shared: dict[tuple[int, int], int] | None = None) -> list[int]:
    """Return each rank's rows."""
    loads = [0] * len(counts)
    for source, of_source in enumerate(counts):
        for expert, number in enumerate(of_source):
            loads[(shared or {}).get((expert, source), owners[expert])] += number
    return loads


def test_a_hot_expert_is_shared_and_nothing_else_moves() -> None:
    owners = [0, 0, 1, 1, 2, 2, 3, 3]
    counts = [[28, 4, 4, 4, 4, 4, 4, 4] for _ in range(4)]  # the first expert has half of the rows
    shared = shared_segments(counts, owners, 4, 1)
    assert loads_of(counts, owners) == [128, 32, 32, 32]
    assert max(loads_of(counts, owners, shared)) <= 1.25 * 56
    # Three ranks compute their own rows for it, so that these are not sent.
    assert [(key, rank) for key, rank in shared.items() if key[0] == 0] == [((0, 1), 1), ((0, 2), 2), ((0, 3), 3)]


def test_even_rows_stay_with_their_owners() -> None:
    assert shared_segments([[8] * 8 for _ in range(4)], [0, 0, 1, 1, 2, 2, 3, 3], 4, 1) == {}
    assert shared_segments([[0] * 8 for _ in range(4)], [0, 0, 1, 1, 2, 2, 3, 3], 4, 1) == {}


@st.composite
def counts_and_owners(draw: st.DrawFn) -> tuple[list[list[int]], list[int], int]:
    """Numbers of rows [ranks][experts], the owner of each expert, and the number of ranks of a node."""
    num_local = draw(st.sampled_from((1, 2, 4)))
    num_ranks = num_local * draw(st.integers(1, 3))
    owners = sorted(draw(st.lists(st.integers(0, num_ranks - 1), min_size=1, max_size=8)))
    number = st.integers(0, 30) | st.integers(0, 500)
    counts = [draw(st.lists(number, min_size=len(owners), max_size=len(owners))) for _ in range(num_ranks)]
    return counts, owners, num_local


@often
@given(counts_and_owners(), st.sampled_from((1, 5, 100)))
def test_rows_even_out_within_nodes_as_far_as_one_more_move_can(
    case: tuple[list[list[int]], list[int], int], least_rows: int
) -> None:
    counts, owners, num_local = case
    shared = shared_segments(counts, owners, num_local, least_rows)
    before, after = loads_of(counts, owners), loads_of(counts, owners, shared)
    for (expert, source), rank in shared.items():
        assert rank // num_local == owners[expert] // num_local and rank != owners[expert]
        assert counts[source][expert] >= least_rows
    for first in range(0, len(counts), num_local):
        node = range(first, first + num_local)
        loads = {rank: after[rank] for rank in node}
        assert sum(before[rank] for rank in node) == sum(loads.values()) and max(loads.values()) <= max(
            before[rank] for rank in node
        )
        most = min(rank for rank in node if loads[rank] == max(loads.values()))
        gap = loads[most] - min(loads.values())
        left = [
            counts[source][expert]
            for expert, owner in enumerate(owners)
            for source in range(len(counts))
            if owner == most and (expert, source) not in shared
        ]
        is_even = 16 * loads[most] * num_local <= 17 * sum(loads.values())
        assert is_even or not any(max(1, least_rows) <= number < gap for number in left)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (4, 2), (4, 1), (6, 3)])
@pytest.mark.parametrize("num_experts", [3, 8, 13, 64])
def test_balanced_experts_are_divided_whole_and_evenly(num_ranks: int, num_local: int, num_experts: int) -> None:
    random = Random(num_experts)
    counts = [[int(1000 * random.paretovariate(1.2)) for _ in range(num_experts)] for _ in range(7)]
    nodes = [range(first, first + num_local) for first in range(0, num_ranks, num_local)]
    for layer, owned in enumerate(balanced_experts(counts, num_ranks, num_local)):
        assert sorted(expert for own in owned for expert in own) == [*range(num_experts)]
        assert all([*own] == sorted(own) for own in owned)
        of_nodes = [sum(len(owned[rank]) for rank in node) for node in nodes]
        assert max(map(len, owned)) - min(map(len, owned)) <= 1 and max(of_nodes) - min(of_nodes) <= 1
        assert most_rows(counts[layer], owned) <= most_rows(counts[layer], owned_experts(num_experts, layer, num_ranks))


def test_the_experts_with_the_most_rows_go_to_different_nodes_and_then_to_different_ranks() -> None:
    (owned,) = balanced_experts([[8, 7, 6, 5, 4, 3, 2, 1]], 4, 2)
    of_nodes = [{*owned[0], *owned[1]}, {*owned[2], *owned[3]}]
    assert of_nodes == [{0, 3, 4, 7}, {1, 2, 5, 6}] and owned == [[0, 7], [3, 4], [1, 6], [2, 5]]
    assert most_rows([8, 7, 6, 5, 4, 3, 2, 1], owned) == 9


def test_even_rows_keep_their_ranges_and_layers_take_turns() -> None:
    even = balanced_experts([[1] * 8] * 4, 4, 2)
    assert even == [[[*own] for own in owned_experts(8, layer, 4)] for layer in range(4)]
    of_three = balanced_experts([[5, 1, 1]] * 4, 4, 2)
    assert len({next(rank for rank, own in enumerate(owned) if not own) for owned in of_three}) > 1

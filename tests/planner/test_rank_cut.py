"""Which part of a block each rank has."""

from itertools import pairwise

import pytest

from hf_lohan.planner import cut_for_ranks, units_between

GRANULE = 16 * 1024


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("units", [[GRANULE] * 7, [5 * GRANULE, GRANULE, 2 * GRANULE], [GRANULE]])
def test_every_element_has_one_rank(num_ranks: int, units: list[int]) -> None:
    numel = sum(units) + 3 * GRANULE
    edges = cut_for_ranks(units, numel, num_ranks, granule_numel=GRANULE)
    assert edges[0] == 0 and edges[-1] == numel and len(edges) == num_ranks + 1
    assert list(edges) == sorted(edges)
    assert all(edge % GRANULE == 0 for edge in edges)
    parts = [units_between(units, start, stop) for start, stop in pairwise(edges)]
    assert sum(map(sum, parts)) == sum(units)


def test_a_small_block_is_cut_between_its_parameters() -> None:
    edges = cut_for_ranks([3 * GRANULE, 5 * GRANULE, 2 * GRANULE], 10 * GRANULE, 2, granule_numel=GRANULE)
    assert edges == (0, 3 * GRANULE, 10 * GRANULE)


def test_a_large_block_is_cut_evenly() -> None:
    units = [4096 * 4096] * 3 + [14336 * 4096] * 3
    edges = cut_for_ranks(units, sum(units), 4, granule_numel=GRANULE)
    parts = [stop - start for start, stop in pairwise(edges)]
    assert max(parts) <= 1.03 * sum(units) / 4


def test_a_parameter_that_its_optimizer_needs_whole_is_not_cut() -> None:
    units = [4096 * 4096] * 3 + [14336 * 4096] * 3
    edges = cut_for_ranks(units, sum(units), 8, granule_numel=GRANULE, keeps_units=True)
    starts = [sum(units[:index]) for index in range(len(units) + 1)]
    assert set(edges) <= set(starts)


def test_frozen_elements_weigh_less_than_trained_ones() -> None:
    edges = cut_for_ranks([80 * GRANULE], 80 * GRANULE + 640 * GRANULE, 2, granule_numel=GRANULE)
    assert edges == (0, 80 * GRANULE, 720 * GRANULE)

"""Planned addresses do not overlap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from tensor_lives import Life, lives

from hf_lohan.costs.address_plan import _ORDERS, ALIGN_BYTES, aligned, live_bytes, plan_addresses


@given(st.lists(lives, max_size=40))
def test_tensors_that_exist_together_do_not_overlap(tensors: list[Life]) -> None:
    plan = plan_addresses(tensors)
    stops = [offset + aligned(one.num_bytes) for offset, one in zip(plan.offsets, tensors, strict=True)]
    assert plan.num_bytes == max(stops, default=0) >= live_bytes(tensors)
    assert all(offset % ALIGN_BYTES == 0 for offset in plan.offsets)
    for number, one in enumerate(tensors):
        for other in range(number):
            if one.born < tensors[other].died and tensors[other].born < one.died:
                assert plan.offsets[number] >= stops[other] or plan.offsets[other] >= stops[number]


def placed_one_by_one(tensors: list[Life], order: Callable[[int, int, int], tuple[int, ...]]) -> tuple[list[int], int]:
    """Place tensors as the module says, each compared with all that were placed before."""
    offsets: dict[int, int] = {}
    for number in sorted(range(len(tensors)), key=lambda n: order(aligned(tensors[n].num_bytes), *times(tensors[n]))):
        one, size = tensors[number], aligned(tensors[number].num_bytes)
        beside = sorted(
            (offset, offset + aligned(tensors[other].num_bytes))
            for other, offset in offsets.items()
            if tensors[other].born < one.died and tensors[other].died > one.born
        )
        reached, gaps = 0, []
        for start, stop in beside:
            gaps += [(start - reached, reached)] if start - reached >= size else []
            reached = max(reached, stop)
        offsets[number] = min(gaps)[1] if gaps else reached
    stops = [offset + aligned(tensors[number].num_bytes) for number, offset in offsets.items()]
    return [offsets[number] for number in range(len(tensors))], max(stops, default=0)


def times(tensor: Life) -> tuple[int, int]:
    return tensor.born, tensor.died


@given(st.lists(lives, max_size=40), st.integers(1, 40))
def test_each_tensor_gets_the_place_that_a_comparison_with_all_gives_it(tensors: list[Life], scale: int) -> None:
    """Tensors are compared only with those of the same parts of the time."""
    tensors = [replace(one, born=scale * one.born, died=scale * one.died) for one in tensors]
    found, least_bytes = plan_addresses(tensors), live_bytes(tensors)
    candidates = []
    for order in _ORDERS:
        candidates.append(placed_one_by_one(tensors, order))
        if candidates[-1][1] <= least_bytes:
            break
    offsets, num_bytes = min(candidates, key=lambda candidate: candidate[1])
    assert (list(found.offsets), found.num_bytes) == (offsets, num_bytes)


def test_a_gap_is_filled_by_the_tensor_that_fits_best() -> None:
    kib = 1024
    # The largest tensors leave gaps of 4 and 2 KiB when the middle ones die.
    tensors = [Life(8 * kib, 0, 4), Life(4 * kib, 0, 1), Life(7 * kib, 0, 4), Life(2 * kib, 0, 1), Life(6 * kib, 0, 4)]
    tensors += [Life(2 * kib, 2, 4), Life(4 * kib, 2, 4)]
    assert plan_addresses(tensors).num_bytes == live_bytes(tensors) == 27 * kib
    assert live_bytes([]) == plan_addresses([]).num_bytes == 0
    assert live_bytes([Life(1, 0, 1), Life(1, 1, 2)]) == ALIGN_BYTES

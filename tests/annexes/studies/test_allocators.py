"""The model of PyTorch's caching allocator has its constants, and never needs less than the tensors."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensor_lives import MIB, Life, lives

from hf_lohan.annexes.studies.allocators import CachingAllocator, compare_addresses
from hf_lohan.costs.address_plan import plan_addresses


@given(st.lists(lives, max_size=40))
def test_no_addresses_need_less_than_the_tensors_that_exist_together(tensors: list[Life]) -> None:
    compared = compare_addresses(tensors)
    assert compared.planned_bytes == plan_addresses(tensors).num_bytes
    assert min(compared.caching_bytes, compared.expandable_bytes) >= compared.live_bytes


@pytest.mark.parametrize(
    ("num_bytes", "fixed_bytes", "expandable_bytes"),
    [
        (1, 2 * MIB, 2 * MIB),
        (MIB, 2 * MIB, 2 * MIB),
        (MIB + 1, 20 * MIB, 20 * MIB),
        (10 * MIB, 10 * MIB, 20 * MIB),
        (21 * MIB, 22 * MIB, 40 * MIB),
    ],
)
def test_segments_have_the_sizes_of_pytorch(num_bytes: int, fixed_bytes: int, expandable_bytes: int) -> None:
    for is_expandable, expected in ((False, fixed_bytes), (True, expandable_bytes)):
        allocator = CachingAllocator(is_expandable=is_expandable)
        block = allocator.allocate(num_bytes)
        assert allocator.reserved_bytes == expected
        allocator.free(block)
        allocator.allocate(num_bytes)
        assert allocator.reserved_bytes == expected


def test_blocks_that_are_free_together_are_merged_but_segments_are_not() -> None:
    fixed, expandable = CachingAllocator(), CachingAllocator(is_expandable=True)
    for allocator, expected in ((fixed, 60 * MIB + 120 * MIB), (expandable, 120 * MIB)):
        blocks = [allocator.allocate(20 * MIB) for _ in range(3)]
        for index in (1, 0, 2):
            allocator.free(blocks[index])
        allocator.allocate(120 * MIB)
        assert allocator.reserved_bytes == expected

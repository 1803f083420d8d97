from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.files import SECTOR_BYTES, CapacityError, Extent, StorePath
from hf_lohan.store import RECORD_ALIGN_NUMEL, RecordSpec, StoreLayout
from hf_lohan.store.store_folders import check_sizes

DTYPES = ("float32", "bfloat16", "int16")


def layout_of(numels: list[int], capacities: list[int], stripe_sectors: int = 3) -> StoreLayout:
    records = tuple(
        RecordSpec(f"layers.{i}", "param", DTYPES[i % 3], RECORD_ALIGN_NUMEL * n) for i, n in enumerate(numels)
    )
    paths = tuple(StorePath(f"disk{i}", capacity) for i, capacity in enumerate(capacities))
    return StoreLayout(records, paths, stripe_sectors * SECTOR_BYTES)


layouts = st.builds(
    layout_of,
    st.lists(st.integers(1, 20), min_size=1, max_size=5),
    st.lists(st.integers(0, 10**13), min_size=1, max_size=3),
    st.integers(1, 16),
)


def extents(layout: StoreLayout, block: str, kind: str, start_numel: int, numel: int) -> list[Extent]:
    """Return the extents of a range of elements."""
    itemsize = layout.record(block, kind).itemsize
    return layout.extents(block, kind, start_numel * itemsize, numel * itemsize)


def refuse_too_small(layout: StoreLayout) -> None:
    check_sizes(layout.paths, [layout])


@given(layouts)
def test_every_byte_has_one_position_in_merged_extents_also_after_a_round_trip_as_json(layout: StoreLayout) -> None:
    places = [bytearray(num_bytes // SECTOR_BYTES) for num_bytes in layout.file_bytes]
    for record in layout.records:
        covered_bytes = 0
        whole = extents(layout, record.block, record.kind, 0, record.numel)
        for left, right in pairwise(whole):
            assert (left.path_index, left.file_offset + left.num_bytes) != (right.path_index, right.file_offset)
        for extent in whole:
            assert extent.record_byte_offset == covered_bytes
            assert extent.file_offset % SECTOR_BYTES == extent.num_bytes % SECTOR_BYTES == 0 < extent.num_bytes
            covered_bytes += extent.num_bytes
            for sector in range(extent.num_bytes // SECTOR_BYTES):
                places[extent.path_index][extent.file_offset // SECTOR_BYTES + sector] += 1
        assert covered_bytes == record.num_bytes
    assert all(count == 1 for file in places for count in file)
    assert sum(layout.file_bytes) == layout.total_bytes == sum(record.num_bytes for record in layout.records)
    again = StoreLayout.from_json(json.loads(json.dumps(layout.to_json())))
    assert again == layout and again.file_bytes == layout.file_bytes


@given(layouts, st.data())
def test_ranges_of_a_record_have_the_right_extents(layout: StoreLayout, data: st.DataObject) -> None:
    record = data.draw(st.sampled_from(layout.records))
    start = data.draw(st.integers(0, record.numel))
    numel = data.draw(st.integers(0, record.numel - start))
    first, last = start * record.itemsize, (start + numel) * record.itemsize
    expected = []
    for path, offset, at, num_bytes in extents(layout, record.block, record.kind, 0, record.numel):
        begin, end = max(at, first), min(at + num_bytes, last)
        if begin < end:
            expected.append((path, offset + begin - at, begin, end - begin))
    assert extents(layout, record.block, record.kind, start, numel) == expected


def test_one_path_is_contiguous() -> None:
    layout = layout_of([5, 7], [10**9])
    assert extents(layout, "layers.1", "param", 0, 7 * RECORD_ALIGN_NUMEL) == [(0, 5 * 8192, 0, 7 * 4096)]


@given(st.lists(st.integers(10**6, 10**12), min_size=2, max_size=3))
def test_shares_follow_the_capacities(capacities: list[int]) -> None:
    layout = layout_of([1000], capacities, stripe_sectors=64)
    num_rows = -(-layout.total_bytes // (64 * SECTOR_BYTES))
    for num_bytes, capacity in zip(layout.file_bytes, capacities, strict=True):
        exact_bytes = layout.total_bytes * capacity / sum(capacities)
        assert abs(num_bytes - exact_bytes) <= num_rows * SECTOR_BYTES


def test_a_capacity_that_is_too_small_is_refused_with_numbers() -> None:
    with pytest.raises(CapacityError, match=r"disk0 needs 40,960 bytes .* capacity is 40,959 bytes") as caught:
        refuse_too_small(layout_of([5], [40_959]))
    (shortfall,) = caught.value.shortfalls
    assert (shortfall.path, shortfall.needed_bytes, shortfall.available_bytes) == ("disk0", 40_960, 40_959)
    refuse_too_small(layout_of([5], [40_960]))


def test_a_capacity_of_zero_is_refused() -> None:
    with pytest.raises(CapacityError, match=r"disk0 .*; disk1 "):
        refuse_too_small(layout_of([5], [0, 0]))


def test_bad_records_are_refused() -> None:
    with pytest.raises(ValueError, match="kind 'velocity'"):
        RecordSpec("layers.0", "velocity", "float32", 2048)
    with pytest.raises(ValueError, match="dtype 'complex64'"):
        RecordSpec("layers.0", "param", "complex64", 2048)
    with pytest.raises(ValueError, match="numel 2047"):
        RecordSpec("layers.0", "param", "float32", 2047)
    with pytest.raises(ValueError, match="numel 2048; pad it to a multiple of 4096"):
        RecordSpec("layers.0", "exp_avg", "int8", 2048)
    with pytest.raises(ValueError, match="numel 512; pad it to a multiple of 1024"):
        RecordSpec("layers.0", "moment_scales", "float32", 512)
    twice = RecordSpec("layers.0", "param", "float32", 2048)
    with pytest.raises(ValueError, match="same block and kind"):
        StoreLayout((twice, twice), (StorePath("disk0", 1),))
    with pytest.raises(ValueError, match="stripe_bytes is 1000"):
        StoreLayout((twice,), (StorePath("disk0", 1),), stripe_bytes=1000)


def test_an_unknown_record_is_named() -> None:
    with pytest.raises(KeyError, match=r"no gradient record of block 'layers\.0'"):
        extents(layout_of([1], [1]), "layers.0", "gradient", 0, 1)

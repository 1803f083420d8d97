"""Copies in RAM save the most reads within the budget, and are spread over the model."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_lohan.costs import BlockProfile, BlockShape, RecordTraffic, SizeClass, choose_resident_records, step_traffic

often = settings(max_examples=200)


def record(name: str, num_bytes: int, num_reads: int, kind: str = "param") -> RecordTraffic:
    return RecordTraffic(block=name, kind=kind, num_bytes=num_bytes, read_bytes_per_step=num_reads * num_bytes)


@st.composite
def some_records(draw: st.DrawFn, *, num_bytes: st.SearchStrategy[int]) -> list[RecordTraffic]:
    counts = draw(st.lists(st.integers(0, 3), min_size=1, max_size=9))
    return [record(f"block.{index}", draw(num_bytes), count) for index, count in enumerate(counts)]


def saved_bytes(chosen: tuple[RecordTraffic, ...]) -> int:
    return sum(record.read_bytes_per_step for record in chosen)


room = st.integers(0, 400)


@often
@given(some_records(num_bytes=st.integers(1, 50)), room, room)
def test_the_choice_fits_has_all_that_fit_and_saves_no_less_with_more_memory(
    records: list[RecordTraffic], free: int, more: int
) -> None:
    chosen = choose_resident_records(records, free_bytes=free)
    left = free - sum(record.num_bytes for record in chosen)
    assert left >= 0 and all(record.read_bytes_per_step for record in chosen)
    assert [record for record in records if record in chosen] == list(chosen)
    rest = [record for record in records if record.read_bytes_per_step and record not in chosen]
    assert all(record.num_bytes > left for record in rest)
    assert saved_bytes(choose_resident_records(records, free_bytes=free + more)) >= saved_bytes(chosen)


@often
@given(some_records(num_bytes=st.just(10)), room)
def test_the_choice_is_optimal_for_equal_sizes(records: list[RecordTraffic], free: int) -> None:
    best = max(
        saved_bytes(subset)
        for count in range(len(records) + 1)
        for subset in combinations(records, count)
        if 10 * count <= free
    )
    assert saved_bytes(choose_resident_records(records, free_bytes=free)) == best


@pytest.mark.parametrize("count", [1, 2, 5, 8, 13])
@pytest.mark.parametrize("num_layers", [8, 13, 32])
def test_equal_records_are_spread_over_the_model(num_layers: int, count: int) -> None:
    records = [record(str(index), 10, 3) for index in range(num_layers)]
    chosen = choose_resident_records(records, free_bytes=10 * count)
    assert len(chosen) == min(count, num_layers)
    half = sum(int(record.block) < num_layers / 2 for record in chosen)
    assert abs(half - len(chosen) / 2) <= 1.5


ITEMSIZES = {"exp_avg": 4, "exp_avg_sq": 4}


def layer(index: int, *, trained_numel: int = 1000, frozen_numel: int = 0) -> BlockShape:
    return BlockShape(
        name=f"layer.{index}",
        size_class=SizeClass.LAYER,
        param_bytes=2 * (trained_numel + frozen_numel),
        unit_numels=(trained_numel,) if trained_numel else (),
        num_trainable_params=1 if trained_numel else 0,
    )


def param_reads(blocks: list[BlockShape], num_layer_slots: int) -> list[float]:
    """Return how often a step reads each block's parameters."""
    slots = {SizeClass.LAYER: num_layer_slots, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0}
    traffic = step_traffic(blocks, param_itemsize=2, state_itemsizes=ITEMSIZES, num_slots=slots)
    return [record.read_bytes_per_step / record.num_bytes for record in traffic if record.kind == "param"]


def test_parameters_are_read_in_forward_in_backward_and_by_updates() -> None:
    layers = [layer(index) for index in range(6)]
    assert param_reads(layers, 2) == [3, 3, 3, 3, 2, 2]  # the last two are still in slots when backward begins
    assert param_reads(layers, 6) == [2] * 6


def test_frozen_parameters_are_read_only_by_passes() -> None:
    frozen = [layer(index, trained_numel=0, frozen_numel=1000) for index in range(6)]
    assert param_reads(frozen, 2) == [1, 1, 2, 2, 1, 1]  # the first two are still in slots when the next forward begins
    assert param_reads(frozen, 6) == [0] * 6
    mixed = [layer(index, trained_numel=10, frozen_numel=990) for index in range(6)]
    assert param_reads(mixed, 2) == [2.01, 2.01, 2.01, 2.01, 1.01, 1.01]


def test_rows_are_a_part_of_their_table() -> None:
    table = BlockProfile(
        name="words",
        size_class=SizeClass.OUTER,
        num_params=1000 * 64,
        num_trainable_params=1000 * 64,
        param_bytes=1000 * 64 * 2,
        flops=0.0,
        working_bytes=1000 * 64 * 2 + 500,
    )
    few = table.by_rows(1000, 8 * 64 * 2, num_tokens=1)
    assert (few.loaded_bytes, few.read_bytes, few.gradient_bytes(2)) == (128, 8 * 128, 128)
    assert few.working_bytes == 500 + 2 * 128
    assert few.param_bytes == table.param_bytes
    many = table.by_rows(1000, 8 * 64 * 2, num_tokens=100_000)
    assert 0.99 * table.param_bytes < many.loaded_bytes <= many.read_bytes == table.param_bytes


def test_states_may_have_less_than_a_byte_per_parameter() -> None:
    slots = {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0}
    itemsizes = {"exp_avg": 1.0, "moment_scales": 0.25}
    traffic = step_traffic([layer(0)], param_itemsize=2, state_itemsizes=itemsizes, num_slots=slots)
    assert [record.num_bytes for record in traffic] == [2000, 1000, 250]
    assert all(isinstance(record.num_bytes, int) for record in traffic)


def test_states_are_read_once_and_come_after_parameters() -> None:
    layers = [layer(index) for index in range(4)]
    slots = {SizeClass.LAYER: 2, SizeClass.OUTER: 0, SizeClass.RESIDENT: 0}
    traffic = step_traffic(layers, param_itemsize=2, state_itemsizes=ITEMSIZES, num_slots=slots)
    states = [record for record in traffic if record.kind != "param"]
    assert [record.kind for record in states] == ["exp_avg", "exp_avg_sq"] * 4
    assert all(record.read_bytes_per_step == record.num_bytes == 4000 for record in states)
    chosen = choose_resident_records(traffic, free_bytes=4 * 2000 + 2 * 4000 + 3999)
    assert [record.block for record in chosen if record.kind == "param"] == [shape.name for shape in layers]
    assert len(chosen) == 4 + 2

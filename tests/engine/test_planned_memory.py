"""Swapped activations stay within their budget, and those that do not fit are recomputed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from engines import TwinsFactory
from mixtures import all_in

from hf_lohan.activations.tiers import ActivationTiers, placed_bytes, swap_everything
from hf_lohan.activations.trace import LayerTrace
from hf_lohan.costs import GRAPH, INPUT, Placement
from hf_lohan.engine import OffloadEngine
from hf_lohan.planning import StepShape
from hf_lohan.testing.models import tiny_batch, tiny_model

ROOM = {"gpu_memory": "1MiB", "activations": "swap", "durability": "checkpoint"}
TIGHT = {**ROOM, "cpu_memory": "4MiB", "_resident_records": "none"}
"""Activations get a quarter of RAM, which is too small for the longest batches below."""
SHAPES = [(2, 16), (2, 64), (1, 7), (8, 64), (2, 16), (8, 128), (3, 33)]


def held_bytes(engine: OffloadEngine) -> int:
    """Return the host memory that is allocated for activations."""
    staging = engine.planned_memory._staging
    return engine.activations.swapper.ram_bytes + (staging.num_buffers * staging.buffer_bytes if staging else 0)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_batches_of_any_shape_equal_stock(family: str, make_twins: TwinsFactory) -> None:
    """The first batch decides placements. Larger activations are swapped if they fit, or recomputed."""
    twins = make_twins(family, recompute=True, **TIGHT)
    swapper = twins.engine.activations.swapper
    shares = []
    for seed, (batch_size, sequence_length) in enumerate(SHAPES):
        before = swapper.swapped_bytes
        for loss in twins.losses(seed, batch_size=batch_size, sequence_length=sequence_length):
            loss.backward()
        twins.clip(0.5)
        twins.step()
        shares.append((swapper.swapped_bytes - before) / (batch_size * sequence_length))
    twins.assert_equal()
    assert shares[0] == 0  # the first step is only watched
    assert shares[4] > 0
    assert shares[5] < shares[4] / 2  # most did not fit
    assert swapper.high_water_bytes <= held_bytes(twins.engine) <= twins.engine.layout.activation_bytes


def test_activations_that_do_not_fit_in_ram_go_to_the_ssd(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True, **TIGHT)
    shape = {"batch_size": 8, "sequence_length": 64}
    for seed in range(3):
        for loss in twins.losses(seed, **shape):
            loss.backward()
        twins.step()
    twins.assert_equal()
    memory, swapper = twins.engine.planned_memory, twins.engine.activations.swapper
    all_bytes = sum(sum(layer.sizes().values()) for layer in memory.trace.values())
    assert all_bytes > 2 * twins.engine.layout.activation_bytes
    assert swapper.swapped_bytes == 2 * all_bytes
    assert 0 < swapper.spilled_bytes < swapper.swapped_bytes
    assert swapper.high_water_bytes <= held_bytes(twins.engine) <= twins.engine.layout.activation_bytes


def test_a_longer_batch_goes_on_to_the_ssd_while_ram_is_in_use_and_cannot_grow(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True, **ROOM, cpu_memory="64MiB")
    twins.train(1)
    memory, swapper = twins.engine.planned_memory, twins.engine.activations.swapper
    memory.begin_step()
    ram = memory._tiers.shared_ram
    held = ram.push(64)  # such as the activations of a micro-batch that is in progress
    assert held is not None and swapper.ssd_bytes == 0
    memory.sizes = {layer: {name: 8 * size for name, size in sizes.items()} for layer, sizes in memory.sizes.items()}
    memory.set_placements(all_in(memory.trace, Placement.CPU))
    assert ram.num_bytes + swapper.ssd_bytes >= sum(sum(sizes.values()) for sizes in memory.sizes.values())
    ram.free(held[0])


def test_a_full_ssd_changes_no_number(
    make_twins: TwinsFactory, build_engine: Callable[..., OffloadEngine], tmp_path: Path, caplog: Any
) -> None:
    probe = build_engine(tiny_model("llama"), **{**TIGHT, "ssd": str(tmp_path / "probe")})
    capacity = probe.tiers.store.size_bytes + probe.tiers.store.scratch_bytes + (1 << 16)
    probe.close()
    ssd = [{"path": str(tmp_path / "small"), "capacity": capacity}]
    twins = make_twins("llama", recompute=True, **{**TIGHT, "ssd": ssd})
    with caplog.at_level(logging.WARNING):
        twins.train(1)
        memory = twins.engine.planned_memory
        memory.set_placements(all_in(memory.trace, Placement.SSD))
    assert "no room to swap activations to the SSD" in caplog.text
    twins.train(2, first_seed=300, max_norm=0.5)
    twins.assert_equal()
    swapper = twins.engine.activations.swapper
    assert swapper.ssd_bytes == swapper.spilled_bytes == 0 < swapper.swapped_bytes  # only RAM was used


def test_buffers_smaller_than_a_granule_change_no_number(make_twins: TwinsFactory, caplog: Any) -> None:
    twins = make_twins("llama", recompute=True, **TIGHT)
    memory = twins.engine.planned_memory
    memory.layout = replace(twins.engine.layout, activation_bytes=100_000)
    with caplog.at_level(logging.WARNING):
        twins.train(3, max_norm=0.5)
    assert "leaves no buffers" in caplog.text
    twins.assert_equal()
    assert 0 < held_bytes(twins.engine) <= 100_000


def test_opening_a_store_removes_the_scratch_file_of_a_killed_run(
    build_engine: Callable[..., OffloadEngine], tmp_path: Path
) -> None:
    left = tmp_path / "store" / "activations.bin"
    build_engine(tiny_model("llama"), **TIGHT).close()
    left.write_bytes(bytes(4096))
    engine = build_engine(tiny_model("llama"), **TIGHT)
    assert not left.exists()
    engine.close()


def test_the_scratch_file_is_created_when_needed_and_removed_by_close(make_twins: TwinsFactory, tmp_path: Path) -> None:
    twins = make_twins("llama", recompute=True, **TIGHT)
    twins.train(1)
    memory = twins.engine.planned_memory
    assert not (tmp_path / "store" / "activations.bin").exists()
    memory.set_placements(all_in(memory.trace, Placement.SSD))
    loss = twins.model(**tiny_batch()).loss
    assert (tmp_path / "store" / "activations.bin").stat().st_size >= twins.engine.activations.swapper.ssd_bytes
    del loss
    twins.engine.close()
    assert not (tmp_path / "store" / "activations.bin").exists()


TRACE = {
    name: LayerTrace(input_bytes=100, operations={"aten.mm#0": 50, "aten.mm#1": 70}, recomputed={"aten.mm#0"})
    for name in ("first", "second")
}
SIZES = {name: layer.sizes() for name, layer in TRACE.items()}


def test_activations_that_are_needed_first_are_swapped_to_ram() -> None:
    placements = swap_everything(SIZES, 160)
    assert placements == {
        "second": {INPUT: Placement.CPU, "aten.mm#0": Placement.CPU},
        "first": {INPUT: Placement.SSD, "aten.mm#0": Placement.SSD},
    }
    assert placed_bytes(SIZES, placements) == (150, 150)
    assert placed_bytes(SIZES, swap_everything(SIZES, 0)) == (0, 300)
    assert placed_bytes(SIZES, {}) == (0, 0)


def test_bytes_of_graphs_are_compared_only_for_a_batch_of_the_planned_shape(
    make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The shape that covers all ranks may be the planned one, although this rank's batch is shorter."""
    engine = make_twins("llama").engine
    memory, plan = engine.planned_memory, engine._plan
    planned: Any = SimpleNamespace(shape=StepShape(2, 32))
    monkeypatch.setattr(memory, "_planned", planned)
    monkeypatch.setattr(memory, "sizes", {"layer": {GRAPH: 100}})
    monkeypatch.setattr(ActivationTiers, "graph_bytes", {"layer": 50})
    monkeypatch.setattr(plan, "_longest_of_ranks", lambda _shape, _begins_step: planned.shape)
    shares = []
    for shape in (planned.shape, StepShape(2, 16), None):
        plan.see_batch(shape)
        assert memory.last_shape == planned.shape
        shares.append(memory.saved_share)
    assert shares == [0.5, 1.0, 1.0]

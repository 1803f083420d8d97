"""Solvers: their plans fit, and no plan is shorter than the bound."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoder_shapes import decoder, machine, machines, mixed_models, paper_setup, setups, tiny_model
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from step_bound import least_step_s
from test_paper_table import OUR_STATES, machine_with, setup

from hf_lohan.annexes.studies import solvers
from hf_lohan.annexes.studies.placed_plan import fullest_bytes, placed_by_layer, with_placements
from hf_lohan.annexes.studies.simulation.simulated_step import simulate_step
from hf_lohan.annexes.studies.solvers import choose_solver, spread_placements
from hf_lohan.costs import INPUT, HardwareProfile, ModelProfile, OffloadPlan, Placement, TrainingSetup, plan_offload

deep_models = st.builds(
    tiny_model,
    st.lists(st.tuples(st.integers(1, 400).map(float), st.integers(1, 200)), min_size=1, max_size=4),
    num_layers=st.integers(3, 10),
    num_params=st.integers(1, 400),
    input_bytes=st.integers(1, 100),
)


def simulated_s(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> float:
    step = simulate_step(model, hardware, setup, plan)
    assert step is not None
    return step.step_s


@settings(max_examples=100, deadline=None)
@given(mixed_models, machines, setups)
def test_the_placements_of_a_plan_give_the_same_plan(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    plan = plan_offload(model, hardware, setup)
    assume(plan.fits)
    again = with_placements(model, hardware, setup, plan, plan.activations)
    # Algorithm 1 spills bytes, and placements whole tensors, which may be more than fit.
    whole = placed_by_layer(model, plan.activations).spilled.sum() == plan.prediction.spilled_bytes
    assert again is not None or not whole
    if again is not None:
        assert again.prediction.tier_bytes["gpu"] == plan.prediction.tier_bytes["gpu"]
        assert again.prediction.step_s == pytest.approx(plan.prediction.step_s, rel=1e-6 if whole else 0.5)
    if again is not None and whole:
        assert again.prediction.tier_bytes == plan.prediction.tier_bytes


@settings(max_examples=25, deadline=None)
@given(deep_models, machines, setups)
def test_no_solver_is_below_the_bound(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
    check_order(model, hardware, setup)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(deep_models, machines, setups)
def test_none_is_below_it_for_many_problems(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup
) -> None:
    check_order(model, hardware, setup)


def check_order(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> None:
    """Check that no simulated step is below the bound, and that the plan of `migration` fits."""
    setup = replace(setup, solver="migration", num_micro_batches=1, spilled_gradient_bytes=0, clip_rate=0.0)
    plan = plan_offload(model, hardware, setup)
    assume(plan.fits)
    best = choose_solver(model, hardware, setup, plan)
    assert best.simulated_step_s == pytest.approx(simulated_s(model, hardware, setup, best))
    steps_s = [solved.simulated_step_s for solved in best.solvers]
    assert least_step_s(model, hardware, setup, plan) <= min(steps_s) * (1 + 1e-6)
    assert best.solvers[0].name == "algorithm_1"
    placed = placed_by_layer(model, best.activations)
    assert placed.swapped.sum() == best.prediction.swapped_bytes
    assert placed.ram.sum() <= best.prediction.swapped_bytes - best.prediction.spilled_bytes
    assert (
        fullest_bytes(model, placed, fetch_ahead=best.fetch_ahead, layers_leaving=best.layers_leaving)
        <= sum(best.prediction.tier_bytes["gpu"].values()) - setup.gpu_fixed_bytes + 1
    )


def spilling() -> tuple[ModelProfile, HardwareProfile, TrainingSetup]:
    """A drive that is as busy as the device if it spills all the time, and twice as busy as that for half the time."""
    model = tiny_model([(300.0, 100), (300.0, 100)], num_layers=12, num_params=10, input_bytes=20)
    hardware = machine(ssd_read_bytes_per_s=40.0, ssd_write_bytes_per_s=15.0, link_bytes_per_s=200.0)
    return model, hardware, paper_setup(activation_cpu_bytes=1000, solver="auto")


def test_spilling_evenly_is_shorter_than_spilling_first() -> None:
    model, hardware, setup = spilling()
    plan = plan_offload(model, hardware, setup)
    assert plan.prediction.spilled_bytes > 0
    solved = choose_solver(model, hardware, setup, plan, compares=True).solvers
    best = min(solved, key=lambda one: one.simulated_step_s)
    assert best.name != "algorithm_1"
    assert best.simulated_step_s < 0.97 * simulated_s(model, hardware, setup, plan)


def test_the_setting_chooses_the_solver() -> None:
    model, hardware, setup = spilling()
    plan = plan_offload(model, hardware, setup)
    first = choose_solver(model, hardware, replace(setup, solver="algorithm_1"), plan)
    assert (first.solver, first.activations) == ("algorithm_1", plan.activations)
    assert [solved.name for solved in first.solvers] == ["algorithm_1"]
    assert choose_solver(model, hardware, replace(setup, solver="migration"), plan).solver == "migration"
    forced = replace(setup, activations="recompute", solver="auto")
    recomputing = plan_offload(model, hardware, forced)
    assert choose_solver(model, hardware, forced, recomputing).activations == recomputing.activations


def test_auto_is_algorithm_1_and_compares_if_asked() -> None:
    model, hardware, setup = spilling()
    plan = plan_offload(model, hardware, setup)
    alone, compared = (choose_solver(model, hardware, setup, plan, compares=compares) for compares in (False, True))
    assert alone.activations == compared.activations == plan.activations
    assert [solved.name for solved in alone.solvers] == ["algorithm_1"]
    assert [solved.name for solved in compared.solvers] == ["algorithm_1", "algorithm_1_spread", "migration"]


def test_spreading_keeps_the_bytes_of_each_tier() -> None:
    model, hardware, setup = spilling()
    plan = plan_offload(model, hardware, setup)
    before = placed_by_layer(model, plan.activations)
    for placements in spread_placements(model, plan.activations):
        placed = placed_by_layer(model, placements)
        assert placed.swapped.sum() == before.swapped.sum()
        assert placed.ram.sum() <= before.ram.sum()
        assert (placed.kept == before.kept).all()
        assert np.ptp(placed.spilled) < np.ptp(before.spilled)
        assert all(places[INPUT] is not Placement.RECOMPUTE for places in placements.values())


def test_wider_windows_take_more_memory() -> None:
    model, _, _ = spilling()
    swapped = {
        layer.name: {INPUT: Placement.CPU, **{own.name: Placement.CPU for own in layer.operations}}
        for layer in model.layers
    }
    placed = placed_by_layer(model, swapped)
    sizes = [
        fullest_bytes(model, placed, fetch_ahead=ahead, layers_leaving=leaving)
        for ahead, leaving in ((1, 2), (2, 3), (3, 4))
    ]
    of_layer = model.layers[0].output_bytes + model.layers[0].input_bytes
    assert sizes == [sizes[0], sizes[0] + of_layer, sizes[0] + 2 * of_layer]


@pytest.mark.slow
def test_a_large_model_is_solved_with_few_simulations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = decoder(8192, 80, batch_size=1, sequence_length=2048, vocabulary=128_256)
    calls = []
    real = solvers.simulate_step
    monkeypatch.setattr(solvers, "simulate_step", lambda *args: calls.append(1) or real(*args))
    own = setup(solver="auto", **OUR_STATES)
    choose_solver(model, machine_with(3), own, plan_offload(model, machine_with(3), own), compares=True)
    assert 1 < len(calls) <= 1 + 3 * (3 + 4)

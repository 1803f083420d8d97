"""Compares the plans of several solvers by their simulated steps.

Algorithm 1 (`plan_search`) ranks activations by the summed time of each lane. It does not know when a lane is busy. Its
plan is also simulated with its swaps and spills spread over the layers. `migration` reserves the time of each lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from hf_lohan.annexes.studies.migration import migrated_placements
from hf_lohan.annexes.studies.placed_plan import with_placements
from hf_lohan.annexes.studies.simulation.simulated_step import simulate_step
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.costs.offload_plan import (
    INPUT,
    ActivationPlacements,
    OffloadPlan,
    Placement,
    SolvedPlan,
    SolverName,
    TrainingSetup,
)

_CLEARLY_SHORTER = 1.01
"""Wider windows are taken only if the step without them takes more than this many times as long."""
_WINDOWS = ((1, 2), (2, 3), (3, 4))
"""Pairs of `fetch_ahead` and `layers_leaving`. Wider windows take more memory of the device."""
_SWAPPED = (Placement.CPU, Placement.SSD)


def choose_solver(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    plan: OffloadPlan,
    *,
    compares: bool = False,
) -> OffloadPlan:
    """Return ``plan`` (Algorithm 1's) or the plan of the setup's solver, with the simulated steps of the tried solvers.
    `auto` is Algorithm 1, because measured steps were not shorter, unlike simulated ones
    (`scripts/benchmarks/bench_migration.py --measure`). ``compares``: try all solvers in any case.

    Other solvers are tried only with `activations: auto`, and for a plan that fits. With several ranks nothing is
    simulated, and ``plan`` is returned.
    """
    found = [(plan, _simulated_s(model, hardware, setup, plan))]
    is_asked = compares or setup.solver == "migration"
    if is_asked and plan.fits and setup.activations == "auto" and found[0][1] is not None:
        for name, placements in _other_placements(model, hardware, setup, plan):
            best = _best_windows(model, hardware, setup, replace(plan, solver=name), placements)
            if best is not None:
                found.append(best)
    asked = [one for one in found if one[0].solver == setup.solver]
    chosen = min(asked or found[:1], key=_simulated)[0]
    of_solver: dict[SolverName, tuple[OffloadPlan, float | None]] = {}
    for one in sorted(found, key=_simulated):
        of_solver.setdefault(one[0].solver, one)
    solvers = tuple(
        SolvedPlan(name, own.prediction.step_s, step_s, own.prediction.ssd_write_bytes_per_step)
        for name, (own, step_s) in sorted(of_solver.items())
    )
    return replace(chosen, solvers=solvers)


def _simulated(one: tuple[OffloadPlan, float | None]) -> float:
    return float("inf") if one[1] is None else one[1]


def _simulated_s(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan
) -> float | None:
    step = simulate_step(model, hardware, setup, plan)
    return None if step is None else step.step_s


def _best_windows(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    plan: OffloadPlan,
    placements: ActivationPlacements,
) -> tuple[OffloadPlan, float | None] | None:
    """Simulate the placements with several windows. Return the plan with the shortest step, and the seconds of this
    step. Wider windows are taken only for a clearly shorter step. None if the placements do not fit."""
    best: tuple[OffloadPlan, float | None] | None = None
    for fetch_ahead, layers_leaving in _WINDOWS:
        placed = with_placements(
            model, hardware, setup, plan, placements, fetch_ahead=fetch_ahead, layers_leaving=layers_leaving
        )
        if placed is None:
            break
        one = placed, _simulated_s(model, hardware, setup, placed)
        if best is None or _CLEARLY_SHORTER * _simulated(one) < _simulated(best):
            best = one
    return best


def _other_placements(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan
) -> Iterator[tuple[SolverName, ActivationPlacements]]:
    """Yield distinct placements. They include the placements of the plan, because wider windows may be faster."""
    seen: list[ActivationPlacements] = []
    makers: list[tuple[SolverName, Callable[[], list[ActivationPlacements]]]] = [
        ("algorithm_1_spread", lambda: [plan.activations, *spread_placements(model, plan.activations)]),
        ("migration", lambda: migrated_placements(model, hardware, setup, plan)),
    ]
    for name, make in makers:
        for placements in make():
            if placements not in seen:
                seen.append(placements)
                yield name, placements


def spread_placements(model: ModelProfile, activations: ActivationPlacements) -> list[ActivationPlacements]:
    """Return two variants of the placements: with the spills spread evenly over the layers, and with both swaps and
    spills spread. The bytes on each tier are about the same. The bytes in RAM are never more."""
    spread_swaps = _with_swaps_spread(model, activations)
    return [_with_spills_spread(model, activations), _with_spills_spread(model, spread_swaps)]


def _with_spills_spread(model: ModelProfile, activations: ActivationPlacements) -> ActivationPlacements:
    found = {name: dict(places) for name, places in activations.items()}
    sizes = [
        (layer.name, operation, num_bytes)
        for layer in model.layers
        for operation, num_bytes in _sizes(layer)
        if activations[layer.name][operation] in _SWAPPED
    ]
    spilled_bytes = _spilled_bytes(model, activations)
    all_bytes = sum(size for _, _, size in sizes)
    in_ram, passed = 0, 0
    for name, operation, size in sizes:
        passed += size
        # Of the bytes so far, RAM gets at most its overall share. So RAM never gets more bytes than before.
        fits = in_ram + size <= (all_bytes - spilled_bytes) * passed / all_bytes if all_bytes else True
        found[name][operation] = Placement.CPU if fits else Placement.SSD
        in_ram += size if fits else 0
    return found


def _with_swaps_spread(model: ModelProfile, activations: ActivationPlacements) -> ActivationPlacements:
    """Swap the same number of outputs of each kind as before, but in evenly spaced layers. Kept outputs stay."""
    found = {name: dict(places) for name, places in activations.items()}
    kinds: dict[tuple[str, int], list[str]] = {}
    for layer in model.layers:
        for operation in layer.operations:
            if activations[layer.name][operation.name] is not Placement.GPU:
                kinds.setdefault((operation.name, operation.output_bytes), []).append(layer.name)
    for (operation_name, _), layers in kinds.items():
        num_swapped = sum(activations[name][operation_name] in _SWAPPED for name in layers)
        chosen = {int((number + 0.5) * len(layers) / num_swapped) for number in range(num_swapped)}
        for index, name in enumerate(layers):
            place = Placement.CPU if index in chosen else Placement.RECOMPUTE
            found[name][operation_name] = place
    # The number of spilled bytes stays. `_with_spills_spread` chooses the outputs later.
    spilled_bytes = _spilled_bytes(model, activations)
    for layer in model.layers:
        for own, size in _sizes(layer):
            if found[layer.name][own] in _SWAPPED:
                found[layer.name][own] = Placement.SSD if spilled_bytes > 0 else Placement.CPU
                spilled_bytes -= size
    return found


def _spilled_bytes(model: ModelProfile, activations: ActivationPlacements) -> int:
    return sum(
        size
        for layer in model.layers
        for operation, size in _sizes(layer)
        if activations[layer.name][operation] is Placement.SSD
    )


def _sizes(layer: BlockProfile) -> list[tuple[str, int]]:
    return [(INPUT, layer.input_bytes), *((operation.name, operation.output_bytes) for operation in layer.operations)]

"""Makes a plan from given placements of activations: bytes on each tier, device memory, and the predicted step."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from hf_lohan.costs.fitting import (
    activation_ram_bytes,
    allocator_bytes,
    measure_room,
    outer_working_bytes,
    room_to_hold_bytes,
)
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.costs.offload_plan import (
    FETCH_AHEAD,
    INPUT,
    LAYERS_LEAVING,
    ActivationPlacements,
    LayerPlacements,
    OffloadPlan,
    Placement,
    Tier,
    TrainingSetup,
)
from hf_lohan.costs.search.candidate_memory import FullestMoment, held_beside
from hf_lohan.costs.search.plan_search import forecast

Bytes = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PlacedBytes:
    """Bytes of each layer's activations [num_layers]."""

    kept: Bytes
    kept_outputs: Bytes
    """The part of `kept` without the layers' inputs."""
    ram: Bytes
    spilled: Bytes

    @property
    def swapped(self) -> Bytes:
        return self.ram + self.spilled


def placed_bytes(layer: BlockProfile, placements: LayerPlacements) -> dict[Placement, float]:
    """Return the bytes of a layer's activations by placement."""
    sums = dict.fromkeys(Placement, 0.0)
    sums[placements.get(INPUT, Placement.GPU)] += layer.input_bytes
    for operation in layer.operations:
        sums[placements.get(operation.name, Placement.RECOMPUTE)] += operation.output_bytes
    return sums


def placed_by_layer(model: ModelProfile, activations: ActivationPlacements) -> PlacedBytes:
    """Return the bytes of each layer's activations on each tier."""
    placements = [activations.get(layer.name, {}) for layer in model.layers]
    sums = [placed_bytes(layer, own) for layer, own in zip(model.layers, placements, strict=True)]
    is_kept = np.array([own.get(INPUT, Placement.GPU) is Placement.GPU for own in placements])
    kept, ram, spilled = (
        np.array([of_layer[place] for of_layer in sums]) for place in (Placement.GPU, Placement.CPU, Placement.SSD)
    )
    return PlacedBytes(kept, kept - is_kept * [layer.input_bytes for layer in model.layers], ram, spilled)


def fullest_bytes(
    model: ModelProfile,
    placed: PlacedBytes,
    *,
    num_together: int = 1,
    fetch_ahead: int = FETCH_AHEAD,
    layers_leaving: int = LAYERS_LEAVING,
) -> float:
    """Return the peak of device memory in addition to the slots (`FullestMoment.peak`)."""
    if not model.layers:
        return float(outer_working_bytes(model))
    peak = partial(FullestMoment(model, [], num_together).peak, fetch_ahead=fetch_ahead, layers_leaving=layers_leaving)
    return float(peak(placed.kept, placed.kept_outputs, placed.swapped[None])[0])


def with_placements(
    model: ModelProfile,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    plan: OffloadPlan,
    activations: ActivationPlacements,
    *,
    fetch_ahead: int = FETCH_AHEAD,
    layers_leaving: int = LAYERS_LEAVING,
) -> OffloadPlan | None:
    """Return ``plan`` with other placements and windows. Returns None if they do not fit a tier."""
    own = replace(setup, commit_every_steps=plan.commit_every_steps)
    placed = placed_by_layer(model, activations)
    peak_bytes = fullest_bytes(
        model, placed, num_together=setup.num_together, fetch_ahead=fetch_ahead, layers_leaving=layers_leaving
    )
    room = measure_room(model, hardware, own)
    cpu_bytes = max(0, activation_ram_bytes(room, setup, plan.resident) - plan.parked_bytes)
    kept_bytes, ram_bytes, spilled_bytes = (float(part.sum()) for part in (placed.kept, placed.ram, placed.spilled))
    fits = (
        peak_bytes <= room_to_hold_bytes(hardware, own)
        and kept_bytes <= max(0, setup.gpu_memory_bytes - setup.gpu_fixed_bytes)
        and ram_bytes <= cpu_bytes
        and spilled_bytes <= room.ssd_bytes
    )
    if not fits:
        return None
    recomputed = [
        operation
        for layer in model.layers
        for operation in layer.operations
        if activations[layer.name][operation.name] is Placement.RECOMPUTE
    ]
    spilled_gradient_bytes = float(setup.spilled_gradient_bytes)
    if setup.gradients and setup.spilled_gradient_bytes and cpu_bytes:
        through = np.cumsum(placed.ram)
        put_away = {layer.name: np.full(1, through[index]) for index, layer in enumerate(model.layers)}
        held = held_beside(setup.gradients, put_away, num_held_chunks=setup.num_held_chunks, ram_bytes=cpu_bytes)
        spilled_gradient_bytes = max(0.0, setup.spilled_gradient_bytes - float(held[0]))
    swaps, recomputes = any(placed.swapped > 0), bool(recomputed)
    decided = replace(
        plan.prediction,
        case=1 if recomputes and not swaps else 3 if recomputes else 2,
        kept_bytes=int(kept_bytes),
        swapped_bytes=int(ram_bytes + spilled_bytes),
        spilled_bytes=int(spilled_bytes),
        spilled_gradient_bytes=int(spilled_gradient_bytes),
        recomputed_flops=setup.num_micro_batches * sum(operation.flops for operation in recomputed),
        tier_bytes=_tier_bytes(plan, hardware, own, placed, peak_bytes, spilled_gradient_bytes),
    )
    other = replace(
        plan, activations=activations, prediction=decided, fetch_ahead=fetch_ahead, layers_leaving=layers_leaving
    )
    return replace(other, prediction=forecast(model, hardware, own, other))


def _tier_bytes(
    plan: OffloadPlan,
    hardware: HardwareProfile,
    setup: TrainingSetup,
    placed: PlacedBytes,
    peak_bytes: float,
    spilled_gradient_bytes: float,
) -> dict[Tier, dict[str, int]]:
    num_local, before = setup.cluster.num_local, plan.prediction.tier_bytes
    kept_bytes, ram_bytes = int(placed.kept.sum()), int(placed.ram.sum())
    working_bytes = max(0, math.ceil(peak_bytes - kept_bytes))
    gpu = {**before["gpu"], "activations": kept_bytes, "working_set": working_bytes}
    gpu.pop("allocator_and_workspaces", None)
    if on_top := allocator_bytes(hardware, setup, kept_bytes + working_bytes):
        gpu["allocator_and_workspaces"] = on_top
    in_ram = setup.spilled_gradient_bytes - int(spilled_gradient_bytes)
    ram = {
        "activations": num_local * ram_bytes,
        "gradients": num_local * (max(0, in_ram - ram_bytes) + plan.parked_bytes),
    }
    return {
        "gpu": gpu,
        "cpu": {**before["cpu"], **ram},
        "ssd": {**before["ssd"], "activations": num_local * int(placed.spilled.sum())},
    }

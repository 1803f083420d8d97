"""Computes the work of each block in a step: bytes of weights, activations, gradients and states, and compute time."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from hf_lohan.annexes.studies.placed_plan import placed_bytes
from hf_lohan.costs.fitting import layer_needs
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.costs.offload_plan import INPUT, LayerPlacements, OffloadPlan, Placement, TrainingSetup
from hf_lohan.costs.pool_plan import MAX_CHUNK_NUMEL, SizeClass
from hf_lohan.costs.record_traffic import FETCHED_KINDS, PARAM
from hf_lohan.costs.step.expert_costs import ExpertCosts
from hf_lohan.costs.step.step_costs import (
    block_forward_s,
    cheap_recompute_s,
    decoded_per_s,
    experts_forward_s,
    gradient_itemsize,
    lending_layers,
    operation_s,
    repeated_s,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockWork:
    """The work of one block in a step."""

    name: str
    size_class: SizeClass
    is_layer: bool
    param_bytes: int
    read_bytes: float
    """Bytes of weights that a load reads from the drives."""
    decode_s: float
    forward_s: float
    backward_s: float
    expert_bytes: tuple[float, float]
    """Bytes of experts that (forward, backward) load."""
    ram_bytes: float
    """Bytes of activations that are swapped to RAM."""
    spilled_bytes: float
    early_share: float
    """Fraction of the swapped activations that exist when half of the forward is done."""
    device_share: float
    """Fraction of the swapped activations that is on the device at the same time. For a layer in chunks: one chunk."""
    output_bytes: float
    """Bytes that a forward leaves on the device until they are swapped, or forever if they are kept."""
    working_bytes: float
    """Device memory of the backward, in addition to these activations."""
    gradient_bytes: float
    spilled_gradient_bytes: float
    """Bytes of the step's gradient that are held on the drives."""
    spilled_sum_bytes: float
    """Bytes of the sum over the micro-batches so far that are held on the drives."""
    num_updated: float
    update_read_bytes: float
    update_write_bytes: float
    lent_bytes: float
    num_chunks: int
    last_chunk_share: float
    """Fraction of the block in its last chunk."""
    holds_in_buffers: bool
    """Whether a held gradient stays in the buffers in which it arrived."""

    @property
    def is_trained(self) -> bool:
        return self.gradient_bytes > 0


def block_works(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan
) -> list[BlockWork]:
    layer_names = {layer.name for layer in model.layers}
    resident: dict[str, float] = defaultdict(float)
    updated_in_ram: dict[str, float] = defaultdict(float)
    known = {block.name for block in model.blocks}
    of_experts = 0.0
    for record in setup.resident_records:
        is_read = setup.update_reads_param or record.kind != PARAM
        if record.block not in known:  # one expert
            of_experts += record.update_read_bytes if is_read else 0.0
            continue
        if record.kind in FETCHED_KINDS and not record.is_expert_weight:
            resident[record.block] += record.num_bytes
        if is_read:
            updated_in_ram[record.block] += record.update_read_bytes
    expert_layers = sum(block.experts is not None for block in model.blocks)
    costs = ExpertCosts(model, hardware, setup)
    trained_experts = sum(each.num_experts * each.num_trainable_params for each in model.experts)
    on_time = 1 - costs.updates_left_out / trained_experts if trained_experts else 1.0
    spilled = _spilled_shares(model, setup)
    of_one = 1 / max(1, expert_layers)
    held_blocks = set(setup.pools.held_blocks) if setup.pools is not None else set()
    chunk_numel = setup.pools.chunk_numel if setup.pools is not None else MAX_CHUNK_NUMEL
    lending = {layer.name for layer in lending_layers(model, hardware)}
    works = []
    for block in reversed(model.blocks):
        is_layer, placements = block.name in layer_names, plan.activations.get(block.name, {})
        num_experts_trained = 0.0
        if block.experts is not None:
            num_experts_trained = block.experts.num_experts * block.experts.num_trainable_params
            updated_in_ram[block.name] += of_one * of_experts
        num_trained = block.num_trainable_params + on_time * num_experts_trained
        param_bytes = num_trained * model.param_itemsize
        state_bytes = num_trained * setup.state_bytes_per_param
        in_ram = min(updated_in_ram[block.name], state_bytes + param_bytes)
        update_read = state_bytes + (param_bytes if setup.update_reads_param else 0.0)
        gradient_bytes = block.gradient_bytes(gradient_itemsize(model, setup)) + of_one * (
            costs.gradient_bytes if block.experts is not None else 0.0
        )
        trained_bytes = block.num_trainable_params * model.param_itemsize
        is_lent = (
            block.name in lending and setup.lent_bytes > 0 and not resident[block.name] and setup.update_reads_param
        )
        expert_share = block.experts.hit_bytes / costs.forward_bytes if block.experts and costs.forward_bytes else 0.0
        reloaded = _reloads(block, placements) * costs.reload_bytes(block) if block.experts is not None else 0.0
        placed = placed_bytes(block, placements) if is_layer else dict.fromkeys(Placement, 0.0)
        ram, spill, kept = placed[Placement.CPU], placed[Placement.SSD], placed[Placement.GPU]
        needs = layer_needs(block, model) if is_layer else block.working_bytes or block.saved_bytes
        works.append(
            BlockWork(
                name=block.name,
                size_class=block.size_class,
                is_layer=is_layer,
                param_bytes=block.loaded_bytes,
                read_bytes=max(0.0, block.read_bytes - resident[block.name]),
                decode_s=block.decoded_numel / decoded_per_s(hardware),
                forward_s=block_forward_s(block, hardware),
                backward_s=_backward_s(block, hardware, setup, placements, is_layer=is_layer),
                expert_bytes=(
                    costs.from_ssd * expert_share * costs.forward_bytes,
                    costs.from_ssd * (expert_share * costs.backward_bytes + reloaded),
                ),
                ram_bytes=ram,
                spilled_bytes=spill,
                early_share=_early_share(block, hardware, placements) if ram + spill else 0.0,
                device_share=1 / block.num_chunks,
                output_bytes=(ram + spill) / block.num_chunks + kept,
                working_bytes=max(
                    0.0, needs - max(0.0, (ram + spill + kept - 2 * block.input_bytes) / block.num_chunks)
                ),
                gradient_bytes=gradient_bytes,
                spilled_gradient_bytes=spilled.get(block.name, 0.0) * plan.prediction.spilled_gradient_bytes,
                spilled_sum_bytes=spilled.get(block.name, 0.0) * setup.spilled_gradient_bytes,
                num_updated=num_trained,
                update_read_bytes=max(0.0, update_read - in_ram),
                update_write_bytes=max(
                    0.0, state_bytes + param_bytes - updated_in_ram[block.name] * (1 - setup.committed_fraction)
                ),
                lent_bytes=trained_bytes if is_lent else 0.0,
                num_chunks=max(1, math.ceil(num_trained / chunk_numel)),
                last_chunk_share=1 - (math.ceil(num_trained / chunk_numel) - 1) * chunk_numel / num_trained
                if num_trained > chunk_numel
                else 1.0,
                holds_in_buffers=block.name in held_blocks,
            )
        )
    return works[::-1]


def _spilled_shares(model: ModelProfile, setup: TrainingSetup) -> dict[str, float]:
    """Return the fraction of the spilled gradients that each block has. Only the last blocks spill gradients."""
    names = None if setup.pools is None else set(setup.pools.spilled_blocks)
    numels = {block.name: block.num_trainable_params for block in model.blocks if names is None or block.name in names}
    all_numel = sum(numels.values())
    return {name: numel / all_numel for name, numel in numels.items()} if all_numel else {}


def _early_share(block: BlockProfile, hardware: HardwareProfile, placements: LayerPlacements) -> float:
    """Return the fraction of a layer's swapped activations that exist when half of its forward is done."""
    swapped = (Placement.CPU, Placement.SSD)
    early = whole = block.input_bytes if placements.get(INPUT) in swapped else 0.0
    half_s, now_s = block_forward_s(block, hardware) / 2, 0.0
    for operation in block.operations:
        now_s += operation_s(operation, hardware)
        if placements.get(operation.name) in swapped:
            whole += operation.output_bytes
            early += operation.output_bytes if now_s <= half_s else 0.0
    return early / whole if whole else 0.0


def _backward_s(
    block: BlockProfile, hardware: HardwareProfile, setup: TrainingSetup, placements: LayerPlacements, *, is_layer: bool
) -> float:
    seconds = block_forward_s(block, hardware) * (1 + block.trained_fraction)
    if not is_layer:
        return seconds
    seconds += experts_forward_s(block, hardware) + repeated_s(block, hardware)
    if setup.activations != "keep":
        seconds += cheap_recompute_s(block, hardware)
    recomputed: Iterable[float] = (
        operation_s(operation, hardware)
        for operation in block.operations
        if placements.get(operation.name, Placement.RECOMPUTE) is Placement.RECOMPUTE
    )
    return seconds + sum(recomputed)


def _reloads(block: BlockProfile, placements: LayerPlacements) -> int:
    """Return how many operations of a layer load its experts again in backward."""
    return sum(
        operation.loads_experts and placements.get(operation.name, Placement.RECOMPUTE) is Placement.RECOMPUTE
        for operation in block.operations
    )

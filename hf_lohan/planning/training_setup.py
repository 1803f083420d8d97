"""What the planner needs to know of a run beside its model and hardware."""

from __future__ import annotations

from typing import Literal

from hf_lohan.config import OffloadConfig
from hf_lohan.model import OffloadLayout
from hf_lohan.planner import SizeClass, TrainingSetup
from hf_lohan.weights import MIN_SLOTS_TO_LEND


def training_setup(
    config: OffloadConfig,
    layout: OffloadLayout,
    *,
    clip: Literal["none", "defer", "speculate", "auto"],
    durability: Literal["step", "checkpoint"],
    clip_rate: float = 0.0,
    num_micro_batches: int = 1,
) -> TrainingSetup:
    """Of a resolved configuration and the layout that follows from it."""
    assert isinstance(config.gpu_memory, int) and isinstance(config.cpu_memory, int)
    master, spilled = layout.master, set(layout.plan.spilled_blocks)
    layers = [block for block in layout.blocks if block.size_class is SizeClass.LAYER]
    in_slots = layers[max(0, len(layers) - layout.plan.num_slots[SizeClass.LAYER]) :]
    capacities = [ssd.capacity for ssd in config.ssd] if config.ssd != "auto" else ["auto"]
    known = [capacity for capacity in capacities if isinstance(capacity, int)]
    return TrainingSetup(
        gpu_memory_bytes=config.gpu_memory,
        cpu_memory_bytes=config.cpu_memory,
        gpu_fixed_bytes=layout.plan.gpu_pool_bytes,
        cpu_fixed_bytes=layout.plan.cpu_pool_bytes,
        ssd_capacity_bytes=sum(known) if len(known) == len(capacities) else None,
        activation_cpu_bytes=layout.activation_bytes,
        record_cpu_bytes=layout.resident_bytes,
        activations=config.activations,
        lent_bytes=_lent_bytes(layout),
        hands_over=config.schedule == "optimized",
        state_bytes_per_param=master.state_bytes_per_param,
        clip=clip,
        clip_rate=clip_rate,
        num_micro_batches=num_micro_batches,
        durability=durability,
        spilled_gradient_numel=sum(block.state_numel for block in layout.blocks if block.name in spilled),
        turnaround_bytes=sum(block.numel * master.working_dtype.itemsize for block in in_slots),
        hold_resident_records=config.resident_records == "auto",
    )


def _lent_bytes(layout: OffloadLayout) -> int:
    """Of the trainable weights in layers, where there is a slot to lend."""
    if layout.plan.num_slots[SizeClass.LAYER] < MIN_SLOTS_TO_LEND:
        return 0
    numel = sum(block.state_numel for block in layout.blocks if block.size_class is SizeClass.LAYER)
    return numel * layout.master.working_dtype.itemsize

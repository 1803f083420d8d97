"""What `lohan plan` and `lohan estimate` say of experts that stream one by one."""

from __future__ import annotations

from collections.abc import Iterable

from hf_lohan.planner import OffloadPlan, SizeClass
from hf_lohan.wording import count, drive_bytes, format_bytes, seconds, times


def of_experts(plan: OffloadPlan, num_tokens: int) -> Iterable[str]:
    """How many there are, how many of them micro-batches of ``num_tokens`` go to, and what a step moves for them."""
    experts, step = plan.prediction.experts, plan.prediction
    if experts is None:
        return
    share = experts.hits_per_micro_batch / experts.num_experts
    each_bytes = experts.param_bytes / experts.num_experts
    yield (
        f"{times(experts.num_experts, 'expert')} of {format_bytes(each_bytes)} in {times(experts.num_layers, 'layer')} "
        f"stream one by one, {format_bytes(experts.param_bytes)} in all; of {count(plan.num_params)} parameters "
        f"{count(experts.active_params)} work on a token."
    )
    from_tokens = experts.all_hit_from_tokens
    all_hit = "whatever their number some are never chosen" if from_tokens is None else f"all from {from_tokens} on"
    slots = "" if plan.pools is None else f" into {times(plan.pools.num_slots[SizeClass.EXPERT], 'slot')}"
    yield (
        f"Balanced routing takes {num_tokens} tokens to {100 * share:.3g}% of a layer's experts ({all_hit}). A step "
        f"loads {count(experts.loads_per_step)}{slots}, {format_bytes(experts.loaded_bytes_per_step)}."
    )
    moved_bytes = step.ssd_read_bytes_per_step + step.ssd_write_bytes_per_step
    yield (
        f"One step over these SSDs takes {seconds(step.floor_by_resource_s['ssd'])} at least, for "
        f"{drive_bytes(moved_bytes)}."
    )

"""Of the ways that ranks can send each other weights and gradients the fastest, what is exact first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from hf_lohan.planner.collectives import ChosenCollectives, TriedWay
from hf_lohan.planner.fitting import ram_copy_bytes
from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.offload_plan import OffloadPlan, TrainingSetup
from hf_lohan.planner.plan_search import plan_offload

WORTH_ANOTHER_WAY = 0.99
"""Of the step of a way that rounds less, or needs no copy."""


def with_ways(model: ModelProfile, setup: TrainingSetup, ways: ChosenCollectives) -> TrainingSetup:
    """The setup for ranks that send like this. A copy in RAM takes the room of copied records."""
    changed = replace(setup, cluster=replace(setup.cluster, collectives=ways))
    room_bytes = setup.record_cpu_bytes - ram_copy_bytes(model, changed)
    return replace(changed, record_cpu_bytes=max(0, room_bytes))


def plan_over_ranks(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, ways: Iterable[ChosenCollectives]
) -> tuple[OffloadPlan, TrainingSetup]:
    """The best plan, and the setup that it is for. Where nothing fits, that of the first way."""
    tried = [with_ways(model, setup, way) for way in ways]
    plans = [plan_offload(model, hardware, own) for own in tried]
    best = 0
    for index, plan in enumerate(plans):
        if _is_better(plan, plans[best]):
            best = index
    steps = tuple(
        TriedWay(plan.cluster.collectives, plan.prediction.step_s, plan.fits) for plan in plans if len(plans) > 1
    )
    return replace(plans[best], tried_ways=steps), tried[best]


def _is_better(plan: OffloadPlan, than: OffloadPlan) -> bool:
    if plan.fits != than.fits:
        return plan.fits
    return plan.prediction.step_s < WORTH_ANOTHER_WAY * than.prediction.step_s

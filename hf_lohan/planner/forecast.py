"""What a plan that was made would take on hardware that turned out to be another."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from hf_lohan.planner.compute_costs import operation_s
from hf_lohan.planner.expert_costs import ExpertCosts
from hf_lohan.planner.hardware_profile import HardwareProfile
from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.offload_plan import OffloadPlan, Placement, StepPrediction, TrainingSetup
from hf_lohan.planner.step_costs import Choice, StepCosts

_DECIDED = ("num_tokens", "model_flops", "case", "kept_bytes", "recomputed_flops", "tier_bytes", "fits")
"""Figures that do not depend on the hardware."""


def forecast(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> StepPrediction:
    """The prediction for ``plan`` as it is."""
    before = plan.prediction
    recomputed = [
        (layer, operation)
        for layer in model.layers
        for operation in layer.operations
        if plan.activations[layer.name][operation.name] is Placement.RECOMPUTE
    ]
    recompute_s = sum(operation_s(operation, hardware) for _, operation in recomputed)
    experts = ExpertCosts(model, hardware, setup)
    reloaded_bytes = sum(experts.reload_bytes(layer) for layer, operation in recomputed if operation.loads_experts)
    choice = Choice(
        swapped_bytes=np.array([float(before.swapped_bytes)]),
        spilled_bytes=np.array([float(before.spilled_bytes)]),
        recompute_s=np.array([recompute_s]),
        spilled_gradient_bytes=np.array([float(before.spilled_gradient_bytes)]),
        reloaded_bytes=np.array([float(reloaded_bytes)]),
    )
    own = replace(setup, commit_every_steps=plan.commit_every_steps)
    decided = {name: getattr(before, name) for name in _DECIDED}
    return StepCosts(model, hardware, own).predict(choice, plan.clip, **decided)


def scaled_to(prediction: StepPrediction, step_s: float) -> StepPrediction:
    """The prediction with its step as long as it was found to be."""
    factor = step_s / prediction.step_s
    return replace(prediction, forward_s=factor * prediction.forward_s, backward_s=factor * prediction.backward_s)

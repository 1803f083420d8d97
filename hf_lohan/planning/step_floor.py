"""The least that a planned step could take: how long each resource alone is busy with its share of it."""

from __future__ import annotations

import numpy as np

from hf_lohan.planner import HardwareProfile, ModelProfile, StepPrediction, TrainingSetup
from hf_lohan.planner.step_costs import Load, StepCosts


def floor_by_resource_s(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, prediction: StepPrediction
) -> dict[str, float]:
    """Seconds a step by resource, under the planner's names: FLOPs over measured throughput, bytes over measured
    bandwidth. No step is shorter than the longest, however well things overlap."""
    forward, backward = prediction.forward, prediction.backward
    load = Load(
        compute_s=np.full(1, forward.compute_s + backward.compute_s),
        h2d_bytes=np.full(1, (forward.h2d_s + backward.h2d_s) * hardware.h2d_bytes_per_s),
        d2h_bytes=np.full(1, (forward.d2h_s + backward.d2h_s) * hardware.d2h_bytes_per_s),
        ssd_read_bytes=np.full(1, float(prediction.ssd_read_bytes_per_step)),
        ssd_write_bytes=np.full(1, float(prediction.ssd_write_bytes_per_step)),
        updated_params=np.full(1, (forward.optimizer_s + backward.optimizer_s) * hardware.cpu.optimizer_params_per_s),
    )
    lanes = StepCosts(model, hardware, setup).lanes(load, efficiency=1.0)
    floors = {resource: float(seconds.item()) for resource, seconds in lanes.items()}
    # Where reading and writing at once is slower than in turn, a step may do it in turn.
    in_turn_s = (
        prediction.ssd_read_bytes_per_step / hardware.ssd_read_bytes_per_s
        + prediction.ssd_write_bytes_per_step / hardware.ssd_write_bytes_per_s
    )
    return {**floors, "ssd": min(floors["ssd"], in_turn_s)}

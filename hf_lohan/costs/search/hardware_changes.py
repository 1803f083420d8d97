"""Describes better hardware for a run, and predicts the life of the drives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_lohan.costs.hardware_profile import HardwareProfile, with_changed
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import OffloadPlan, StepPrediction, TrainingSetup
from hf_lohan.costs.step.rank_costs import step_costs
from hf_lohan.costs.step.step_costs import Choice

DAY_S = 24 * 60 * 60


def better_hardware(
    hardware: HardwareProfile, setup: TrainingSetup
) -> Iterator[tuple[str, HardwareProfile, TrainingSetup]]:
    """Yield machines on which the same run may be faster, each with its description and the setup of the run on it."""
    device = hardware.device
    faster_cpu = with_changed(hardware.cpu, _doubled, "optimizer_params_per_s")
    yield "a CPU that runs the optimizer twice as fast", replace(hardware, cpu=faster_cpu), setup
    faster_device = with_changed(device, _doubled, "flops_per_s", "attention_flops_per_s")
    yield "a device with twice the FLOP/s", replace(hardware, device=faster_device), setup
    if device.shares_cpu:
        return
    yield (
        "a device with twice the memory",
        replace(hardware, device=with_changed(device, _doubled, "memory_bytes")),
        replace(setup, gpu_memory_bytes=setup.gpu_memory_bytes + device.memory_bytes, device_memory_bytes=None),
    )
    links = ("h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s")
    yield "a link to the device twice as fast", with_changed(hardware, _doubled, *links), setup
    if setup.cluster.transport == "nccl":
        rate = _doubled(hardware.between_gpus_bytes_per_s)
        yield "links between GPUs twice as fast", replace(hardware, gpu_link_bytes_per_s=rate), setup


def one_more_ssd(hardware: HardwareProfile) -> HardwareProfile:
    """Return the machine with one more drive, which equals its first drive."""

    def grown(rate: float) -> float:
        """Scale a rate of all drives together with the number of drives."""
        return rate * (1 + 1 / len(hardware.ssd))

    together = ("ssd_together_read_bytes_per_s", "ssd_together_write_bytes_per_s", "ssd_mixed_bytes_per_s")
    return replace(with_changed(hardware, grown, *together), ssd=(*hardware.ssd, hardware.ssd[0]))


def _doubled(value: float) -> float:
    return 2 * value


@dataclass(frozen=True, slots=True)
class DriveLife:
    """The life of the drive that wears out first, if training never stops."""

    steps: float
    tokens: float
    days: float


def drive_life(hardware: HardwareProfile, prediction: StepPrediction) -> DriveLife | None:
    """Return the life of the drive that wears out first; None if no drive has a known endurance, or nothing is written.
    A store is striped in proportion to capacity."""
    written_bytes = prediction.ssd_write_bytes_per_step
    capacity_bytes = hardware.ssd_capacity_bytes
    steps = [
        ssd.endurance_bytes / (written_bytes * ssd.capacity_bytes / capacity_bytes)
        for ssd in hardware.ssd
        if ssd.endurance_bytes and written_bytes
    ]
    if not steps:
        return None
    return DriveLife(min(steps), min(steps) * prediction.num_tokens, min(steps) * prediction.step_s / DAY_S)


def written_bytes(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> float:
    """Return the bytes that a step with another setup writes, if it swaps and spills as the step of ``plan`` does."""
    zero, step = np.zeros(1), plan.prediction
    spilled = zero + step.spilled_bytes
    choice = Choice(zero + step.swapped_bytes, spilled, zero, zero + step.spilled_gradient_bytes, zero, zero)
    phases = step_costs(model, hardware, setup).phases(choice, plan.clip)
    return float(sum(phase.count * phase.load.ssd_write_bytes.item() for phase in phases))

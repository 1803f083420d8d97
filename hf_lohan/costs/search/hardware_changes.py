"""Predicts the effect of other hardware on a plan, and the life of the drives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from hf_lohan.costs.hardware_profile import HardwareProfile, with_changed
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import OffloadPlan, StepPrediction, TrainingSetup
from hf_lohan.costs.search.plan_search import plan_offload
from hf_lohan.costs.step.rank_costs import step_costs
from hf_lohan.costs.step.step_costs import Choice

DAY_S = 24 * 60 * 60
ONE_MORE_SSD, TWICE_THE_RAM = "one more SSD like the first", "twice the RAM"


@dataclass(frozen=True, slots=True)
class HardwareChange:
    """One change of the hardware, and the best plan with it."""

    description: str
    plan: OffloadPlan
    saved_s: float
    """Seconds that the change saves per step; 0 if the present machine cannot run the step."""

    @property
    def step_s(self) -> float:
        return self.plan.prediction.step_s

    @property
    def speedup(self) -> float:
        return (self.step_s + self.saved_s) / self.step_s


def what_hardware_buys(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> list[HardwareChange]:
    """Return plans with one more drive, twice the RAM and so on. The fastest plan is first."""
    now = plan_offload(model, hardware, setup)
    changes: list[HardwareChange] = []
    for description, better, better_setup in _improvements(hardware, setup):
        plan = plan_offload(model, better, better_setup)
        saved_s = now.prediction.step_s - plan.prediction.step_s if now.fits and plan.fits else 0.0
        changes.append(HardwareChange(description, plan, max(0.0, saved_s)))
    return sorted(changes, key=lambda change: (not change.plan.fits, -change.saved_s))


def _improvements(
    hardware: HardwareProfile, setup: TrainingSetup
) -> Iterator[tuple[str, HardwareProfile, TrainingSetup]]:
    device, cpu, first = hardware.device, hardware.cpu, hardware.ssd[0]
    limit = setup.ssd_capacity_bytes
    yield (
        ONE_MORE_SSD,
        one_more_ssd(hardware),
        replace(setup, ssd_capacity_bytes=None if limit is None else limit + first.capacity_bytes),
    )
    yield (
        TWICE_THE_RAM,
        replace(hardware, cpu=with_changed(cpu, _doubled, "memory_bytes")),
        replace(
            setup,
            cpu_memory_bytes=setup.cpu_memory_bytes + cpu.memory_bytes,
            record_cpu_bytes=setup.record_cpu_bytes + cpu.memory_bytes,
        ),
    )
    faster_cpu = with_changed(cpu, _doubled, "optimizer_params_per_s")
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

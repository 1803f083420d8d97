"""What other hardware would change, and how long the drives last."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hf_lohan.planner.hardware_profile import HardwareProfile, SsdProfile
from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.offload_plan import OffloadPlan, StepPrediction, TrainingSetup
from hf_lohan.planner.plan_search import plan_offload

DAY_S = 24 * 60 * 60


@dataclass(frozen=True, slots=True)
class HardwareChange:
    """One thing that could be bought, and the best plan with it."""

    description: str
    plan: OffloadPlan
    saved_s: float
    """Of each step; 0 where the present machine cannot run it at all."""

    @property
    def step_s(self) -> float:
        return self.plan.prediction.step_s

    @property
    def speedup(self) -> float:
        return (self.step_s + self.saved_s) / self.step_s


def what_hardware_buys(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup) -> list[HardwareChange]:
    """What one more drive, twice the RAM, and so on would make of the step; those first that save most."""
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
    device, cpu = hardware.device, hardware.cpu
    first = hardware.ssd[0]
    yield (
        "one more SSD like the first",
        _with_one_more_ssd(hardware, first),
        replace(setup, ssd_capacity_bytes=_plus(setup.ssd_capacity_bytes, first.capacity_bytes)),
    )
    yield (
        "twice the RAM",
        replace(hardware, cpu=replace(cpu, memory_bytes=2 * cpu.memory_bytes)),
        replace(
            setup,
            cpu_memory_bytes=setup.cpu_memory_bytes + cpu.memory_bytes,
            record_cpu_bytes=setup.record_cpu_bytes + cpu.memory_bytes,
        ),
    )
    faster_cpu = replace(cpu, optimizer_params_per_s=2 * cpu.optimizer_params_per_s)
    yield "a CPU that runs the optimizer twice as fast", replace(hardware, cpu=faster_cpu), setup
    faster_device = replace(device, flops_per_s=2 * device.flops_per_s)
    yield "a device with twice the FLOP/s", replace(hardware, device=faster_device), setup
    if device.shares_cpu:
        return
    yield (
        "a device with twice the memory",
        replace(hardware, device=replace(device, memory_bytes=2 * device.memory_bytes)),
        replace(setup, gpu_memory_bytes=setup.gpu_memory_bytes + device.memory_bytes),
    )
    yield (
        "a link to the device twice as fast",
        replace(
            hardware,
            h2d_bytes_per_s=2 * hardware.h2d_bytes_per_s,
            d2h_bytes_per_s=2 * hardware.d2h_bytes_per_s,
            duplex_bytes_per_s=_times(hardware.duplex_bytes_per_s, 2),
        ),
        setup,
    )


def _with_one_more_ssd(hardware: HardwareProfile, ssd: SsdProfile) -> HardwareProfile:
    """What was measured for all drives at once is taken to grow with their number."""
    factor = 1 + 1 / len(hardware.ssd)
    return replace(
        hardware,
        ssd=(*hardware.ssd, ssd),
        ssd_together_read_bytes_per_s=_times(hardware.ssd_together_read_bytes_per_s, factor),
        ssd_together_write_bytes_per_s=_times(hardware.ssd_together_write_bytes_per_s, factor),
        ssd_mixed_bytes_per_s=_times(hardware.ssd_mixed_bytes_per_s, factor),
    )


def _times(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate * factor


def _plus(limit: int | None, more: int) -> int | None:
    return None if limit is None else limit + more


@dataclass(frozen=True, slots=True)
class DriveLife:
    """How long the drive that wears out first lasts, if training never stops."""

    steps: float
    days: float


def drive_life(hardware: HardwareProfile, prediction: StepPrediction) -> DriveLife | None:
    """None if no drive says what it endures, or nothing is written. A store is striped in proportion to capacity."""
    written_bytes = prediction.ssd_write_bytes_per_step
    capacity_bytes = hardware.ssd_capacity_bytes
    steps = [
        ssd.endurance_bytes / (written_bytes * ssd.capacity_bytes / capacity_bytes)
        for ssd in hardware.ssd
        if ssd.endurance_bytes and written_bytes
    ]
    return DriveLife(min(steps), min(steps) * prediction.step_s / DAY_S) if steps else None

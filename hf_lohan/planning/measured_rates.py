"""Corrects the hardware profile with measurements of a run's own steps: the bytes and busy seconds of each lane while
all lanes work."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

from hf_lohan.costs import COMPUTING_RATES, HardwareProfile, forecast, with_changed
from hf_lohan.costs.hardware_profile import Profile
from hf_lohan.costs.step.step_costs import ssd_s
from hf_lohan.planning.step_plan import PlannedStep
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, CPU_OPTIMIZER, D2H, H2D, SSD_READ, SSD_WRITE, Timeline

_MOST_SPREAD = 1.5
"""Steps of one kind differ by at most this factor. A longer step included an evaluation or a checkpoint."""
GOOD_ENOUGH = 0.05
"""A rate or a prediction with a smaller relative error is not corrected."""
_WAITS_WITHIN_COMPUTE = ("a gradient buffer", "activations", "activations to leave")
"""Waits of the launching thread between the begin and the end of a block's work."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Busy seconds and moved bytes of the lanes, in one step or in all steps so far."""

    step_s: float
    compute_s: float
    """Seconds of the device, including waits within a block's work."""
    waits_s: float
    """Seconds in which the launching thread waited within a block's work. The device may have computed meanwhile."""
    drives_s: float = 0.0
    """Seconds in which a drive read or wrote."""
    read_bytes: float = 0.0
    written_bytes: float = 0.0
    optimizer_s: float = 0.0
    h2d_s: float = 0.0
    h2d_bytes: float = 0.0
    d2h_s: float = 0.0
    d2h_bytes: float = 0.0

    @classmethod
    def so_far(cls, timeline: Timeline) -> StepTimes:
        totals = timeline.totals()
        return cls(
            step_s=time.perf_counter(),
            compute_s=totals[COMPUTE].busy_s,
            waits_s=sum(totals[COMPUTE_WAITS].task_s.get(name, 0.0) for name in _WAITS_WITHIN_COMPUTE),
            drives_s=timeline.drives_busy_s,
            read_bytes=totals[SSD_READ].num_bytes,
            written_bytes=totals[SSD_WRITE].num_bytes,
            optimizer_s=totals[CPU_OPTIMIZER].busy_s,
            h2d_s=totals[H2D].busy_s,
            h2d_bytes=totals[H2D].num_bytes,
            d2h_s=totals[D2H].busy_s,
            d2h_bytes=totals[D2H].num_bytes,
        )

    def since(self, before: StepTimes) -> StepTimes:
        return StepTimes(*(getattr(self, name) - getattr(before, name) for name in _NAMES))

    @property
    def least_compute_s(self) -> float:
        """A lower bound of the seconds in which the device computed. The upper bound is `compute_s`."""
        return max(0.0, self.compute_s - self.waits_s)


_NAMES = [field.name for field in fields(StepTimes)]


def usual_step(steps: Sequence[StepTimes]) -> StepTimes:
    """Return the mean of the steps. If a step took much longer because of other work, return the shortest step."""
    shortest = min(steps, key=lambda step: step.step_s)
    if max(step.step_s for step in steps) > _MOST_SPREAD * shortest.step_s:
        return shortest
    return StepTimes(*(statistics.mean(getattr(step, name) for step in steps) for name in _NAMES))


def corrected_hardware(planned: PlannedStep, measured: StepTimes) -> HardwareProfile:
    """Return the hardware with the rates of a measured step; the same object if the profile was close enough. A step's
    time shows the rate of one resource, but the choice of a plan depends on several, so each is corrected separately.
    Drives are corrected by the bytes that they moved. Other resources are corrected by their predicted seconds, unless
    they share cores with the device. The remaining error is attributed to the step's bottleneck."""
    hardware = _as_seen(planned, measured)
    expected = forecast(planned.profile, hardware, planned.setup, planned.plan)
    factor = measured.step_s / expected.step_s
    return slowed(hardware, expected.bottleneck, factor) if _is_off(factor) else hardware


def _as_seen(planned: PlannedStep, measured: StepTimes) -> HardwareProfile:
    seen = hardware = planned.hardware
    forward, backward = planned.plan.prediction.forward, planned.plan.prediction.backward
    drives_s = float(ssd_s(hardware, measured.read_bytes, measured.written_bytes))
    compute_s = forward.compute_s + backward.compute_s
    seen_compute_s = min(max(compute_s, measured.least_compute_s), measured.compute_s)
    corrections = (
        (drives_slower, measured.drives_s, drives_s),
        (computing_slower, seen_compute_s, compute_s),
        (optimizer_slower, measured.optimizer_s, forward.optimizer_s + backward.optimizer_s),
    )
    for slower, seconds, expected_s in corrections[:1] if hardware.device.shares_cpu else corrections:
        if expected_s and seconds and _is_off(seconds / expected_s):
            seen = slower(seen, seconds / expected_s)
    if hardware.device.shares_cpu:
        return seen
    if planned.setup.cluster.transport == "nccl":  # a lane of a link also has exchanges, over another link
        return seen
    for num_bytes, busy_s, name in (
        (measured.h2d_bytes, measured.h2d_s, "h2d_bytes_per_s"),
        (measured.d2h_bytes, measured.d2h_s, "d2h_bytes_per_s"),
    ):
        factor = busy_s * getattr(hardware, name) / num_bytes if num_bytes else 0.0
        if factor and _is_off(factor):
            seen = _slower(seen, factor, name)
    return seen


@dataclass(frozen=True, slots=True)
class MeasuredComputing:
    """Rates of computing as they were measured, before steps corrected them."""

    num_tokens: int
    """Tokens of the batch whose shapes were measured."""
    hardware: HardwareProfile

    def of_now(self, hardware: HardwareProfile) -> HardwareProfile:
        """Return ``hardware`` with these rates. On shared cores steps correct the optimizer by the same factor, so it
        has its measured rate too."""
        device, cpu = self.hardware.device, hardware.cpu
        rates = {name: getattr(device, name) for name in COMPUTING_RATES}
        if device.shares_cpu:
            cpu = replace(cpu, optimizer_params_per_s=self.hardware.cpu.optimizer_params_per_s)
        return replace(hardware, device=replace(hardware.device, **rates), cpu=cpu)


def fixed_s(planned: PlannedStep, hardware: HardwareProfile) -> float:
    """Return the seconds by which a micro-batch takes longer than its work on ``hardware``. Starting kernels, hooks and
    Python take this time in a batch of any length."""
    expected = forecast(planned.profile, hardware, planned.setup, planned.plan)
    num_runs = planned.shape.num_micro_batches * planned.shape.num_together
    return max(0.0, planned.plan.prediction.step_s - expected.step_s) / num_runs


def _is_off(factor: float) -> bool:
    return abs(factor - 1) >= GOOD_ENOUGH


def slowed(hardware: HardwareProfile, bottleneck: str, factor: float) -> HardwareProfile:
    """Return the hardware with its bottleneck slower by ``factor``."""
    match bottleneck:
        case "ssd":
            return drives_slower(hardware, factor)
        case "h2d" | "d2h" | "link":
            return _slower(hardware, factor, "h2d_bytes_per_s", "d2h_bytes_per_s", "duplex_bytes_per_s")
        case "gpu_link":
            return replace(hardware, gpu_link_bytes_per_s=hardware.between_gpus_bytes_per_s / factor)
        case "cpu":
            return optimizer_slower(hardware, factor)
    slower = computing_slower(hardware, factor)
    return optimizer_slower(slower, factor) if hardware.device.shares_cpu else slower


def drives_slower(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    return replace(
        _slower(hardware, factor, "ssd_mixed_bytes_per_s"),
        ssd=tuple(_slower(ssd, factor, "read_bytes_per_s", "write_bytes_per_s") for ssd in hardware.ssd),
        ssd_together_read_bytes_per_s=hardware.ssd_read_bytes_per_s / factor,
        ssd_together_write_bytes_per_s=hardware.ssd_write_bytes_per_s / factor,
    )


def computing_slower(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """Return the hardware with a device that is slower by ``factor``, or faster if ``factor`` is below 1."""
    return replace(hardware, device=_slower(hardware.device, factor, *COMPUTING_RATES))


def optimizer_slower(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    return replace(hardware, cpu=_slower(hardware.cpu, factor, "optimizer_params_per_s"))


def _slower(profile: Profile, factor: float, *names: str) -> Profile:
    return with_changed(profile, lambda rate: rate / factor, *names)

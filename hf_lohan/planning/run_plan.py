"""The plan of a run: made when its first batch comes, corrected once by what its first steps took."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from hf_lohan.compat.torch_private import without_hooks, without_torch_function
from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device
from hf_lohan.hardware import MeasuringEffort, cached_hardware, has_cached_hardware
from hf_lohan.model import TracedModel
from hf_lohan.planner import Durability, HardwareProfile, OffloadPlan, plan_offload, with_changed
from hf_lohan.planning.layout import OffloadLayout
from hf_lohan.planning.step_plan import PlannedStep, StepShape, plan_again, plan_step
from hf_lohan.threads import usable_cpus
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, Timeline
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

NUM_STEPS_BEFORE = 2
"""Steps that are not timed: the first meets cold caches, the second has the first's updates beside it."""
NUM_STEPS_TIMED = 2
_MOST_SPREAD = 1.5
"""Of steps of a kind. In what took longer there was an evaluation or a checkpoint."""
_GOOD_ENOUGH = 0.05
"""A prediction that is off by less is left alone."""
_WORTH_MEASURING_S = 60.0
"""Measuring unknown hardware well takes a few seconds; for a run that is over sooner it is measured roughly."""
_UNKNOWN_NUM_STEPS = 60
"""Of a run of which nobody says how long it is."""
_SLOW_CORE_FLOPS_PER_S = 20e9
_SLOW_ACCELERATOR_FLOPS_PER_S = 20e12
_SLOW_DRIVE_BYTES_PER_S = 1e9
_STEP_BYTES_PER_PARAM = 26
_QUICK = MeasuringEffort(budget_s=0.3, scratch_bytes=16 << 20)


_WAITS_WITHIN_COMPUTE = ("a gradient buffer", "activations", "activations to leave")
"""Of the thread that gives the device its work, between the begin and the end of what a block computes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What a step took, or what steps took so far."""

    step_s: float
    compute_s: float
    """Of the device, with what it had to wait for within a block's work."""
    waits_s: float
    """How long who gives it that work waited meanwhile: the device may have worked on, or not."""

    @classmethod
    def so_far(cls, timeline: Timeline) -> StepTimes:
        totals = timeline.totals()
        waits_s = sum(totals[COMPUTE_WAITS].task_s.get(name, 0.0) for name in _WAITS_WITHIN_COMPUTE)
        return cls(time.perf_counter(), totals[COMPUTE].busy_s, waits_s)

    def since(self, before: StepTimes) -> StepTimes:
        return StepTimes(
            self.step_s - before.step_s, self.compute_s - before.compute_s, self.waits_s - before.waits_s
        )

    @property
    def least_compute_s(self) -> float:
        """The device computed at least so long, and at most `compute_s`."""
        return max(0.0, self.compute_s - self.waits_s)


class RunPlan:
    """Plans one run, and keeps what was planned.

    The engine asks at the first forward and after each step; whoever drives the steps says how many come.
    """

    def __init__(
        self, model: nn.Module, layout: OffloadLayout, config: OffloadConfig, device: Device, durability: Durability
    ) -> None:
        self.first: PlannedStep | None = None
        self.now: PlannedStep | None = None
        """What the run follows; its hardware is scaled to what steps took."""
        self.num_steps: int | None = None
        self.num_micro_batches = 1
        self._model = model
        self._layout = layout
        self._config = config
        self._device = device
        self._durability = durability
        self._steps: list[StepTimes] = []
        self._before: StepTimes | None = None

    def begin(self, *, num_steps: int | None, num_micro_batches: int = 1) -> None:
        self.num_steps = num_steps
        self.num_micro_batches = num_micro_batches

    @property
    def plan(self) -> OffloadPlan | None:
        """What the run follows."""
        return self.now.plan if self.now is not None else None

    # Called by the engine.

    def make(self, shape: StepShape, *, may_run_together: bool = False) -> PlannedStep | None:
        """Plan for batches as this one, when nothing else runs: what does would make the hardware look slow. What goes
        wrong here costs the plan, not the run. ``may_run_together``: see `plan_step`."""
        try:
            with hooks_taken_off(self._model), torch.random.fork_rng(devices=()):
                self.now = plan_step(
                    self._model,
                    self._layout,
                    self._config,
                    shape,
                    measure=self._measured,
                    durability=self._durability,
                    device=self._device.torch_device,
                    may_run_together=may_run_together,
                )
        except Exception as error:  # a model that cannot be traced, a drive that cannot be measured
            logger.warning("this run is not planned, its activations are recomputed: %s", error)
            return None
        self.first = self.first or self.now
        self._layout = self.now.layout  # its memory is taken once
        if self.now.plan.refusal is not None:
            logger.warning("by its plan this run does not fit: %s", self.now.plan.refusal)
        self._announce("planned")
        return self.now

    def step_began(self, clip_rate: float) -> PlannedStep | None:
        """Time the step before. Once enough of them were timed: plan anew by what they took, and return that."""
        now = StepTimes.so_far(self._device.timeline)
        if self._before is not None:
            self._steps.append(now.since(self._before))
        self._before = now
        if self.now is None or len(self._steps) != NUM_STEPS_BEFORE - 1 + NUM_STEPS_TIMED:
            return None
        return self._correct(usual_step(self._steps[NUM_STEPS_BEFORE - 1 :]), clip_rate)

    def _correct(self, measured: StepTimes, clip_rate: float) -> PlannedStep | None:
        """Scale compute, and then what bounds the step, to what was measured, and plan once more."""
        assert self.now is not None
        corrected = corrected_hardware(self.now, measured)
        if corrected is self.now.hardware and clip_rate == self.now.setup.clip_rate:
            return None
        self.now = plan_again(self.now, corrected, clip_rate)
        self._announce(f"a step took {measured.step_s:.3g} s, so it was planned again")
        return self.now

    def _measured(self, traced: TracedModel, shape: StepShape) -> HardwareProfile:
        asked: dict[str, Any] = {"matrix_shapes": traced.matrix_shapes, "dtype": self._layout.master.working_dtype}
        is_quick = self._is_short(traced, shape) and not has_cached_hardware(self._config, self._device, **asked)
        return cached_hardware(self._config, self._device, **asked, effort=_QUICK if is_quick else None)

    def _is_short(self, traced: TracedModel, shape: StepShape) -> bool:
        """Whether to measure the hardware well would take a good part of the run, even if the hardware is slow."""
        is_cpu = self._device.memory_is_host
        flops_per_s = usable_cpus() * _SLOW_CORE_FLOPS_PER_S if is_cpu else _SLOW_ACCELERATOR_FLOPS_PER_S
        num_runs = shape.num_micro_batches * shape.num_together
        compute_s = 3 * num_runs * traced.profile.flops / flops_per_s
        drive_s = _STEP_BYTES_PER_PARAM * traced.profile.num_trainable_params / _SLOW_DRIVE_BYTES_PER_S
        return max(compute_s, drive_s) * (self.num_steps or _UNKNOWN_NUM_STEPS) < _WORTH_MEASURING_S

    def _announce(self, why: str) -> None:
        assert self.now is not None
        step = self.now.plan.prediction
        bytes_moved = format_bytes(step.swapped_bytes), format_bytes(step.spilled_bytes)
        if self.now.plan.other_order_step_s is not None:
            runs_together = self.now.shape.num_together > 1
            order, other = ("together", "one after the other") if runs_together else ("one after the other", "together")
            why = f"{why}, its micro-batches {order} ({other}: {self.now.plan.other_order_step_s:.3g} s)"
        message = "%s: %.3g s a step, bound by %s; %s of activations swapped, %s of them to the SSD"
        logger.info(message, why, step.step_s, step.bottleneck, *bytes_moved)


def usual_step(steps: Sequence[StepTimes]) -> StepTimes:
    """The mean; if one took much longer than another there was something beside it, and the shortest counts."""
    shortest = min(steps, key=lambda step: step.step_s)
    if max(step.step_s for step in steps) > _MOST_SPREAD * shortest.step_s:
        return shortest
    return StepTimes(
        *(statistics.mean(getattr(step, name) for step in steps) for name in ("step_s", "compute_s", "waits_s"))
    )


def corrected_hardware(planned: PlannedStep, measured: StepTimes) -> HardwareProfile:
    """The hardware as a step shows it; the same object if it was near enough.

    A step that is bound by the drives says nothing of compute by its length, and whether updates run under the forward
    or the backward depends on both. On a device of its own compute can be seen: there it is corrected first.
    """
    hardware, predicted = planned.hardware, planned.plan.prediction
    predicted_compute_s = predicted.forward.compute_s + predicted.backward.compute_s
    if predicted_compute_s and not hardware.device.shares_cpu:
        compute_s = min(max(predicted_compute_s, measured.least_compute_s), measured.compute_s)
        if compute_s and abs(compute_s / predicted_compute_s - 1) >= _GOOD_ENOUGH:
            hardware = computing_slower(hardware, compute_s / predicted_compute_s)
            as_it_runs = replace(planned.setup, clip=planned.plan.clip)
            predicted = plan_offload(planned.profile, hardware, as_it_runs).prediction
    factor = measured.step_s / predicted.step_s
    return hardware if abs(factor - 1) < _GOOD_ENOUGH else slowed(hardware, predicted.bottleneck, factor)


def computing_slower(hardware: HardwareProfile, factor: float) -> HardwareProfile:
    """The hardware with a device that is slower by ``factor``, or faster."""
    rates = ("flops_per_s", "memory_bytes_per_s")
    return replace(hardware, device=with_changed(hardware.device, lambda rate: rate / factor, *rates))


def slowed(hardware: HardwareProfile, bottleneck: str, factor: float) -> HardwareProfile:
    """The hardware with what bounds the step slower by ``factor``."""

    def divided(rate: float) -> float:
        return rate / factor

    if bottleneck == "ssd":
        return replace(
            with_changed(hardware, divided, "ssd_mixed_bytes_per_s"),
            ssd=tuple(with_changed(ssd, divided, "read_bytes_per_s", "write_bytes_per_s") for ssd in hardware.ssd),
            ssd_together_read_bytes_per_s=hardware.ssd_read_bytes_per_s / factor,
            ssd_together_write_bytes_per_s=hardware.ssd_write_bytes_per_s / factor,
        )
    return replace(
        computing_slower(hardware, factor), cpu=with_changed(hardware.cpu, divided, "optimizer_params_per_s")
    )


@contextlib.contextmanager
def hooks_taken_off(model: nn.Module) -> Iterator[None]:
    """The model as it is without its hooks and without recomputation, for a look at its forward."""
    recomputing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in recomputing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        with without_hooks(model), without_torch_function():  # weights that are not there have a shape
            yield
    finally:
        for module in recomputing:
            module.gradient_checkpointing = True  # type: ignore[assignment]

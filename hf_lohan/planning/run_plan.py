"""The plan of a run: made when its first batch comes, and once more with the rates that its first steps had."""

from __future__ import annotations

import contextlib
import json
import logging
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

from hf_lohan.compat.torch_private import without_hooks, without_torch_function
from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device
from hf_lohan.hardware import MeasuringEffort, cached_hardware, has_cached_hardware
from hf_lohan.planner import (
    MOST_WRONG_GUESSES,
    Collectives,
    Durability,
    HardwareProfile,
    ModelProfile,
    OffloadPlan,
    forecast,
    scaled_to,
)
from hf_lohan.planning.layout import OffloadLayout
from hf_lohan.planning.measured_rates import StepTimes, corrected_hardware, usual_step
from hf_lohan.planning.shared_machine import measure_network
from hf_lohan.planning.step_plan import PlannedStep, StepShape, plan_again, plan_step
from hf_lohan.planning.tracing import TracedModel
from hf_lohan.ranks import Links, one_rank_at_a_time
from hf_lohan.threads import usable_cpus
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

NUM_STEPS_BEFORE = 2
"""Steps that are not timed: the first meets cold caches, the second has the first's updates beside it."""
NUM_STEPS_TIMED = 2
NUM_STEPS_TRIED = 3
"""By another plan, behind one that is not timed."""
_WORTH_TRYING = 0.97
"""Of a step by the plan that is followed."""
_WORTH_MEASURING_S = 60.0
"""Measuring unknown hardware well takes a few seconds; for a run that is over sooner it is measured roughly."""
_UNKNOWN_NUM_STEPS = 60
"""Of a run of which nobody says how long it is."""
_SLOW_CORE_FLOPS_PER_S = 20e9
_SLOW_ACCELERATOR_FLOPS_PER_S = 20e12
_SLOW_DRIVE_BYTES_PER_S = 1e9
_STEP_BYTES_PER_PARAM = 26
_QUICK = MeasuringEffort(budget_s=0.3, scratch_bytes=16 << 20)


class RunPlan:
    """Plans one run, and keeps what was planned.

    The engine asks at the first forward and after each step; whoever drives the steps says how many come.
    """

    def __init__(
        self,
        model: nn.Module,
        layout: OffloadLayout,
        config: OffloadConfig,
        device: Device,
        durability: Durability,
        links: Links | None = None,
    ) -> None:
        self.first: PlannedStep | None = None
        self.now: PlannedStep | None = None
        """What the run follows; its hardware is what steps have found."""
        self.num_steps: int | None = None
        self.num_micro_batches = 1
        self._model = model
        self._layout = layout
        self._config = config
        self._device = device
        self._durability = durability
        self._links = links or Links.alone()
        self._net_bytes_per_s: float | None = None
        self._steps: list[StepTimes] = []
        self._before: StepTimes | None = None
        self._tried_after: PlannedStep | None = None
        """What was followed before the plan that is tried now."""
        self._num_before_trial = 0
        self._routing: Mapping[str, Sequence[int]] = {}
        """By layer, how many tokens went to each of its experts in the steps that were timed."""

    def begin(self, *, num_steps: int | None, num_micro_batches: int = 1) -> None:
        self.num_steps = num_steps
        self.num_micro_batches = num_micro_batches

    @property
    def plan(self) -> OffloadPlan | None:
        """What the run follows."""
        return self.now.plan if self.now is not None else None

    # Called by the engine.

    def make(
        self, shape: StepShape, layout: OffloadLayout | None = None, *, may_run_together: bool = False
    ) -> PlannedStep | None:
        """Plan a step of batches like this one. Called while nothing else runs, which would make the hardware look
        slow, and by all ranks together. An error here costs the plan, not the run. ``layout``: the memory as the run
        has taken it so far. ``may_run_together``: see `plan_step`."""
        self._layout = layout or self._layout
        self._net_bytes_per_s = self._net_bytes_per_s or measure_network(self._links)
        # The ranks of a node measure the same drives and cores.
        with one_rank_at_a_time(self._links, "the plan"):
            planned = self._try_to_plan(shape, may_run_together)
        if self._layout.collectives is None:
            planned = self._with_common_way(planned, shape, may_run_together)
        if planned is None:
            return None
        self.now = planned
        self.first = self.first or self.now
        self._tried_after = None
        self._layout = self.now.layout  # its memory is taken once
        if self.now.plan.refusal is not None:
            logger.warning("by its plan this run does not fit: %s", self.now.plan.refusal)
        self._announce("planned")
        return self.now

    def _with_common_way(
        self, planned: PlannedStep | None, shape: StepShape, may_run_together: bool
    ) -> PlannedStep | None:
        """Have all ranks exchange weights and gradients in one way: the one that rank 0's plan chose, or the default
        if a rank has no plan."""
        if len(self._layout.open_ways) == 1:
            return planned
        chosen = "" if planned is None else json.dumps(asdict(planned.setup.cluster.collectives))
        answers = [answer.decode() for answer in self._links.all_gather("the way to exchange weights", chosen.encode())]
        common = Collectives(**json.loads(answers[0])) if all(answers) else self._layout.decided().collectives
        assert common is not None
        if planned is None or planned.setup.cluster.collectives == common:
            return planned
        return self._try_to_plan(shape, may_run_together, ways=(common,))

    def _try_to_plan(
        self, shape: StepShape, may_run_together: bool, ways: Sequence[Collectives] | None = None
    ) -> PlannedStep | None:
        try:
            with hooks_taken_off(self._model), torch.random.fork_rng(devices=()):
                return plan_step(
                    self._model,
                    self._layout,
                    self._config,
                    shape,
                    measure=self._measured,
                    durability=self._durability,
                    device=self._device.torch_device,
                    may_run_together=may_run_together,
                    routing=self._routing,
                    ways=ways,
                )
        except Exception as error:  # a model that cannot be traced, a drive that cannot be measured
            logger.warning("this run is not planned, its activations are recomputed: %s", error)
            return None

    def step_began(self, clip_rate: float, routing: Mapping[str, Sequence[int]] | None = None) -> PlannedStep | None:
        """Time the step before. Once enough of them were timed: plan anew by what they took and by the experts that
        tokens went to (``routing``: by layer, how many to each), and return that. A plan with other placements or
        another way to clip is tried; if its steps are longer, return the one before."""
        now = StepTimes.so_far(self._device.timeline)
        if self._before is not None:
            self._steps.append(now.since(self._before))
        self._before = now
        if self.now is None:
            return None
        if len(self._steps) == NUM_STEPS_BEFORE - 1 + NUM_STEPS_TIMED:
            return self._correct(self.now, usual_step(self._steps[-NUM_STEPS_TIMED:]), clip_rate, routing or {})
        if self._tried_after is not None and len(self._steps) == self._num_before_trial + 1 + NUM_STEPS_TRIED:
            tried_s = statistics.median(step.step_s for step in self._steps[-NUM_STEPS_TRIED:])
            return self._judge(self.now, self._tried_after, tried_s)
        if self._tried_after is None and clip_rate == 0 < self.now.setup.clip_rate:
            # It was planned for steps that clip. None of the last ones did.
            return self._correct(self.now, usual_step(self._steps[-NUM_STEPS_TIMED:]), clip_rate, routing or {})
        return None

    def _correct(
        self, now: PlannedStep, measured: StepTimes, clip_rate: float, routing: Mapping[str, Sequence[int]]
    ) -> PlannedStep | None:
        """Plan once more with the rates that the run has measured."""
        self._routing = _of_layers(now.profile, routing)
        now = replace(now, profile=now.profile.routed(self._routing))
        if now.setup.clip == "auto" and clip_rate > MOST_WRONG_GUESSES:
            now = replace(now, plan=replace(now.plan, clip="defer"))  # so did the steps that were timed
        hardware = corrected_hardware(now, measured)
        if hardware is now.hardware and clip_rate == now.setup.clip_rate and not self._routing:
            return None
        again = plan_again(now, hardware, clip_rate)
        stays = _as_long_as_found(replace(again, plan=now.plan), measured.step_s)
        is_other = (again.plan.activations, again.plan.clip) != (stays.plan.activations, stays.plan.clip)
        if is_other and again.plan.prediction.step_s < _WORTH_TRYING * measured.step_s:
            self._tried_after, self._num_before_trial, self.now = stays, len(self._steps), again
            self._announce(f"a step took {measured.step_s:.3g} s, so another plan is tried")
            return again
        if again.plan.clip == stays.plan.clip:
            stays = _committed_every(stays, again.plan.commit_every_steps)
        self.now = stays
        self._announce(f"a step took {measured.step_s:.3g} s, so it was planned again")
        return stays

    def _judge(self, tried: PlannedStep, before: PlannedStep, tried_s: float) -> PlannedStep | None:
        """Keep what is faster by measurement."""
        self._tried_after = None
        before_s = before.plan.prediction.step_s
        if tried_s <= before_s:
            self.now = _as_long_as_found(tried, tried_s)
            return None
        logger.info(
            "steps by the second plan took %.3g s, longer than %.3g s by the first: back to that", tried_s, before_s
        )
        self.now = before
        return before

    def _measured(self, traced: TracedModel, shape: StepShape) -> HardwareProfile:
        asked: dict[str, Any] = {"matrix_shapes": traced.matrix_shapes, "dtype": self._layout.master.working_dtype}
        is_quick = self._is_short(traced, shape) and not has_cached_hardware(self._config, self._device, **asked)
        hardware = cached_hardware(self._config, self._device, **asked, effort=_QUICK if is_quick else None)
        hardware = replace(hardware, net_bytes_per_s=self._net_bytes_per_s)
        if self._device.memory_is_host:
            return hardware
        # The slots are there already, and the plan counts them.
        slots_bytes = self._layout.plan.gpu_pool_bytes - self._layout.plan.whole_device_bytes
        device = replace(hardware.device, memory_bytes=hardware.device.memory_bytes + slots_bytes)
        return replace(hardware, device=device)

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


def _of_layers(profile: ModelProfile, routing: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Of the layers that are planned with experts one by one."""
    planned = {block.name: block.experts.num_experts for block in profile.blocks if block.experts is not None}
    return {name: counts for name, counts in routing.items() if planned.get(name) == len(counts)}


def _as_long_as_found(planned: PlannedStep, step_s: float) -> PlannedStep:
    """With what its plan is expected to take on its hardware, and its step as long as it was found to be."""
    expected = forecast(planned.profile, planned.hardware, planned.setup, planned.plan)
    return replace(planned, plan=replace(planned.plan, prediction=scaled_to(expected, step_s)))


def _committed_every(planned: PlannedStep, num_steps: int) -> PlannedStep:
    """The same plan with commits at another interval, and its step longer or shorter by what that makes of it."""
    plan = replace(planned.plan, commit_every_steps=num_steps)
    before_s, after_s = (
        forecast(planned.profile, planned.hardware, planned.setup, one).step_s for one in (planned.plan, plan)
    )
    return _as_long_as_found(replace(planned, plan=plan), planned.plan.prediction.step_s * after_s / before_s)


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

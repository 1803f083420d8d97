"""The plan of a run: made when its first batch was seen, corrected once by what its first steps took."""

from __future__ import annotations

import contextlib
import logging
import statistics
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import replace

from torch import nn

from hf_lohan.activations import LayerTrace
from hf_lohan.compat.torch_private import without_torch_function
from hf_lohan.config import OffloadConfig, format_bytes
from hf_lohan.engine import StepsSoFar, Tiers
from hf_lohan.hardware import MeasuringEffort, cached_hardware, has_cached_hardware
from hf_lohan.model import OffloadLayout, TracedModel
from hf_lohan.planner import (
    ActivationPlacements,
    HardwareProfile,
    ModelProfile,
    OffloadPlan,
    StepPrediction,
    TrainingSetup,
    plan_offload,
)
from hf_lohan.planning.step_floor import floor_by_resource_s
from hf_lohan.planning.traced_blocks import trace_blocks
from hf_lohan.planning.training_setup import training_setup

logger = logging.getLogger(__name__)

NUM_STEPS_BEFORE = 2
"""Steps that are not timed: the first traces and recomputes all, the second is the first to follow the plan."""
NUM_STEPS_TIMED = 2
_MOST_SPREAD = 1.5
"""Of steps of a kind. In what took longer there was an evaluation or a checkpoint."""
_GOOD_ENOUGH = 0.05
"""A prediction that is off by less is left alone."""
_WORTH_MEASURING_S = 60.0
"""Measuring unknown hardware well takes a few seconds; for a run that is over sooner it is measured roughly."""
_QUICK_S = 0.3
_QUICK_SCRATCH_BYTES = 16 << 20


class RunPlan:
    """Asks the planner for an engine's run, and keeps its predictions."""

    def __init__(self, model: nn.Module, layout: OffloadLayout, tiers: Tiers, config: OffloadConfig) -> None:
        self.plan: OffloadPlan | None = None
        """What the run follows, or would under `activations: auto`."""
        self.first_prediction: StepPrediction | None = None
        """Before anything of a real step was timed but its shapes."""
        self.measured_hardware: HardwareProfile | None = None
        """What the first prediction is of: `hardware` is scaled to what steps took."""
        self.floor_by_resource_s: dict[str, float] = {}
        """How long each resource alone would be busy with the planned step."""
        self.num_steps: int | None = None
        """That the run will take; None if nobody knows."""
        self.num_micro_batches = 1
        """That move weights of their own."""
        self._offloaded, self._layout, self._tiers, self._config = model, layout, tiers, config
        self._clip_rate = 0.0
        self.model: ModelProfile | None = None
        self.hardware: HardwareProfile | None = None
        self._began_s = time.perf_counter()
        self._step_s: list[float] = []
        self._ended_s: float | None = None

    def begin(self, *, num_steps: int) -> None:
        """Training begins now, and will take so many steps."""
        self.num_steps = num_steps
        self._began_s = time.perf_counter()

    # `EngineEvents`.

    def make(self, trace: Mapping[str, LayerTrace], num_together: int) -> ActivationPlacements:
        """Plan for batches as the first one. What goes wrong here costs the plan, not the run."""
        is_short = self._is_short()
        if is_short and self._config.activations != "auto":
            return {}  # nobody needs a plan, and to predict the step would take longer than the step
        try:
            self._make(trace, num_together, is_short)
        except Exception as error:  # a model that cannot be traced, a drive that cannot be measured
            logger.warning("this run is not planned, its activations are recomputed: %s", error)
            return {}
        return self._placements()

    def _make(self, trace: Mapping[str, LayerTrace], num_together: int, is_short: bool) -> None:
        first = next(iter(trace.values()))
        batch_size, sequence_length = first.input_shape[:2]
        traced = self._trace(batch_size, sequence_length)
        self.hardware = self._measured(traced, is_short)
        if num_together > 1:
            # What moves and what waits for backward is as with one micro-batch of their size together.
            self.model = self._trace(num_together * batch_size, sequence_length).profile
        else:
            self.num_micro_batches, self.model = first.num_runs, traced.profile
        setup = self.setup()
        self.plan = plan_offload(self.model, self.hardware, setup)
        self.first_prediction, self.measured_hardware = self.plan.prediction, self.hardware
        self.floor_by_resource_s = floor_by_resource_s(self.model, self.hardware, setup, self.first_prediction)
        for warning in self.plan.warnings:
            logger.warning("%s", warning)
        self._announce("planned")

    def _trace(self, batch_size: int, sequence_length: int) -> TracedModel:
        with hooks_taken_off(self._offloaded):
            return trace_blocks(
                self._offloaded,
                batch_size=batch_size,
                sequence_length=sequence_length,
                device=self._tiers.device.torch_device,
            )

    def _measured(self, traced: TracedModel, is_short: bool) -> HardwareProfile:
        config, device = self._config, self._tiers.device
        dtype = self._layout.master.working_dtype
        shapes = traced.matrix_shapes
        if is_short and not has_cached_hardware(config, device, matrix_shapes=shapes, dtype=dtype):
            effort = MeasuringEffort(budget_s=_QUICK_S, scratch_bytes=_QUICK_SCRATCH_BYTES)
            return cached_hardware(config, device, matrix_shapes=shapes, dtype=dtype, effort=effort)
        return cached_hardware(config, device, matrix_shapes=shapes, dtype=dtype)

    def _is_short(self) -> bool:
        """Whether to measure the hardware well would take a good part of the run."""
        first_step_s = time.perf_counter() - self._began_s
        if self.num_steps is None:
            return first_step_s < 1.0
        return first_step_s * self.num_steps < _WORTH_MEASURING_S

    def setup(self) -> TrainingSetup:
        """The engine's budgets and ways, as the planner wants them."""
        return training_setup(
            self._config,
            self._layout,
            clip=self._config.clip if self._layout.holds_gradients else "none",
            durability=self._tiers.store.durability,
            clip_rate=self._clip_rate,
            num_micro_batches=self.num_micro_batches,
        )

    def step_began(self, steps: StepsSoFar) -> ActivationPlacements | None:
        """Time the step before; once enough of them were timed, correct the plan by what they took."""
        self._clip_rate = steps.clip_rate
        now_s = time.perf_counter()
        if self._ended_s is not None:
            self._step_s.append(now_s - self._ended_s)
        self._ended_s = now_s
        if len(self._step_s) == NUM_STEPS_BEFORE - 1 + NUM_STEPS_TIMED and self.plan is not None:
            timed_s = self._step_s[NUM_STEPS_BEFORE - 1 :]
            has_more_than_a_step = max(timed_s) > _MOST_SPREAD * min(timed_s)
            return self._correct(min(timed_s) if has_more_than_a_step else statistics.mean(timed_s))
        return None

    def _correct(self, measured_s: float) -> ActivationPlacements | None:
        """Scale what bounds the step to what was measured, and plan once more."""
        assert self.plan is not None and self.model is not None and self.hardware is not None
        predicted = self.plan.prediction
        factor = measured_s / predicted.step_s
        if abs(factor - 1) < _GOOD_ENOUGH:
            return None
        self.hardware = slowed(self.hardware, predicted.bottleneck, factor)
        self.plan = plan_offload(self.model, self.hardware, self.setup())
        self._announce(f"a step took {measured_s:.3g} s, so it was planned again")
        return self._placements()

    def _placements(self) -> ActivationPlacements:
        return self.plan.activations if self.plan is not None else {}

    def _announce(self, why: str) -> None:
        assert self.plan is not None
        prediction = self.plan.prediction
        logger.info(
            "%s: %.3g s a step, bound by %s; %s of activations swapped, %s of them to the SSD",
            why,
            prediction.step_s,
            prediction.bottleneck,
            format_bytes(int(prediction.swapped_bytes)),
            format_bytes(int(prediction.spilled_bytes)),
        )


def slowed(hardware: HardwareProfile, bottleneck: str, factor: float) -> HardwareProfile:
    """The hardware with what bounds the step slower by ``factor``."""
    if bottleneck == "ssd":
        return replace(
            hardware,
            ssd=tuple(
                replace(
                    ssd,
                    read_bytes_per_s=ssd.read_bytes_per_s / factor,
                    write_bytes_per_s=ssd.write_bytes_per_s / factor,
                )
                for ssd in hardware.ssd
            ),
            ssd_together_read_bytes_per_s=hardware.ssd_read_bytes_per_s / factor,
            ssd_together_write_bytes_per_s=hardware.ssd_write_bytes_per_s / factor,
            ssd_mixed_bytes_per_s=_divided(hardware.ssd_mixed_bytes_per_s, factor),
        )
    device = hardware.device
    return replace(
        hardware,
        device=replace(
            device,
            flops_per_s=device.flops_per_s / factor,
            memory_bytes_per_s=_divided(device.memory_bytes_per_s, factor),
        ),
        cpu=replace(hardware.cpu, optimizer_params_per_s=hardware.cpu.optimizer_params_per_s / factor),
    )


def _divided(rate: float | None, factor: float) -> float | None:
    return None if rate is None else rate / factor


@contextlib.contextmanager
def hooks_taken_off(model: nn.Module) -> Iterator[None]:
    """The model as it is without its hooks and without recomputation, for a look at its forward."""
    before = {
        module: (module._forward_hooks, module._forward_pre_hooks, getattr(module, "gradient_checkpointing", None))
        for module in model.modules()
    }
    for module, (_, _, recomputes) in before.items():
        module._forward_hooks, module._forward_pre_hooks = OrderedDict(), OrderedDict()
        if recomputes is not None:
            module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        with without_torch_function():  # weights that are not there have a shape
            yield
    finally:
        for module, (after, ahead, recomputes) in before.items():
            module._forward_hooks, module._forward_pre_hooks = after, ahead
            if recomputes is not None:
                module.gradient_checkpointing = recomputes

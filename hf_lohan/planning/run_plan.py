"""Plans a run at its first batch, and again with the rates of its first steps."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any, Literal
from uuid import uuid4

from torch import nn

from hf_lohan.activations.chunked_layers import ChunkedLayers
from hf_lohan.compat.torch_private import without_hooks, without_torch_function
from hf_lohan.config import AUTO, ResolvedConfig
from hf_lohan.costs import (
    MOST_WRONG_GUESSES,
    BudgetError,
    Collectives,
    Durability,
    Fusion,
    HardwareProfile,
    InMemoryFit,
    ModelProfile,
    OffloadPlan,
    forecast,
    scaled_to,
    stock_training_fit,
)
from hf_lohan.device import Device
from hf_lohan.files.durable_file import read_whole, replace_durably
from hf_lohan.hardware import MeasuringEffort, cached_hardware, has_cached_hardware, measure_computing, with_gpu_link
from hf_lohan.model import WrittenWeightError
from hf_lohan.planning.layout import OffloadLayout
from hf_lohan.planning.measured_rates import MeasuredComputing, StepTimes, corrected_hardware, fixed_s, usual_step
from hf_lohan.planning.shared_machine import measure_network
from hf_lohan.planning.step_plan import PlannedStep, StepShape, plan_again, plan_step
from hf_lohan.planning.tracing import TracedModel
from hf_lohan.planning.tracing.traced_blocks import trace_blocks
from hf_lohan.ranks import Links, one_rank_at_a_time
from hf_lohan.threads import usable_cpus
from hf_lohan.wording import format_bytes

logger = logging.getLogger(__name__)

CHUNK_TOKENS = "chunk_tokens"
"""Name of a run's chunks in the facts of a commit."""
CHUNKS_NAME = "chunk_tokens.json"
"""The store's file with the number of tokens in a chunk that a run has decided. A run that continues from an earlier
commit reads it."""
RUN_ID = "run_id"
"""Name of the run's id in these facts. A run that continues another has the same id."""
FUSED = "fused"
"""Name of `RunPlan.fused` in these facts."""
NUM_STEPS_BEFORE = 2
"""Number of steps that are not timed. The first has cold caches, and its updates run during the second."""
NUM_STEPS_TIMED = 2
NUM_STEPS_TRIED = 3
"""Number of timed steps of a plan on trial. The step before these is not timed."""
_WORTH_TRYING = 0.97
"""Another plan is tried if its step takes less than this share of the current plan's step."""
_WORTH_MEASURING_S = 60.0
"""Measuring hardware well takes a few seconds. For a run that is shorter than this, hardware is measured roughly."""
_UNKNOWN_NUM_STEPS = 60
"""Number of steps that is assumed for a run of unknown length."""
_SLOW_CORE_FLOPS_PER_S = 20e9
_SLOW_ACCELERATOR_FLOPS_PER_S = 20e12
_SLOW_DRIVE_BYTES_PER_S = 1e9
_STEP_BYTES_PER_PARAM = 26
_MUCH_LONGER = 2
"""Rates of computing are measured again for a batch with at least this multiple of the measured batch's tokens."""
_QUICK = MeasuringEffort(budget_s=0.3, scratch_bytes=16 << 20)
_MEASURING_AGAIN = MeasuringEffort(budget_s=2.0)
"""In the middle of a run only the device is measured, which takes a third of this."""


class RunPlan:
    """Plans one run and keeps its plan. The engine asks for a plan at the first forward and after each step."""

    def __init__(
        self,
        model: nn.Module,
        layout: OffloadLayout,
        config: ResolvedConfig,
        device: Device,
        durability: Durability,
        links: Links | None = None,
        *,
        moves_files: bool = False,
    ) -> None:
        """``moves_files``: whether weights and swapped activations bypass host memory between SSDs and device."""
        self._moves_files = moves_files
        self.first: PlannedStep | None = None
        self.now: PlannedStep | None = None
        """The plan in use, with the hardware corrected by the steps."""
        self.num_steps: int | None = None
        self.num_micro_batches = 1
        self._model = model
        self._layout = layout
        self._config = config
        self._device = device
        self._durability = durability
        self._links = links or Links.alone()
        self.fused: Fusion | None = None
        """How the run's layers fuse the operations between products."""
        self._fused_before: Fusion | Literal["unknown"] | None = "unknown"
        """`fused` of the run that this run continues. Commits of earlier versions do not have it."""
        self.chunks: ChunkedLayers | None = None
        """The layers that may run in chunks. There may be none."""
        self.chunk_tokens: int | None = None
        """Number of tokens in a chunk of the run's layers, once it is decided. None while layers run whole."""
        self._chunks_file: str | None = None
        self._decided_before: int | None = None
        """Number of tokens in a chunk that this run decided after the commit from which it continues."""
        self._run_id: str | None = uuid4().hex
        """The run's id in its commits and checkpoints, and in ``file`` of `may_cut`."""
        self._net_bytes_per_s: float | None = None
        self._computing: MeasuredComputing | None = None
        """The rates of computing on which the plan in use is based."""
        self._of_longer: MeasuredComputing | None = None
        """The rates for a longer batch, while a plan for it is made."""
        self._steps: list[StepTimes] = []
        self._before: StepTimes | None = None
        self._tried_after: PlannedStep | None = None
        """The plan before the plan on trial; None if no plan is on trial."""
        self._num_before_trial = 0
        self._failure = ""
        """Why the last step could not be planned."""
        self._saved_share = 1.0
        """See `_StepPlanner`."""
        self._routing: Mapping[str, Sequence[int]] = {}
        """Number of tokens of each expert in the timed steps, by layer."""

    def begin_run(self, *, num_steps: int | None, num_micro_batches: int = 1) -> None:
        self.num_steps = num_steps
        self.num_micro_batches = num_micro_batches

    def may_cut(self, chunks: ChunkedLayers, file: str | None = None) -> None:
        """Run these layers in chunks if the setting says so, or else from the first batch on that does not fit.
        ``file`` keeps the decided number of tokens in a chunk until a commit has it."""
        self.chunks = chunks
        self._chunks_file = file
        setting = self._config.chunks.layers
        if isinstance(setting, int) and setting is not False:
            self.cut_layers(setting)

    def compile_layers(self) -> None:
        """Plan compiled layers, which are kept, swapped or recomputed whole, and are not cut into chunks."""
        self.chunks, self.fused = None, "compile"

    def cut_layers(self, chunk_tokens: int | None) -> None:
        """Run layers in chunks of this number of tokens from now on."""
        if self.chunks is not None:
            self.chunk_tokens = chunk_tokens
            self.chunks.cut(chunk_tokens)

    @property
    def facts(self) -> dict[str, Any]:
        """The facts of the plan in a commit or checkpoint."""
        return {CHUNK_TOKENS: self.chunk_tokens, RUN_ID: self._run_id, FUSED: self.fused}

    def resume(self, facts: Mapping[str, Any]) -> bool:
        """Continue with the chunks of the run whose commit or checkpoint has these ``facts``. If the run decided them
        after this commit, it decides the same number again. Returns whether the current plan is for other chunks."""
        self._run_id = facts.get(RUN_ID)
        self._fused_before = facts.get(FUSED, "unknown")
        if self.chunks is None or CHUNK_TOKENS not in facts:  # an earlier version made the commit
            return False
        before, setting = facts[CHUNK_TOKENS], self._config.chunks.layers
        if setting == "auto":
            planned = self.chunk_tokens
            self._decided_before = planned if before is None else before
            if self._decided_before is None and self._chunks_file is not None and os.path.exists(self._chunks_file):
                decided = json.loads(read_whole(self._chunks_file))
                if decided.get(RUN_ID) == self._run_id:  # the file of another run is not about this run
                    self._decided_before = int(decided[CHUNK_TOKENS])
            self.cut_layers(before)
            return bool(before != planned)
        if before != (setting or None):
            logger.warning(
                "this run has chunks.layers: %s and continues a run with %s, so it adds sums in a different order from "
                "here on; for the same bits set chunks.layers to auto",
                str(setting).lower(),
                "whole layers" if before is None else f"chunks of {before} tokens",
            )
        return False

    @property
    def plan(self) -> OffloadPlan | None:
        """The plan in use."""
        return self.now.plan if self.now is not None else None

    # Called by the engine.

    def plan_batches(
        self, shape: StepShape, layout: OffloadLayout | None = None, *, may_run_together: bool = False
    ) -> PlannedStep | None:
        """Plan a step with batches of this shape. All ranks call this together, while no other work makes the hardware
        look slow. The hardware is measured only for the first plan. After an error the run continues without a plan.
        ``layout``: the memory that the run has taken so far. ``may_run_together``: see `plan_step`. Raises BudgetError
        on all ranks if a step needs a plan, and a rank has no plan that fits. A step needs a plan if `device_memory`
        has a size, or if ranks share rows."""
        self._layout = layout or self._layout
        self._of_longer = None
        if self.first is None and self._fused_before not in ("unknown", self.fused):
            logger.warning(
                "this run continues a run %s compiled layers, so the last bits of its sums differ from here on; for "
                "the same bits set torch_compile as before",
                "with" if self._fused_before else "without",
            )
        self._net_bytes_per_s = self._net_bytes_per_s or measure_network(self._links)
        may_choose = self._layout.collectives is None and len(self._layout.open_ways) > 1
        ways = self._ways_that_fit_all_ranks() if may_choose else None
        # The ranks of a node would measure the same drives and cores.
        with one_rank_at_a_time(self._links, "the plan"):
            planned = self._try_to_plan(shape, may_run_together, ways)
        if may_choose:
            planned = self._with_common_way(planned, shape, may_run_together)
        self._refuse_what_does_not_fit(planned)
        planned = self._with_common_chunks(planned, shape, may_run_together)
        self._refuse_what_does_not_fit(planned)
        if planned is None:
            return None
        self.now = planned
        self.first = self.first or self.now
        self._computing = self._of_longer or self._computing
        self._tried_after = None
        self._steps, self._before = [], None  # steps with shorter batches do not show these rates
        self._layout = self.now.layout  # the memory is taken only once
        if self.now.plan.refusal is not None:
            logger.warning("the plan says that this run does not fit: %s", self.now.plan.refusal)
        self._announce("planned")
        if unreached := _layers_without_text(self.now.profile):
            logger.info(
                "the plan counts only text: it has neither time nor memory for the %d layers that other inputs reach "
                "(such as %s), whose activations are recomputed",
                len(unreached),
                unreached[0],
            )
        return self.now

    def _refuse_what_does_not_fit(self, planned: PlannedStep | None) -> None:
        if self._needs_plan is None:
            return
        own: str | None = self._failure
        if planned is not None:
            is_refused = self._config.device_memory != AUTO or planned.lacks_ram
            own = planned.plan.refusal if is_refused else None
        problems = [text.decode() for text in self._links.all_gather("whether the step fits", (own or "").encode())]
        for rank, problem in enumerate(problems):
            if problem:
                where = f"on rank {rank}, " if len(problems) > 1 else ""
                raise BudgetError(f"{where}{problem}")

    @property
    def _needs_plan(self) -> str | None:
        """A sentence that says why a step needs a plan, and how to do without a plan. None if a step needs no plan."""
        if self._config.device_memory != AUTO:
            also = ", and leave ranks.per_row out" if self._config.ranks.per_row > 1 else ""
            return "device_memory has a size, but this step cannot be planned: {}; set it to auto" + also
        if self._config.ranks.per_row > 1:
            return "ranks.per_row shares RAM according to the plan, but this step cannot be planned: {}; leave it out"
        return None

    def _ways_that_fit_all_ranks(self) -> list[Collectives] | None:
        """Return the ways to exchange weights and gradients that fit every rank's RAM. Return None if all ranks have
        RAM for the same ways, or if no way fits all ranks."""
        open_ways = self._layout.open_ways
        fitting = [index for index, way in enumerate(open_ways) if self._layout.has_ram_for(way)]
        answers = self._links.all_gather("the ways to exchange weights that fit", json.dumps(fitting).encode())
        sets = [set(json.loads(answer.decode())) for answer in answers]
        common = set.intersection(*sets)
        if not common or all(indices == common for indices in sets):
            return None
        return [open_ways[index] for index in sorted(common)]

    def _with_common_way(
        self, planned: PlannedStep | None, shape: StepShape, may_run_together: bool
    ) -> PlannedStep | None:
        """Make all ranks use rank 0's way to exchange weights and gradients. If one rank has no plan, all drop their
        plans and use the default way."""
        chosen = "" if planned is None else json.dumps(asdict(planned.setup.cluster.collectives))
        answers = [answer.decode() for answer in self._links.all_gather("the way to exchange weights", chosen.encode())]
        if planned is None or not all(answers):
            return None
        common = Collectives(**json.loads(answers[0]))
        if planned.setup.cluster.collectives != common:
            planned = self._try_to_plan(shape, may_run_together, ways=(common,))
        has_plan = self._links.all_gather("planned", b"" if planned is None else b"1")
        return planned if all(has_plan) else None

    def _with_common_chunks(
        self, planned: PlannedStep | None, shape: StepShape, may_run_together: bool
    ) -> PlannedStep | None:
        """Decide the number of tokens in a chunk if the plan needs chunks. All ranks take the smallest number."""
        if self.chunks is None or self._config.chunks.layers != "auto" or self.chunk_tokens is not None:
            return planned
        own = None if planned is None else planned.plan.chunk_tokens
        answer = json.dumps([own, self._decided_before]).encode()
        answers = [json.loads(answer) for answer in self._links.all_gather("the tokens of a chunk", answer)]
        numbers = [number for number, _ in answers if number is not None]
        before = [number for _, number in answers if number is not None]
        if not numbers:
            return planned
        number = min(before or numbers)
        if self._chunks_file is not None:
            replace_durably(self._chunks_file, json.dumps({CHUNK_TOKENS: number, RUN_ID: self._run_id}).encode())
        self.cut_layers(number)
        logger.info("layers run in chunks of %d tokens, because a batch does not fit the device whole", number)
        if planned is not None and own != self.chunk_tokens:
            ways = None if planned.layout.collectives is None else (planned.layout.collectives,)
            planned = self._try_to_plan(shape, may_run_together, ways) or planned
        return planned

    def _try_to_plan(
        self, shape: StepShape, may_run_together: bool, ways: Sequence[Collectives] | None = None
    ) -> PlannedStep | None:
        now, computing = self.now, self._computing
        try:
            with hooks_taken_off(self._model):
                planned = plan_step(
                    self._model,
                    self._layout,
                    self._config,
                    shape,
                    measure=partial(self._hardware_for, now),
                    durability=self._durability,
                    device=self._device.torch_device,
                    may_run_together=may_run_together,
                    routing=self._routing,
                    ways=ways,
                    chunks=self.chunks,
                    chunk_tokens=self.chunk_tokens,
                    fused=self.fused,
                    saved_share=self._saved_share,
                )
            if now is None or computing is None:
                return planned
            hardware = now.hardware if self._of_longer is None else computing.of_now(now.hardware)
            lost_s = shape.num_micro_batches * shape.num_together * fixed_s(now, hardware)
            return _scaled_to_measured(planned, planned.plan.prediction.step_s + lost_s) if lost_s else planned
        except WrittenWeightError:
            raise
        except Exception as error:  # the model may not be traceable, or a drive not measurable
            self._failure = (self._needs_plan or "{}").format(error)
            what = "this run has no plan, and recomputes its activations"
            logger.warning("%s: %s", what if now is None else "the old plan stays: the new batch has none", error)
            return None

    def step_began(
        self,
        clip_rate: float,
        routing: Mapping[str, Sequence[int]] | None = None,
        *,
        is_as_planned: bool = True,
        saved_share: float = 1.0,
    ) -> PlannedStep | None:
        """Time the previous step. After enough steps, plan again with the measured rates and ``routing`` (by layer, the
        number of tokens of each expert), and return the new plan. A plan with other placements or another clipping mode
        is on trial first. If its steps are longer, return the previous plan. ``is_as_planned``: whether the previous
        step had batches of the planned length, so that its time counts. ``saved_share``: the bytes that compiled layers
        saved in it, in units of the planned bytes."""
        now = StepTimes.so_far(self._device.timeline)
        if self._before is not None and is_as_planned:
            self._steps.append(now.since(self._before))
        self._before = now
        if self.now is None or not is_as_planned:
            return None
        are_timed = len(self._steps) == NUM_STEPS_BEFORE - 1 + NUM_STEPS_TIMED
        if self._tried_after is not None and len(self._steps) == self._num_before_trial + 1 + NUM_STEPS_TRIED:
            tried_s = statistics.median(step.step_s for step in self._steps[-NUM_STEPS_TRIED:])
            return self._judge(self.now, self._tried_after, tried_s)
        # The plan may expect steps that clip, although none of the last steps clipped.
        if are_timed or (self._tried_after is None and clip_rate == 0 < self.now.setup.clip_rate):
            return self._correct(
                self.now, usual_step(self._steps[-NUM_STEPS_TIMED:]), clip_rate, routing or {}, saved_share
            )
        return None

    def _correct(
        self,
        now: PlannedStep,
        measured: StepTimes,
        clip_rate: float,
        routing: Mapping[str, Sequence[int]],
        saved_share: float,
    ) -> PlannedStep | None:
        """Plan again with the rates and bytes that the run has measured."""
        self._routing = _of_layers(now.profile, routing)
        self._saved_share *= saved_share
        now = replace(now, profile=now.profile.routed(self._routing).with_graphs_saving(saved_share))
        if now.setup.clip == "auto" and clip_rate > MOST_WRONG_GUESSES:
            now = replace(now, plan=replace(now.plan, clip="defer"))  # as in the timed steps
        hardware = corrected_hardware(now, measured)
        if hardware is now.hardware and clip_rate == now.setup.clip_rate and not self._routing and saved_share == 1.0:
            return None
        again = plan_again(now, hardware, clip_rate)
        stays = _scaled_to_measured(replace(again, plan=now.plan), measured.step_s)
        is_other = _decisions(again.plan) != _decisions(stays.plan)
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
        """Keep the plan whose measured steps are shorter."""
        self._tried_after = None
        before_s = before.plan.prediction.step_s
        if tried_s <= before_s:
            self.now = _scaled_to_measured(tried, tried_s)
            return None
        logger.info(
            "steps of the second plan took %.3g s, and steps of the first plan %.3g s, so the first plan is used again",
            tried_s,
            before_s,
        )
        self.now = before
        return before

    def _hardware_for(self, now: PlannedStep | None, traced: TracedModel, shape: StepShape) -> HardwareProfile:
        """Return the hardware for batches of this shape. It is measured if no plan exists ``now``. Steps correct the
        rates of computing by a factor, which includes the fixed costs of short steps. So these rates are measured again
        for batches that are much longer."""
        num_tokens, before = shape.batch_size * shape.sequence_length, self._computing
        if now is None or before is None:
            hardware = self._measured(traced, shape)
            self._computing = MeasuredComputing(num_tokens, hardware)
            return hardware
        if num_tokens >= _MUCH_LONGER * before.num_tokens and self._of_longer is None:
            uncorrected = before.of_now(now.hardware)
            try:
                longer = measure_computing(
                    uncorrected, self._config, self._device, **self._asked(traced), effort=_MEASURING_AGAIN
                )
            except (RuntimeError, ValueError) as error:  # out of memory, or no products
                logger.warning("the device cannot be measured again for longer batches: %s", error)
                return now.hardware
            self._of_longer = MeasuredComputing(num_tokens, longer)
        return now.hardware if self._of_longer is None else self._of_longer.hardware

    def _asked(self, traced: TracedModel) -> dict[str, Any]:
        return {
            "matrix_shapes": traced.matrix_shapes,
            "attention": traced.attention,
            "dtype": self._layout.master.working_dtype,
        }

    def _measured(self, traced: TracedModel, shape: StepShape) -> HardwareProfile:
        asked = self._asked(traced)
        is_quick = self._is_short(traced, shape) and not has_cached_hardware(self._config, self._device, **asked)
        hardware = cached_hardware(self._config, self._device, **asked, effort=_QUICK if is_quick else None)
        hardware = replace(
            hardware,
            net_bytes_per_s=self._net_bytes_per_s,
            device=replace(hardware.device, moves_files=self._moves_files),
        )
        if self._device.memory_is_host:
            return hardware
        if self._config.ranks.transport == "nccl":
            hardware = with_gpu_link(hardware)
        # The slots are allocated already, and the plan counts them.
        slots_bytes = self._layout.plan.gpu_pool_bytes - self._layout.plan.whole_device_bytes
        device = replace(hardware.device, memory_bytes=hardware.device.memory_bytes + slots_bytes)
        return replace(hardware, device=device)

    def _is_short(self, traced: TracedModel, shape: StepShape) -> bool:
        """Return whether the run is so short that measuring the hardware well would take a large part of it, even on
        slow hardware."""
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


def _layers_without_text(profile: ModelProfile) -> list[str]:
    """Return the layers that a batch of token ids alone does not reach, such as layers of a vision tower."""
    return [layer.name for layer in profile.layers if not layer.flops]


def _decisions(plan: OffloadPlan) -> tuple[object, ...]:
    return plan.activations, plan.clip, plan.parked_share, plan.fetch_ahead, plan.layers_leaving


def _of_layers(profile: ModelProfile, routing: Mapping[str, Sequence[int]]) -> dict[str, Sequence[int]]:
    """Return the counts of layers whose experts are planned one by one."""
    planned = {block.name: block.experts.num_experts for block in profile.blocks if block.experts is not None}
    return {name: counts for name, counts in routing.items() if planned.get(name) == len(counts)}


def _scaled_to_measured(planned: PlannedStep, step_s: float) -> PlannedStep:
    """Return the step with its plan's prediction scaled to the measured ``step_s`` seconds."""
    expected = forecast(planned.profile, planned.hardware, planned.setup, planned.plan)
    return replace(planned, plan=replace(planned.plan, prediction=scaled_to(expected, step_s)))


def _committed_every(planned: PlannedStep, num_steps: int) -> PlannedStep:
    """Return the same plan with another commit interval, and its step time scaled by the predicted change."""
    plan = replace(planned.plan, commit_every_steps=num_steps)
    before_s, after_s = (
        forecast(planned.profile, planned.hardware, planned.setup, one).step_s for one in (planned.plan, plan)
    )
    return _scaled_to_measured(replace(planned, plan=plan), planned.plan.prediction.step_s * after_s / before_s)


def stock_fit(
    model: nn.Module,
    device: Device,
    shape: StepShape,
    *,
    memory_bytes: int,
    bytes_per_param: float,
    recomputes: bool,
    has_text_alone: bool = True,
) -> InMemoryFit:
    """Return whether the stock Trainer's step with ``model`` fits `memory_bytes` of ``device``. Raises ValueError if
    the model cannot be traced, or if it has layers for inputs other than text and not ``has_text_alone``."""
    with hooks_taken_off(model):
        traced = trace_blocks(
            model, batch_size=shape.batch_size, sequence_length=shape.sequence_length, device=device.torch_device
        )
    if not has_text_alone and (unreached := _layers_without_text(traced.profile)):
        raise ValueError(
            f"a plan counts only text, and batches may have inputs for {len(unreached)} further layers of "
            f"{type(model).__name__} (such as {unreached[0]})"
        )
    return stock_training_fit(
        traced.profile, memory_bytes, bytes_per_param, recomputes=recomputes, has_allocator=not device.memory_is_host
    )


@contextlib.contextmanager
def hooks_taken_off(model: nn.Module) -> Iterator[None]:
    """Remove the model's hooks and its recomputation in this context, to trace its forward."""
    recomputing = [module for module in model.modules() if getattr(module, "gradient_checkpointing", False)]
    for module in recomputing:
        module.gradient_checkpointing = False  # type: ignore[assignment]
    try:
        with without_hooks(model), without_torch_function():  # absent weights still have shapes
            yield
    finally:
        for module in recomputing:
            module.gradient_checkpointing = True  # type: ignore[assignment]

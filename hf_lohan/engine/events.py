"""Callbacks from an engine to the training loop, which passes them when it makes the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hf_lohan.costs import BudgetError
from hf_lohan.engine.commits import CommitInterval, StepCommits
from hf_lohan.engine.planned_memory import HEADROOM, PlannedMemory
from hf_lohan.model import Block
from hf_lohan.planning import OffloadLayout, PlannedStep, StepShape
from hf_lohan.updates import ClipHistory, GradientPipeline, StepTransaction

logger = logging.getLogger(__name__)

PassName: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """Statistics of the steps so far."""

    clip_rate: float
    """Fraction of the last steps that clipped."""
    is_as_planned: bool = True
    """Whether the last step had batches of about the planned length. If lengths vary, only such steps are timed."""
    routing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Number of tokens of each expert, by name of the layer, if experts stream one by one."""
    saved_share: float = 1.0
    """The bytes that compiled layers saved, in units of the planned bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEvents:
    """Callbacks that run on the computing thread. An exception ends the forward that made the call."""

    is_final_backward: Callable[[], bool] = lambda: True
    """Returns whether the backward in progress is the step's last."""
    plan: Callable[[StepShape, OffloadLayout], PlannedStep | None] = lambda _shape, _layout: None
    """Returns the plan to follow from now on. None means no plan, so that activations are recomputed. The layout is the
    present division of memory. Called at the beginning of the first training forward. Called again when more
    micro-batches than before run together."""
    plan_order: Callable[[StepShape, OffloadLayout], PlannedStep | None] = lambda _shape, _layout: None
    """Same as `plan`, for a step whose micro-batches may run one by one or together. Called before the first forward.
    The returned plan is for the faster order, which is in `PlannedStep.shape`."""
    step_began: Callable[[StepsSoFar], PlannedStep | None] = lambda _steps: None
    """Returns another plan to follow, or None to keep the plan. Called at the beginning of the first training forward
    after a step, where an error loses no step."""
    block_began: Callable[[PassName, Block], None] = lambda _phase, _block: None
    """Called when a pass reaches a block, maybe on a thread of autograd. Must return quickly."""


class FollowedPlan:
    """Requests plans from the training loop, and applies them to memory, commits and clipping."""

    def __init__(
        self,
        events: EngineEvents,
        planned_memory: PlannedMemory,
        pipeline: GradientPipeline,
        step: StepTransaction,
        clip_history: ClipHistory,
        commits: StepCommits,
        routing: Callable[[], Mapping[str, Sequence[int]]],
        *,
        longest_of_ranks: Callable[[StepShape | None, bool], StepShape | None] = lambda shape, _begins_step: shape,
        must_fit: bool = False,
        covers_all: bool = False,
    ) -> None:
        """``longest_of_ranks`` takes the shape of this rank's batch, and whether its forward begins a step. It returns
        a shape that covers the batches of all ranks, so that all ranks plan the same steps. ``covers_all``: each batch
        needs a plan that covers it. ``must_fit``: like ``covers_all``, because `device_memory` has a size that every
        step must fit."""
        self._events = events
        self.memory = planned_memory
        self._pipeline = pipeline
        self._step = step
        self._clip_history = clip_history
        self._commits = commits
        self._routing = routing
        self._longest_of_ranks = longest_of_ranks
        self._must_fit = must_fit
        self._covers_all = covers_all or must_fit
        self._is_first_forward = True
        """Whether the next training forward is the first of a step."""
        self._has_no_gradients = True
        """Whether the present training forward began in a step without gradients."""
        self._needs_plan = True
        """Whether the next training forward needs a plan."""
        self._planned_tokens = 0
        """Tokens of the batch for which the plan was made."""
        self._planned_length = 0
        """Length of the rows of the batch for which the plan was made."""
        self._has_warned_of_evaluation = False
        self._step_tokens = 0
        """Tokens of the step's longest batch so far."""
        self._has_longer_batches = False
        """Whether a batch was longer than the first batch and needed another plan."""
        self._step_has_ended = False
        """Whether a step has ended since the last training forward."""

    def end_step(self) -> None:
        """Record that a step has ended."""
        self._step_has_ended = self._is_first_forward = True

    def begin_step(self) -> None:
        """Begin a training forward, which may be the first of a step."""
        if self._step_has_ended:
            self._step_has_ended = False
            self.memory.begin_step()
            self._follow(self._events.step_began(self._steps_so_far()))
            self._step_tokens = 0
        if self._is_first_forward:
            self._is_first_forward = False
            self._commits.begin_step()
        self._has_no_gradients = not self._pipeline.has_gradients

    def ask_again(self) -> None:
        """Ask for a plan at the next training forward."""
        self._needs_plan = True

    def run_together(self, num_micro_batches: int) -> None:
        """Expect this many micro-batches whose forwards all run before the first backward."""
        self._needs_plan |= self.memory.expect_micro_batches(num_micro_batches)

    def choose_order(self, shape: StepShape) -> bool:
        """Plan a step with micro-batches of this shape. Returns whether they should run together."""
        self._pipeline.wait_for_updates()
        shape = self._longest_of_ranks(shape, False) or shape
        self._note_planned(shape)
        planned = self._events.plan_order(shape, self.memory.layout)
        self._needs_plan = False
        if planned is None:
            return False
        self.memory.expect_micro_batches(planned.shape.num_together)
        self._follow(planned)
        return planned.shape.num_together > 1

    def see_batch(self, shape: StepShape | None) -> None:
        """Begin a training forward. ``shape`` is None if the batch has no token ids. All ranks call this together.
        Raises BudgetError if `device_memory` has a size, and the step needs more."""
        self.memory.own_shape = shape
        shape = self._longest_of_ranks(shape, self._has_no_gradients)
        self._has_no_gradients = False  # micro-batches that run together begin one step
        self.memory.last_shape = shape
        if shape is not None:
            self._note_length(shape)
        elif self._must_fit:
            raise BudgetError(
                "device_memory has a size, but this batch has neither token ids nor embeddings from which its step "
                "could be planned; set device_memory to auto"
            )
        if self._needs_plan and shape is not None:
            self._needs_plan = False
            self._pipeline.wait_for_updates()  # running updates would slow down the hardware's measurement
            self._note_planned(shape)
            shape = replace(shape, num_together=self.memory.num_together)
            self._follow(self._events.plan(shape, self.memory.layout))
        self.memory.allocate_copies()

    def _note_planned(self, shape: StepShape) -> None:
        self._planned_tokens = shape.batch_size * shape.sequence_length
        self._planned_length = shape.sequence_length

    def _note_length(self, shape: StepShape) -> None:
        """Request another plan if a batch is much longer than planned, or longer at all with ``covers_all``."""
        num_tokens = shape.batch_size * shape.sequence_length
        self._step_tokens = max(self._step_tokens, num_tokens)
        is_longer = num_tokens > (1 if self._covers_all else HEADROOM) * self._planned_tokens
        is_longer |= self._covers_all and shape.sequence_length > self._planned_length
        if is_longer and self.memory.has_plan and not self._needs_plan:
            self._needs_plan = self._has_longer_batches = True

    def _steps_so_far(self) -> StepsSoFar:
        is_short = self._has_longer_batches and HEADROOM * self._step_tokens < self._planned_tokens
        return StepsSoFar(self._clip_history.clip_rate, not is_short, self._routing(), self.memory.saved_share)

    def begin_evaluation(self) -> None:
        """Begin a forward without gradients. Call this before the forward loads weights. Copies in RAM are filled only
        by reads that start after their allocation."""
        self.memory.allocate_copies()

    def see_evaluation(self, shape: StepShape | None) -> None:
        """Warn if a forward without gradients is longer than the planned batches."""
        num_tokens = shape.batch_size * shape.sequence_length if shape is not None else 0
        if self._must_fit and num_tokens > self._planned_tokens > 0 and not self._has_warned_of_evaluation:
            self._has_warned_of_evaluation = True
            logger.warning(
                "a forward without gradients has more tokens (%d) than the planned batches (%d), and only training "
                "steps are checked against device_memory",
                num_tokens,
                self._planned_tokens,
            )

    def _follow(self, planned: PlannedStep | None) -> None:
        if planned is not None:
            self.memory.follow_plan(planned)
            self._commits.follow_interval(_interval(planned))
            self._pipeline.park(planned.plan.parked_share)
            if planned.plan.clip != "none":
                self._step.clip_by(planned.plan.clip)


def _interval(planned: PlannedStep) -> CommitInterval:
    """Return how often steps are committed with the plan. If the user set a time, the number of steps has no effect."""
    setup = planned.setup
    return CommitInterval(0 if setup.commit_every_s else planned.plan.commit_every_steps, setup.commit_limit_s)

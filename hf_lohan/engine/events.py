"""Callbacks from an engine to the training loop, given when the engine is made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from hf_lohan.engine.commits import CommitInterval, StepCommits
from hf_lohan.engine.planned_memory import PlannedMemory
from hf_lohan.model import Block
from hf_lohan.planning import OffloadLayout, PlannedStep, StepShape
from hf_lohan.updates import ClipHistory, GradientPipeline, StepTransaction

PassName: TypeAlias = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True)
class StepsSoFar:
    """Statistics of the steps so far."""

    clip_rate: float
    """Fraction of the last steps that clipped."""
    routing: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Tokens of each expert, by name of a layer whose experts stream one by one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineEvents:
    """All are called on the computing thread. An exception ends the forward that made the call."""

    is_final_backward: Callable[[], bool] = lambda: True
    """Called in backward. Returns whether this is the step's last backward."""
    plan: Callable[[StepShape, OffloadLayout], PlannedStep | None] = lambda _shape, _layout: None
    """The first training forward begins, or the first with more micro-batches together than before. Returns the plan
    to follow from here on. None: there is no plan, so activations are recomputed. The layout divides the memory so
    far."""
    plan_order: Callable[[StepShape, OffloadLayout], PlannedStep | None] = lambda _shape, _layout: None
    """Like `plan`, for a step whose micro-batches may run one by one or together. Called before the first forward. The
    shape of the returned plan has the better order."""
    step_began: Callable[[StepsSoFar], PlannedStep | None] = lambda _steps: None
    """The first training forward after a step begins, so an error here harms no step. Returns another plan to follow,
    or None if nothing changes."""
    block_began: Callable[[PassName, Block], None] = lambda _phase, _block: None
    """A pass reaches a block. May be called on a thread of autograd. It must return quickly."""


class FollowedPlan:
    """Requests plans from the training loop, and makes memory, commits and clipping follow them."""

    def __init__(
        self,
        events: EngineEvents,
        planned_memory: PlannedMemory,
        pipeline: GradientPipeline,
        step: StepTransaction,
        clip_history: ClipHistory,
        commits: StepCommits,
        routing: Callable[[], Mapping[str, Sequence[int]]],
    ) -> None:
        self._events = events
        self.memory = planned_memory
        self._pipeline = pipeline
        self._step = step
        self._clip_history = clip_history
        self._commits = commits
        self._routing = routing
        self._is_first_forward = True
        """Whether the next training forward is a step's first."""
        self._needs_plan = True
        """Whether the next training forward needs a plan."""
        self._step_has_ended = False
        """Since the last training forward."""

    def end_step(self) -> None:
        """A step is over."""
        self._step_has_ended = self._is_first_forward = True

    def begin_step(self) -> None:
        """A training forward begins, maybe a step's first."""
        if self._step_has_ended:
            self._step_has_ended = False
            self.memory.begin_step()
            self._follow(self._events.step_began(StepsSoFar(self._clip_history.clip_rate, self._routing())))
        if self._is_first_forward:
            self._is_first_forward = False
            self._commits.begin_step()

    def run_together(self, num_micro_batches: int) -> None:
        """Expect this many micro-batches, all of whose forwards run before the first backward."""
        self._needs_plan |= self.memory.expect_micro_batches(num_micro_batches)

    def choose_order(self, shape: StepShape) -> bool:
        """Plan a step of micro-batches of this shape. Returns whether they are to run together."""
        self._pipeline.wait_for_updates()
        planned = self._events.plan_order(shape, self.memory.layout)
        self._needs_plan = False
        if planned is None:
            return False
        self.memory.expect_micro_batches(planned.shape.num_together)
        self._follow(planned)
        return planned.shape.num_together > 1

    def see_batch(self, shape: StepShape | None) -> None:
        """A training forward begins; its shape is known if its batch has token ids."""
        self.memory.last_shape = shape
        if self._needs_plan and shape is not None:
            self._needs_plan = False
            self._pipeline.wait_for_updates()  # what still runs would make the hardware look slow
            shape = replace(shape, num_together=self.memory.num_together)
            self._follow(self._events.plan(shape, self.memory.layout))
        self.memory.allocate_copies()

    def see_evaluation(self) -> None:
        """A forward without gradients begins."""
        self.memory.allocate_copies()

    def _follow(self, planned: PlannedStep | None) -> None:
        if planned is not None:
            self.memory.follow_plan(planned)
            self._commits.follow_interval(_interval(planned))
            if planned.plan.clip != "none":
                self._step.clip_by(planned.plan.clip)


def _interval(planned: PlannedStep) -> CommitInterval:
    """How often steps are committed under the plan. If the user set a time, only the clock counts."""
    setup = planned.setup
    return CommitInterval(0 if setup.commit_every_s else planned.plan.commit_every_steps, setup.commit_limit_s)

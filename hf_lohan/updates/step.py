"""One optimizer step: its gradient norm, its clipping, and whether it counts."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from hf_lohan.model import Block, ParamSlice
from hf_lohan.planner import MOST_WRONG_GUESSES
from hf_lohan.updates.gradients import NonFiniteGradientError
from hf_lohan.updates.missed_steps import GroupOf
from hf_lohan.updates.pipeline import GradientPipeline
from hf_lohan.updates.worker import Applied

WINDOW_STEPS = 16
"""What is older says little about the present clip rate."""

ClipWay = Literal["defer", "speculate"]


class ClipHistory:
    """How the next step clips, and what came of the last ones. Used by the computing thread."""

    def __init__(self, way: ClipWay, *, always: bool = False) -> None:
        """`always`: guess however often the norm clips. Else the first step waits for its norm, and so does each that
        comes behind steps of which more than `MOST_WRONG_GUESSES` clipped."""
        self.way: ClipWay = "speculate" if always else way
        """As planned; whether a step does guess: `speculates`."""
        self._always = always
        self._may_guess = True
        self._clipped: deque[bool] = deque(maxlen=WINDOW_STEPS)
        self.num_speculated = 0
        self.num_redone = 0

    @property
    def clip_rate(self) -> float:
        """Fraction of the last steps that clipped."""
        return sum(self._clipped) / len(self._clipped) if self._clipped else 0.0

    @property
    def speculates(self) -> bool:
        """Whether the next step guesses, if it can be undone."""
        return self.way == "speculate" and self._may_guess and (self._always or self._rarely_clips)

    @property
    def _rarely_clips(self) -> bool:
        return bool(self._clipped) and self.clip_rate <= MOST_WRONG_GUESSES

    def clip_by(self, way: ClipWay) -> None:
        """From the next step on."""
        self.way = way

    def never_speculate(self) -> None:
        """The loop does something between backward and step that has guesses taken back every time."""
        self._may_guess = False

    def note_step(self, applied: str | None, *, clipped: bool) -> None:
        """A step ended; `applied`: see `StepResult`."""
        self._clipped.append(clipped)
        self.num_speculated += applied in ("accepted", "redone")
        if applied == "redone":
            self.num_redone += 1
            if not clipped:
                self.never_speculate()  # the loop changes hyperparameters between backward and step


logger = logging.getLogger(__name__)

_SECOND_CLIP_RATIO = 1.01
"""A second clip changes nothing, however the first was rounded, if its `max_norm` is at least so many times larger."""
_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm; exactness means doing the same."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step."""

    changed: set[Block]
    """Blocks whose records are others than before."""
    applied: Applied | None
    """How; None if it was skipped."""
    clipped: bool
    not_finite: str | None = None
    """The parameter because of which it was skipped."""


class StepTransaction:
    """The step in progress, from its first gradient to the end of `finish`. It counts whole or not at all.

    Used by the computing thread, on which an interrupt may end any method: `recover` then starts clean.
    """

    def __init__(
        self,
        pipeline: GradientPipeline,
        clip_history: ClipHistory,
        blocks: Sequence[Block],
        *,
        forget_weights: Callable[[Iterable[Block]], None],
    ) -> None:
        """`forget_weights` is told of blocks whose weights on the device are not those of the store any more."""
        self._pipeline = pipeline
        self._norms = pipeline.norms
        self._clip_history = clip_history
        self._blocks = blocks
        self._forget_weights = forget_weights
        self._clip_coefficient = 1.0
        self._max_norm: float | None = None
        """What the step's gradients have been clipped to."""
        self._has_taken_gradients = False
        """Whether the last step took them, and zero_grad() was not called since: torch would still have them."""
        self._is_ending = False
        self._leaves_updates = False
        self.last: StepResult | None = None
        """What became of the last step."""
        pipeline.speculate(clip_history.speculates)

    @property
    def is_half_applied(self) -> bool:
        """Whether the store holds updates of a step that did not count, for good or for all that is known."""
        return self._is_ending or self._leaves_updates or self._pipeline.has_begun_updates

    def clip_by(self, way: ClipWay) -> None:
        """From the next step on, or from this one, if none of its gradients has come."""
        self._clip_history.clip_by(way)
        if not self._pipeline.has_gradients:
            self._pipeline.speculate(self._clip_history.speculates)

    def refuse_between_updates(self) -> None:
        """Raises RuntimeError if a part of the step's updates has run, so that no forward can follow."""
        if self._pipeline.has_begun_updates:
            raise RuntimeError(
                "the model was called between backward and step() of a step whose updates run in backward, so its "
                "weights are half old, half new; set max_grad_norm > 0 to keep gradients until step()"
            )

    def refuse_new_weight(self, part: ParamSlice) -> None:
        """Raises RuntimeError if the store holds a weight as it will be after the step, which is not finished."""
        if self._pipeline.has_begun_to_update(part):
            raise RuntimeError(
                f"{part.name} is needed once more in a step whose updates run in backward, and it is new already; read "
                "it behind step(), or set max_grad_norm > 0 to keep gradients until then"
            )

    @property
    def has_begun_updates(self) -> bool:
        """See `GradientPipeline.has_begun_updates`."""
        return self._pipeline.has_begun_updates

    def begin_backward(self) -> None:
        """Raises RuntimeError if torch would add the gradients to others: those of this step, which have been clipped,
        or those of the last step, which are gone."""
        if self._max_norm is not None:
            raise RuntimeError(
                f"backward() was called after clip_grad_norm_ to {self._max_norm:g} in the same step, so the gradients "
                "of both would be clipped together; clip once a step, after its last backward: under `if "
                "accelerator.sync_gradients:` where gradients are accumulated"
            )
        if self._has_taken_gradients:
            raise RuntimeError(
                "backward() was called after step() without zero_grad(): torch would add these gradients to those of "
                "the last step, which are gone; call optimizer.zero_grad() after each step()"
            )

    def undo_guesses(self) -> None:
        """The step needs its weights once more, as they were. As the next one will: none guesses any more."""
        if undone := self._pipeline.undo_guesses():
            self._clip_history.never_speculate()
            self._forget_weights(undone)

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the step's gradients so that their norm is at most `max_norm`. Returns the norm before.

        An infinite `max_norm` only measures. After a clip the norm is the product of what was measured and the clip's
        coefficient; gradients are not measured twice. Raises ValueError for another norm than the 2-norm, where the
        updates run in backward and cannot be scaled any more, and for a second clip that may scale, too; RuntimeError
        if the gradients went with the last step.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported under offload; use the 2-norm")
        if self._has_taken_gradients:
            raise RuntimeError(
                "clip_grad_norm_ was called after step(), which has taken the gradients; call it between backward() "
                "and step()"
            )
        clips = max_norm != float("inf")
        if clips and self._max_norm is not None and not max_norm >= self._max_norm * _SECOND_CLIP_RATIO:
            raise ValueError(
                f"the gradients of this step were clipped to {self._max_norm:g} before, and clipping them to "
                f"{max_norm:g} would scale them twice; call clip_grad_norm_ once a step, with the smallest max_norm"
            )
        self._pipeline.wait_for_norms()
        norm = self._norms.total()
        if self._max_norm is not None:
            return norm * self._clip_coefficient
        if not clips:
            return norm
        if not self._pipeline.holds_gradients:
            raise ValueError(
                f"clipping to {max_norm} was asked for, but the engine was prepared for max_grad_norm=0 and has "
                "applied the updates in backward already; set max_grad_norm before training starts"
            )
        self._max_norm = max_norm
        self._clip_coefficient = float(torch.clamp(max_norm / (norm + _CLIP_EPS), max=1.0))
        return norm

    def finish(self, group_of: GroupOf) -> StepResult:
        """Apply what waits, with this step's hyperparameters, and make the step count; unless a gradient is not
        finite: then undo what was applied and forget the rest. What was applied for good was finite. Raises
        RuntimeError if there are no gradients since the last step, and torch would apply those of that one again."""
        if self._has_taken_gradients:
            raise RuntimeError(
                "step() was called a second time with the same gradients, which the first one has taken; call it once "
                "for each backward(), or zero_grad() before it if nothing is to be applied"
            )
        has_gradients = self._pipeline.has_gradients
        self._is_ending = True
        self._pipeline.wait_for_norms()  # no gradient of this step may be on its way when its norms are forgotten
        if math.isfinite(self._norms.total()) or self._pipeline.is_past_undoing:
            changed, applied = self._pipeline.finish_step(self._clip_coefficient, group_of)
            result = StepResult(changed, applied, self._clip_coefficient != 1.0)
        else:
            not_finite = self._norms.first_not_finite() or "all parameters together"
            changed, _ = self._pipeline.abandon_step()
            result = StepResult(changed, None, clipped=False, not_finite=not_finite)
        self._begin_next()
        self._has_taken_gradients = has_gradients
        self._forget_weights(result.changed)
        self._clip_history.note_step(result.applied, clipped=result.clipped)
        self._pipeline.speculate(self._clip_history.speculates)
        self.last = result
        self._is_ending = self._leaves_updates = False
        return result

    def recover(self) -> None:
        """If an exception ended `finish`, or one of the methods here, abandon what is left of the step."""
        if self._is_ending:
            # The pipeline takes a step whole or not at all, but who knows how far we got in telling it.
            self._pipeline.settle()
            self._abandon()
            self._is_ending = True
            self._forget_weights(self._blocks)
            self._is_ending = False

    def abandon(self) -> None:
        """Forget its gradients, and undo its updates if the store can."""
        touched, remains = self._abandon()
        if remains:
            logger.warning("gradients were dropped after backward had updated %d blocks with them", len(touched))

    def abandon_broken(self) -> None:
        """Its backward ended with an exception."""
        touched, remains = self._abandon()
        logger.warning(
            "the last backward did not finish; its step's gradients are dropped%s",
            f", but {len(touched)} blocks had been updated in it already" if remains else "",
        )

    def _abandon(self) -> tuple[set[Block], bool]:
        """Returns the blocks that it had touched, and whether updates remain in them."""
        self._is_ending = True
        touched, remains = self._pipeline.abandon_step()
        self._begin_next()
        self._leaves_updates = self._leaves_updates or remains
        self._forget_weights(touched)
        self._is_ending = False
        return touched, remains

    def _begin_next(self) -> None:
        self._norms.clear()
        self._clip_coefficient, self._max_norm = 1.0, None
        self._has_taken_gradients = False


class SkippedSteps:
    """Counts steps whose gradients were not finite. Too many in a row end the run."""

    def __init__(self, max_in_a_row: int) -> None:
        self._max_in_a_row = max_in_a_row
        self._in_a_row = 0
        self.total = 0

    def note(self, result: StepResult) -> None:
        """A step has ended. Raises NonFiniteGradientError if it was skipped and that was one too many."""
        if result.not_finite is None:
            self._in_a_row = 0
            return
        self.total += 1
        self._in_a_row += 1
        name, in_a_row = result.not_finite, self._in_a_row
        logger.warning("skipped a step: the gradient of %s is not finite (%d in a row)", name, in_a_row)
        if in_a_row >= self._max_in_a_row:
            raise NonFiniteGradientError(
                f"the gradient of {name} is not finite, for the {in_a_row}. step in a row "
                f"(max_skipped_steps={self._max_in_a_row}); lower the learning rate or look at the data. The store "
                "holds the last good step"
            )

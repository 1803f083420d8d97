"""One optimizer step: its gradient norm, its clipping, and whether it counts."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.model import Block
from hf_lohan.updates.gradient_norms import GradientNorms
from hf_lohan.updates.gradient_pipeline import GradientPipeline
from hf_lohan.updates.param_groups import GroupOf
from hf_lohan.updates.step_gradients import Outcome

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm; exactness means doing the same."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """What became of a step."""

    changed: set[Block]
    """Blocks whose records are others than before."""
    outcome: Outcome | None
    """How it was applied; None if it was skipped."""
    clipped: bool
    not_finite: str | None = None
    """The parameter because of which it was skipped."""


class StepTransaction:
    """Collects what a step needs to know before its updates may count."""

    def __init__(self, pipeline: GradientPipeline, norms: GradientNorms) -> None:
        self._pipeline = pipeline
        self._norms = norms
        self._clip_coefficient = 1.0

    def clip(self, max_norm: float, norm_type: float = 2.0) -> Tensor:
        """Scale the step's gradients so that their norm is at most `max_norm`. Returns the norm before.

        An infinite `max_norm` only measures. Raises ValueError for another norm than the 2-norm, and where the
        updates run in backward and cannot be scaled any more.
        """
        if float(norm_type) != 2.0:
            raise ValueError(f"norm_type={norm_type} is not supported under offload; use the 2-norm")
        self._pipeline.measure()
        norm = self._norms.total()
        if max_norm == float("inf"):
            return norm
        if not self._pipeline.holds_gradients:
            raise ValueError(
                f"clipping to {max_norm} was asked for, but the engine was prepared for max_grad_norm=0 and has "
                "applied the updates in backward already; set max_grad_norm before training starts"
            )
        self._clip_coefficient = float(torch.clamp(max_norm / (norm + _CLIP_EPS), max=1.0))
        return norm

    def commit(self, group_of: GroupOf) -> StepResult:
        """Apply what waits, with this step's hyperparameters, and make the step count; unless a gradient is not
        finite: then undo what was applied and forget the rest. What was applied for good was finite."""
        self._pipeline.measure()  # no gradient of this step may be on its way when its norms are forgotten
        if not math.isfinite(self._norms.total()) and not self._pipeline.is_past_undoing:
            not_finite = self._norms.first_not_finite() or "all parameters together"
            changed, _ = self.drop()
            return StepResult(changed, None, clipped=False, not_finite=not_finite)
        clipped = self._clip_coefficient != 1.0
        finished = self._pipeline.finish_step(self._clip_coefficient, group_of)
        self._reset()
        return StepResult(finished.changed, finished.outcome, clipped)

    def drop(self) -> tuple[set[Block], bool]:
        """Forget the step's gradients and undo its updates if the store can. Returns the blocks that were touched, and
        whether updates remain in them."""
        dropped = self._pipeline.drop()
        self._reset()
        return dropped

    def _reset(self) -> None:
        self._norms.clear()
        self._clip_coefficient = 1.0

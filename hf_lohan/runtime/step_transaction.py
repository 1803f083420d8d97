"""One optimizer step: its gradient norm, its clipping, its commit."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hf_lohan.optim import AdamWGroup
from hf_lohan.runtime.block import Block, ParamSlice
from hf_lohan.runtime.gradient_norms import GradientNorms
from hf_lohan.runtime.gradient_pipeline import GradientPipeline

_CLIP_EPS = 1e-6
"""torch.nn.utils.clip_grad_norm_ adds this to the norm; exactness means doing the same."""


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

    def commit(self, group_of: Callable[[ParamSlice], AdamWGroup]) -> set[Block]:
        """Apply what waits, with this step's hyperparameters, and make the step count. Returns the changed blocks."""
        self._pipeline.measure()  # no gradient of this step may be on its way when its norms are forgotten
        changed = self._pipeline.finish_step(self._clip_coefficient, group_of)
        self._reset()
        return changed

    def drop(self) -> set[Block]:
        """Forget the step's gradients. Returns blocks that had been updated in backward, whose steps do count."""
        changed = self._pipeline.drop()
        self._reset()
        return changed

    def _reset(self) -> None:
        self._norms.clear()
        self._clip_coefficient = 1.0

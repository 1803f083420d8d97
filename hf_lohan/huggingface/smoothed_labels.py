"""Trainer's label smoothing where the loss takes the logits in chunks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from hf_lohan.huggingface.attachment import chunked_head_at
from hf_lohan.model import ChunkedHead

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into


class SmoothedLabels(_TrainerBase):
    """Mixed into a Trainer. Upstream takes the labels from the batch and smooths over all logits; here the model keeps
    them, and its own loss smooths chunk by chunk."""

    model: Any
    model_accepts_loss_kwargs: bool
    compute_loss_func: Any
    label_smoother: Any

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As upstream. Where the logits are taken in chunks, smoothed labels are, too."""
        head = self._head_that_smooths(inputs)
        if head is None:
            return super().compute_loss(model, inputs, *args, **kwargs)
        smoother, self.label_smoother = self.label_smoother, None
        try:
            with head.smoothing(smoother.epsilon):
                return super().compute_loss(model, inputs, *args, **kwargs)
        finally:
            self.label_smoother = smoother

    def _head_that_smooths(self, inputs: dict[str, Any]) -> ChunkedHead | None:
        """None where upstream smooths: logits that are small, evaluation, a loss or a smoother of somebody's own."""
        head = chunked_head_at(self.model)
        is_upstreams = type(self.label_smoother) is LabelSmoother and self.compute_loss_func is None
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        if head is None or not is_upstreams or not torch.is_grad_enabled() or ids is None or labels is None:
            return None
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        shifts = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # upstream's smoother, too
        return head if shifts and head.applies_to(ids.numel()) and self.model_accepts_loss_kwargs else None

"""Trainer's label smoothing where the loss takes the logits in chunks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.trainer_pt_utils import LabelSmoother

from hf_lohan.activations import ChunkedHead, Smoothing
from hf_lohan.huggingface.attachment import chunked_head_at
from hf_lohan.huggingface.guards import ids_within_vocabulary

if TYPE_CHECKING:
    from transformers import Trainer as _TrainerBase
else:
    _TrainerBase = object  # a mixin: `super()` is whatever Trainer it is mixed into


@dataclass
class ChunkedSmoother(LabelSmoother):
    """Upstream's. Where this thread's forward has smoothed its labels chunk by chunk, it gives that loss."""

    def __post_init__(self) -> None:
        self._here = threading.local()
        """Micro-batches have threads of their own, and share a Trainer."""

    @contextlib.contextmanager
    def by(self, smoothing: Smoothing) -> Iterator[None]:
        """Within, ``smoothing`` is that of this thread's forward."""
        self._here.smoothing = smoothing
        try:
            yield
        finally:
            self._here.smoothing = None

    def __call__(
        self, model_output: Any, labels: Tensor, shift_labels: bool = False, num_items_in_batch: Any = None
    ) -> Tensor:
        smoothing: Smoothing | None = getattr(self._here, "smoothing", None)
        if smoothing is not None and labels is smoothing.labels and shift_labels:
            return smoothing.loss(num_items_in_batch)
        whole: Tensor = super().__call__(model_output, labels, shift_labels, num_items_in_batch)
        return whole


class SmoothedLabels(_TrainerBase):
    """Mixed into a Trainer. Upstream calls the model without labels and smooths over all logits; here the model gets
    them all the same, and the cross entropy within its loss is smoothed chunk by chunk. What else a model adds to its
    loss (a router's, say) upstream's smoother leaves out, and so does this one."""

    model: Any
    compute_loss_func: Any
    label_smoother: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if type(self.label_smoother) is LabelSmoother:
            self.label_smoother = ChunkedSmoother(self.label_smoother.epsilon, self.label_smoother.ignore_index)

    def compute_loss(self, model: Any, inputs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """As upstream. Where the logits are taken in chunks, smoothed labels are, too."""
        head = self._head_that_smooths(inputs)
        with contextlib.ExitStack() as stack:
            stack.enter_context(ids_within_vocabulary(self.model, inputs))
            if head is not None:
                smoother: ChunkedSmoother = self.label_smoother
                smoothing = Smoothing(smoother.epsilon, inputs["labels"], smoother.ignore_index)
                stack.enter_context(smoother.by(smoothing))
                stack.enter_context(head.smoothing(smoothing))
            return super().compute_loss(model, inputs, *args, **kwargs)

    def _head_that_smooths(self, inputs: dict[str, Any]) -> ChunkedHead | None:
        """None where upstream smooths: logits that are small, evaluation, a loss or a smoother of somebody's own."""
        head = chunked_head_at(self.model)
        is_upstreams = type(self.label_smoother) is ChunkedSmoother and self.compute_loss_func is None
        ids, labels = inputs.get("input_ids"), inputs.get("labels")
        if head is None or not is_upstreams or not torch.is_grad_enabled() or ids is None or labels is None:
            return None
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        shifts = type(base).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()  # upstream's smoother, too
        return head if shifts and head.applies_to(ids.numel()) else None

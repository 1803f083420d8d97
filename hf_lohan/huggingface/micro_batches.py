"""`vertical_micro_batches` for Trainer: the micro-batches of a step wait for its last one, then run together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import TrainingArguments

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface.attachment import engine_of


def holds_gradients(args: TrainingArguments, config: OffloadConfig) -> bool:
    """Whether gradients must wait for `step()`: their norm decides about clipping, or later backwards add to them."""
    has_later_backwards = args.gradient_accumulation_steps > 1 and not config.vertical_micro_batches
    return args.max_grad_norm > 0 or has_later_backwards


class MicroBatchesTogether:
    """Part of `OffloadTrainerMixin`. Each micro-batch runs the trainer's own `training_step`, whose
    `accelerator.backward` is put off until all forwards are over."""

    model: Any
    args: Any
    accelerator: Any
    _waiting_micro_batches: tuple[Callable[[], Tensor], ...] = ()

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        self._waiting_micro_batches = ()  # of a run that broke off
        return super()._prepare_for_training(*args, **kwargs)  # type: ignore[misc]

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        """As upstream, but that the step's last micro-batch returns the loss of all, and the others zero."""
        run: Callable[[], Tensor] = partial(super().training_step, model, inputs, *args, **kwargs)  # type: ignore[misc]
        engine = engine_of(self.model)
        if engine is None or not engine.config.vertical_micro_batches:
            return run()
        waiting = (*self._waiting_micro_batches, run)
        if not self.accelerator.sync_gradients:
            self._waiting_micro_batches = waiting
            return torch.zeros((), device=self.args.device)
        self._waiting_micro_batches = ()
        if len(waiting) == 1:
            return run()
        return torch.stack(engine.run_micro_batches(waiting)).sum()

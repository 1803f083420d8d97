"""Arguments of a short run of a Trainer that logs every step, and a callback that ends it."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback

SHORT_RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 0,
}


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self._step

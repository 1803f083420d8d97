"""Tells a `RunRecord` what Trainer tells its callbacks, and trackers what the record knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK

from hf_lohan.huggingface.progress import begin_step
from hf_lohan.record import RunRecord

TRACKERS = (
    *("azure_ml", "clearml", "comet_ml", "dagshub", "mlflow"),
    *("neptune", "swanlab", "tensorboard", "trackio", "wandb"),
)
"""Those that may be told twice of a step."""


class RecordedRun(TrainerCallback):
    """The run of one engine."""

    def __init__(self, record: RunRecord, folder: Path) -> None:
        self.record = record
        self._folder = folder

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.begin_run(
            self._folder,
            step=state.global_step,
            num_steps=state.max_steps,
            num_micro_batches=args.gradient_accumulation_steps,
        )

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.begin_step()
        begin_step(state.global_step + 1, state.max_steps, self.record.planned_step_s)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.end_step(state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.record.log(state.global_step, logs or {})

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.end_run()


def tell_trackers(trainer: Any, figures: dict[str, float | int]) -> None:
    """Give figures to TensorBoard, W&B and so on, as `lohan/...`. The console and the log history stay as they are."""
    logs = {f"lohan/{name}": value for name, value in figures.items()}
    trackers = tuple(INTEGRATION_TO_CALLBACK[name] for name in TRACKERS if name in INTEGRATION_TO_CALLBACK)
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, trackers):
            callback.on_log(trainer.args, trainer.state, trainer.control, logs=logs, model=trainer.model)

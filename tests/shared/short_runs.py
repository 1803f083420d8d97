"""Short runs of a Trainer that logs every step, and a callback that ends them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import TrainerCallback, TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model

SHORT_RUN: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "learning_rate": 1e-3,
    "report_to": [],
    "logging_steps": 1,
    "disable_tqdm": True,
    "save_strategy": "no",
    "seed": 0,
}


def short_arguments(folder: Path, **settings: Any) -> TrainingArguments:
    return TrainingArguments(str(folder), **{**SHORT_RUN, "use_cpu": True, **settings})


class StopsAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == self._step


def train_until(
    folder: Path,
    last_step: int,
    resume: str | bool | None = None,
    *,
    model: Any = None,
    save_steps: int = 0,
    **settings: Any,
) -> list[dict[str, float]]:
    """Train with offload until `last_step` of 4, and return the log. Saves a checkpoint every `save_steps`."""
    rows = tiny_batch(seed=3)["input_ids"].tolist() * 4
    saving = {"save_strategy": "steps", "save_steps": save_steps} if save_steps else {}
    trainer = hf_lohan.Trainer(
        model or tiny_model("llama"),
        short_arguments(folder, max_steps=4, **saving),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "commit_every": 1, **settings},
        callbacks=[StopsAfter(last_step)],
    )
    trainer.train(resume_from_checkpoint=resume)
    trainer.offload_engine.close()
    return [entry for entry in trainer.state.log_history if "grad_norm" in entry]

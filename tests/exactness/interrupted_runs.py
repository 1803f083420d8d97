"""Compare interrupted runs with uninterrupted ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trajectories import SMALL_BUDGETS, arguments, assert_same_tensors, dataset
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.testing.models import tiny_model

SETTINGS: dict[str, Any] = {
    "max_steps": 6,
    "logging_steps": 3,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.8,
    "gradient_accumulation_steps": 2,
}

COMMIT_EACH_STEP = {**SMALL_BUDGETS, "commit_every": 1}
"""With `auto`, a busy machine may commit less often."""


class InterruptAfter(TrainerCallback):
    """Raises an exception of class `action`, or calls `action`, within the step that follows `step`."""

    def __init__(self, step: int, action: Any = KeyboardInterrupt) -> None:
        self.step = step
        self.action = action

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.gradient_accumulation_steps == 1:  # with accumulation, it interrupts between two micro-batches
            self.on_substep_end(args, state, control)

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if isinstance(self.action, type):
                raise self.action
            self.action()


def make_trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    """Make a Trainer for a tiny model. `settings` are TrainingArguments, or "offload", "family", "model" and "rows"."""
    offload = settings.pop("offload", {})
    family = settings.pop("family", "opt")
    rows = settings.pop("rows", dataset())
    model = settings.pop("model", None) or tiny_model(family, **({"dropout": 0.1} if family == "opt" else {}))
    return hf_lohan.Trainer(
        model,
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
        offload={**COMMIT_EACH_STEP, **offload},
    )


def interrupt(trainer: Any, resume: str | None = None) -> None:
    """Train until a callback interrupts, then close the engine."""
    with pytest.raises(KeyboardInterrupt):
        trainer.train(resume_from_checkpoint=resume)
    trainer.offload_engine.close()


Outcome = tuple[list[dict[str, Any]], dict[str, Tensor]]
"""The log's rows, and the bytes of each record of each parameter."""


def outcome_of(trainer: Any) -> Outcome:
    keys = ("step", "loss", "grad_norm", "learning_rate", "epoch")
    rows = [{key: row[key] for key in keys} for row in trainer.state.log_history if "loss" in row]
    access = trainer.offload_engine.parameters
    records = {
        f"{name}.{kind}": access.read_flat(name, kind).view(torch.uint8)
        for name, _ in trainer.model.named_parameters()
        for kind in ("param", *access.state_kinds(name))
    }
    trainer.offload_engine.close()
    return rows, records


def train_to_end(trainer: Any, resume: str | bool | None = None) -> Outcome:
    """Train to the end, then close the engine."""
    trainer.train(resume_from_checkpoint=resume)
    return outcome_of(trainer)


def assert_same(ours: Outcome, expected: Outcome) -> None:
    assert ours[0] == expected[0]
    assert_same_tensors(ours[1], expected[1])

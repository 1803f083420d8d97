"""Runs that are broken off, and what becomes of those that are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from trajectories import arguments, dataset
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.testing.models import tiny_model

SETTINGS = {
    "max_steps": 8,
    "logging_steps": 3,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.8,
    "gradient_accumulation_steps": 2,
}

EACH_STEP = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "commit_every": 1}
"""On a busy machine `auto` may find commits too dear."""


class Breaks(TrainerCallback):
    """Ends the run when `step` steps are done, with what `how` raises or does."""

    def __init__(self, step: int, how: Any = KeyboardInterrupt) -> None:
        self.step = step
        self.how = how

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if isinstance(self.how, type):
                raise self.how
            self.how()


def a_trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    offload = settings.pop("offload", {})
    family = settings.pop("family", "opt")
    rows = settings.pop("rows", dataset())
    overrides = {"dropout": 0.1} if family == "opt" else {}
    return hf_lohan.Trainer(
        tiny_model(family, **overrides),
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
        offload={**EACH_STEP, **offload},
    )


def outcome(trainer: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "epoch")
    rows = [{key: row[key] for key in keys} for row in trainer.state.log_history if "loss" in row]
    parameters = trainer.offload_engine.parameters
    weights = {name: parameters.read_parameter(name) for name, _ in trainer.model.named_parameters()}
    trainer.offload_engine.close()
    return rows, weights


def assert_same(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0]
    assert all(torch.equal(ours[1][name], weight) for name, weight in expected[1].items())

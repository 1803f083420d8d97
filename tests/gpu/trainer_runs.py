"""Short runs of Trainer on CUDA, stock and offloaded, from the same seeds."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

sys.path.insert(0, str(Path(__file__).parents[1] / "shared"))  # some tests start processes that do not load conftest.py

from equal_tensors import assert_same_tensors
from short_runs import SHORT_RUN


@dataclass(frozen=True)
class Outcome:
    losses: list[float]
    norms: list[float]
    weights: dict[str, Tensor]


def make_trainer(
    folder: Path,
    model: Any,
    *,
    offload: Any = None,
    callbacks: Any = None,
    optimizers: tuple[Any, Any] = (None, None),
    **settings: Any,
) -> Any:
    """Return a Trainer that logs each step. Without `offload`, it is the stock Trainer."""
    rows = torch.randint(5, VOCAB_SIZE, (64, 16), generator=torch.Generator().manual_seed(3)).tolist()
    kind, own = (StockTrainer, {}) if offload is None else (hf_lohan.Trainer, {"offload": offload})
    return kind(
        model,
        TrainingArguments(str(folder), **{**SHORT_RUN, "max_steps": 3, **settings}),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        callbacks=callbacks,
        optimizers=optimizers,
        **own,
    )


def train(folder: Path, model: Any, *, offload: Any = None, resume: Any = None, **settings: Any) -> Outcome:
    """Train a model, given as a model or as the family of a tiny model."""
    model = tiny_model(model) if isinstance(model, str) else model
    trainer = make_trainer(folder, model, offload=offload, **settings)
    trainer.train(resume_from_checkpoint=resume)
    logged = [row for row in trainer.state.log_history if "loss" in row]
    names = [name for name, _ in trainer.model.named_parameters()]
    if offload is None:
        weights = {name: parameter.detach().cpu() for name, parameter in trainer.model.named_parameters()}
    else:
        weights = {name: trainer.offload_engine.parameters.read_parameter(name) for name in names}
        trainer.offload_engine.close()
    return Outcome([row["loss"] for row in logged], [float(row["grad_norm"]) for row in logged], weights)


def assert_same_bits(ours: Outcome, stock: Outcome) -> None:
    assert ours.losses == stock.losses and len(stock.losses) > 0
    assert ours.norms == stock.norms
    assert_same_tensors(ours.weights, stock.weights)

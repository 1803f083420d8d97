"""Train the same tiny model twice, stock and offloaded, and compare losses, norms, learning rates and weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from equal_tensors import assert_same_tensors
from short_runs import SHORT_RUN
from stored_weights import stored
from torch import Tensor
from training_device import USE_CPU
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

NUM_STEPS = 4
SMALL_BUDGETS = {"cpu_memory": "4MiB", "gpu_memory": "2MiB"}
"""Two or three blocks fit on the device. The host cannot hold all gradients, so some are spilled."""

CLIPS_SOME_STEPS = {"llama": 3.184, "opt": 2.5, "mixtral": 2.833}
"""With this `max_grad_norm`, two of the 4 steps of a cosine schedule clip."""

LOSS_TOLERANCE = 1e-6
NORM_RELATIVE_TOLERANCE = 1e-6
WEIGHT_RELATIVE_TOLERANCE = 1e-6
WEIGHT_ULPS = 2


def dataset(num_rows: int = 96, sequence_length: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(5, VOCAB_SIZE, (num_rows, sequence_length), generator=generator).tolist()
    mask = [[1] * sequence_length] * num_rows
    return Dataset.from_dict({"input_ids": rows, "labels": rows, "attention_mask": mask})


def arguments(output_dir: Path, **overrides: Any) -> TrainingArguments:
    return TrainingArguments(str(output_dir), **{**SHORT_RUN, "use_cpu": USE_CPU, "max_steps": NUM_STEPS, **overrides})


@dataclass(frozen=True)
class Trajectory:
    """Loss, gradient norm and learning rate of each step, and the final weights."""

    losses: list[float]
    norms: list[float]
    learning_rates: list[float]
    weights: dict[str, Tensor]


def logged(trainer: Any) -> tuple[list[float], list[float], list[float]]:
    rows = [row for row in trainer.state.log_history if "loss" in row]
    return (
        [row["loss"] for row in rows],
        [float(row["grad_norm"]) for row in rows],
        [row["learning_rate"] for row in rows],
    )


def stored_weights(trainer: Any) -> dict[str, Tensor]:
    return stored(trainer.model)


def finish(trainer: Any, resume: str | bool | None = None) -> Trajectory:
    """Train to the end and close the engine, if any."""
    trainer.train(resume_from_checkpoint=resume)
    if not hasattr(trainer, "offload_engine"):
        return Trajectory(*logged(trainer), {name: p.detach().cpu() for name, p in trainer.model.named_parameters()})
    trajectory = Trajectory(*logged(trainer), stored_weights(trainer))
    trainer.offload_engine.close()
    return trajectory


_stock_trajectories: dict[str, Trajectory] = {}


def train_stock(
    family: str,
    folder: Path,
    model_overrides: dict[str, Any],
    *,
    make_model: Callable[..., Any] = tiny_model,
    num_rows: int = 96,
    **settings: Any,
) -> Trajectory:
    """Train with the stock Trainer. Equal arguments give equal runs, so each run is made once per process."""
    key = repr((family, sorted(model_overrides.items()), make_model.__name__, num_rows, sorted(settings.items())))
    if key not in _stock_trajectories:
        model = make_model(family, **model_overrides)
        rows = dataset(num_rows)
        _stock_trajectories[key] = finish(StockTrainer(model, arguments(folder, **settings), train_dataset=rows))
    return _stock_trajectories[key]


def train_offloaded(
    family: str,
    folder: Path,
    model_overrides: dict[str, Any],
    *,
    offload: Any = None,
    num_rows: int = 96,
    **settings: Any,
) -> Trajectory:
    return finish(
        hf_lohan.Trainer(
            tiny_model(family, **model_overrides),
            arguments(folder, **settings),
            train_dataset=dataset(num_rows),
            offload=offload or SMALL_BUDGETS,
        )
    )


def assert_equal(ours: Trajectory, stock: Trajectory) -> None:
    """Check the documented tolerances: losses 1e-6, norms 1e-6 relative, weights 2 ulp or 1e-6 relative."""
    assert len(ours.losses) == len(stock.losses) > 0
    for step, (a, b) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        assert abs(a - b) <= LOSS_TOLERANCE, f"step {step}: loss {a}, expected {b}"
    for step, (a, b) in enumerate(zip(ours.norms, stock.norms, strict=True)):
        assert abs(a - b) <= NORM_RELATIVE_TOLERANCE * max(1.0, b), f"step {step}: norm {a}, expected {b}"
    assert ours.learning_rates == stock.learning_rates
    assert ours.weights.keys() == stock.weights.keys()
    for name, weight in stock.weights.items():
        assert weights_agree(ours.weights[name], weight), name


def assert_same_bits(ours: Trajectory, expected: Trajectory, *, norms: bool = True) -> None:
    assert len(ours.losses) == len(expected.losses) > 0
    assert (ours.losses, ours.learning_rates) == (expected.losses, expected.learning_rates)
    assert not norms or ours.norms == expected.norms
    assert_same_tensors(ours.weights, expected.weights)


def assert_nearly_equal(ours: Trajectory, stock: Trajectory) -> None:
    """Check that runs differ in the order of sums alone. Weights have a larger tolerance than losses, because AdamW
    amplifies the rounding of gradients near zero."""
    assert len(ours.losses) == len(stock.losses) > 0
    assert ours.losses == pytest.approx(stock.losses, abs=1e-6)
    assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
    for name, weight in stock.weights.items():
        assert torch.allclose(ours.weights[name], weight, rtol=0, atol=2e-5), name


def weights_agree(ours: Tensor, stock: Tensor) -> bool:
    difference = (ours - stock).abs()
    ulp = torch.nextafter(stock.abs(), torch.tensor(float("inf"))) - stock.abs()
    return bool(torch.all((difference <= WEIGHT_ULPS * ulp) | (difference <= WEIGHT_RELATIVE_TOLERANCE * stock.abs())))

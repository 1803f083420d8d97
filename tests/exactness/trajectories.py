"""Train the same tiny model twice, stock and offloaded, and compare everything."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from training_device import USE_CPU
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model

NUM_STEPS = 20
SMALL_BUDGETS = {"cpu_memory": "4MiB", "gpu_memory": "2MiB"}
"""Room for two or three blocks on the device, and not for all gradients on the host: some are spilled."""

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
    settings: dict[str, Any] = {
        "output_dir": str(output_dir),
        "use_cpu": USE_CPU,
        "max_steps": NUM_STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 1e-3,
        "report_to": [],
        "logging_steps": 1,
        "disable_tqdm": True,
        "save_strategy": "no",
        "seed": 0,
    }
    return TrainingArguments(**{**settings, **overrides})


@dataclass(frozen=True)
class Trajectory:
    """What a run did: per step (loss, gradient norm, learning rate), and the final weights."""

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
    parameters = trainer.offload_engine.parameters
    return {name: parameters.read_parameter(name) for name, _ in trainer.model.named_parameters()}


def train_stock(family: str, folder: Path, model_overrides: dict[str, Any], **settings: Any) -> Trajectory:
    """What the stock Trainer does; a run that was asked for before is not run again (seeds are all it depends on)."""
    key = repr((family, sorted(model_overrides.items()), sorted(settings.items())))
    if key not in _stock_trajectories:
        model = tiny_model(family, **model_overrides)
        trainer = StockTrainer(model, arguments(folder, **settings), train_dataset=dataset())
        trainer.train()
        weights = {name: p.detach().cpu() for name, p in model.named_parameters()}
        _stock_trajectories[key] = Trajectory(*logged(trainer), weights)
    return _stock_trajectories[key]


_stock_trajectories: dict[str, Trajectory] = {}


def train_offloaded(
    family: str, folder: Path, model_overrides: dict[str, Any], *, offload: Any = None, **settings: Any
) -> Trajectory:
    trainer = hf_lohan.Trainer(
        tiny_model(family, **model_overrides),
        arguments(folder, **settings),
        train_dataset=dataset(),
        offload=offload or SMALL_BUDGETS,
    )
    trainer.train()
    trajectory = Trajectory(*logged(trainer), stored_weights(trainer))
    trainer.offload_engine.close()
    return trajectory


def assert_equal(ours: Trajectory, stock: Trajectory) -> None:
    """The contract's tolerances: loss 1e-6, norm 1e-6 relative, weights 2 ulp or 1e-6 relative."""
    assert len(ours.losses) == len(stock.losses) > 0
    for step, (a, b) in enumerate(zip(ours.losses, stock.losses, strict=True)):
        assert abs(a - b) <= LOSS_TOLERANCE, f"step {step}: loss {a} against {b}"
    for step, (a, b) in enumerate(zip(ours.norms, stock.norms, strict=True)):
        assert abs(a - b) <= NORM_RELATIVE_TOLERANCE * max(1.0, b), f"step {step}: norm {a} against {b}"
    assert ours.learning_rates == stock.learning_rates
    assert ours.weights.keys() == stock.weights.keys()
    for name, weight in stock.weights.items():
        assert weights_agree(ours.weights[name], weight), name


def weights_agree(ours: Tensor, stock: Tensor) -> bool:
    difference = (ours - stock).abs()
    ulp = torch.nextafter(stock.abs(), torch.tensor(float("inf"))) - stock.abs()
    return bool(torch.all((difference <= WEIGHT_ULPS * ulp) | (difference <= WEIGHT_RELATIVE_TOLERANCE * stock.abs())))

"""A model whose forward keeps state trains as with stock Trainer, because traces and trials leave that state alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from trajectories import SMALL_BUDGETS, Trajectory, arguments, assert_same_bits, dataset, finish
from transformers import LlamaForCausalLM
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.testing.models import tiny_config

_POSITIONS: dict[tuple[int, ...], Tensor] = {}


class Positions(nn.Module):
    """Adds a table that is cached in the module, and one that is cached in this file."""

    def __init__(self) -> None:
        super().__init__()
        self.table: Tensor | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        if self.table is None or len(self.table) < hidden.shape[1]:
            self.table = torch.arange(hidden.shape[1], dtype=hidden.dtype)[:, None] / 100
        shape = tuple(hidden.shape[1:])
        if shape not in _POSITIONS:
            _POSITIONS[shape] = torch.ones(shape, dtype=hidden.dtype) / 10
        return hidden + self.table[: hidden.shape[1]] * _POSITIONS[shape]


class WithState(LlamaForCausalLM):
    """Weights its loss by the number of its calls and by three generators, and skips a layer at random."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for layer in self.model.layers:
            layer.input_layernorm = nn.Sequential(layer.input_layernorm, Positions())
        self.num_calls, self.shapes, self.largest = 0, list[tuple[int, ...]](), {"tokens": 0}
        self.generator = torch.Generator().manual_seed(3)
        self.python, self.numpy = random.Random(4), np.random.default_rng(5)

    def forward(self, input_ids: Any = None, labels: Any = None, **inputs: Any) -> Any:
        self.num_calls += 1
        self.shapes.append(tuple(input_ids.shape))
        self.largest["tokens"] = max(self.largest["tokens"], input_ids.numel())
        output = super().forward(input_ids=input_ids, labels=labels, **inputs)
        weight = self.python.random() + self.numpy.random() + float(torch.rand((), generator=self.generator))
        output.loss = output.loss * (1 + weight / 10 + self.num_calls / 10)
        return output


def state_of(model: WithState) -> dict[str, Any]:
    """Return the state that the forwards of a training leave."""
    return {
        "calls": (model.num_calls, model.shapes, model.largest),
        "random": (model.generator.get_state().tolist(), model.python.getstate(), model.numpy.bit_generator.state),
        "tables": [module.table.tolist() for module in model.modules() if isinstance(module, Positions)],
        "file": {shape: table.tolist() for shape, table in _POSITIONS.items()},
    }


def trained(folder: Path, offload: Any) -> tuple[Trajectory, dict[str, Any]]:
    _POSITIONS.clear()
    torch.manual_seed(0)
    model = WithState(tiny_config("llama", num_layers=2))
    settings = {"max_steps": 3, "per_device_train_batch_size": 2}
    if offload is None:
        return finish(StockTrainer(model, arguments(folder, **settings), train_dataset=dataset())), state_of(model)
    trainer = hf_lohan.Trainer(model, arguments(folder, **settings), train_dataset=dataset(), offload=offload)
    trajectory = finish(trainer)
    return trajectory, state_of(model)


def test_a_model_with_state_trains_as_with_stock(tmp_path: Path) -> None:
    stock, left = trained(tmp_path / "stock", None)
    for name in ("first", "second"):  # the second Trainer of a process finds the trace of the first
        ours, left_by_ours = trained(tmp_path / name, SMALL_BUDGETS)
        assert_same_bits(ours, stock)
        assert left_by_ours == left

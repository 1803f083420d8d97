"""Runs with `embedding: rows` equal stock runs, with adapters, in bfloat16, and after they were resumed without it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from short_runs import StopsAfter
from trajectories import (
    SMALL_BUDGETS,
    arguments,
    assert_same_bits,
    assert_same_tensors,
    dataset,
    finish,
    stored_weights,
    train_stock,
)
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan.testing.models import tiny_model

ROWS = {**SMALL_BUDGETS, "embedding": "rows"}
pytestmark = pytest.mark.slow


@pytest.mark.parametrize("then", ["rows", "whole"])
def test_resumes_from_the_other_form(then: str, tmp_path: Path) -> None:
    def trainer(embedding: str, *callbacks: StopsAfter) -> Any:
        return hf_lohan.Trainer(
            tiny_model("llama"),
            arguments(tmp_path / "run", max_grad_norm=1.0),
            train_dataset=dataset(),
            callbacks=[*callbacks],
            offload={**SMALL_BUDGETS, "commit_every": 1, "embedding": embedding},
        )

    first = trainer("whole" if then == "rows" else "rows", StopsAfter(3))
    first.train()
    first.offload_engine.close()
    second = trainer(then)
    second.train(resume_from_checkpoint=True)
    assert (second.offload_engine.embedding_rows is not None) == (then == "rows")
    weights = stored_weights(second)
    second.offload_engine.close()
    assert_same_tensors(weights, train_stock("llama", tmp_path / "stock", {}, max_grad_norm=1.0).weights)


@pytest.mark.parametrize(
    ("settings", "loads_rows"),
    [
        ({}, True),
        ({"target_modules": ["q_proj", "embed_tokens"]}, True),
        ({"trainable_token_indices": {"embed_tokens": [7, 8]}}, False),
    ],
    ids=["attention", "embeddings", "tokens"],
)
def test_adapters_equal_stock(settings: dict[str, Any], loads_rows: bool, tmp_path: Path) -> None:
    def train(trainer_class: Callable[..., Any], name: str, **options: Any) -> Any:
        model = tiny_model("llama")
        adapters = {"r": 4, "target_modules": ["q_proj"], "init_lora_weights": False, **settings}
        torch.manual_seed(1)
        model = get_peft_model(model, LoraConfig(**adapters))
        settings_of_run = arguments(tmp_path / name, max_grad_norm=1.0, max_steps=4)
        return trainer_class(model, settings_of_run, train_dataset=dataset(), **options)

    ours = train(hf_lohan.Trainer, "ours", offload=ROWS)
    ours_at_end = finish(ours)
    assert (ours.offload_engine.embedding_rows is not None) == loads_rows
    assert_same_bits(ours_at_end, finish(train(StockTrainer, "stock")))

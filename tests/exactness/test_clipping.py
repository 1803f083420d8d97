"""Deferred and speculative clipping equal the stock Trainer if all steps clip, some do, or none does."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from trajectories import (
    CLIPS_SOME_STEPS,
    NUM_STEPS,
    SMALL_BUDGETS,
    arguments,
    assert_equal,
    assert_same_tensors,
    dataset,
    stored_weights,
    train_offloaded,
    train_stock,
)
from transformers import Trainer as StockTrainer

import hf_lohan
from hf_lohan import OffloadTrainerMixin
from hf_lohan.testing.models import tiny_model
from hf_lohan.updates import NonFiniteGradientError


@pytest.mark.covering(1)
@pytest.mark.parametrize("clip", ["defer", "speculate", "auto"])
@pytest.mark.parametrize("which", ["every", "no", "some"])
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_equals_the_stock_trainer(family: str, which: str, clip: str, tmp_path: Path) -> None:
    max_grad_norm = {"every": 0.3, "no": 100.0, "some": CLIPS_SOME_STEPS[family]}[which]
    settings = {"max_grad_norm": max_grad_norm, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    ours = train_offloaded(family, tmp_path / "ours", {}, offload={**SMALL_BUDGETS, "_clip": clip}, **settings)
    assert_equal(ours, stock)
    clipped = sum(norm > max_grad_norm for norm in stock.norms)
    summary = summary_in(tmp_path / "ours")
    if clip == "speculate":  # Trainer commits the loaded weights before the first step, so that step can be undone, too
        assert (summary["num_speculated_steps"], summary["num_redone_steps"]) == (NUM_STEPS, clipped)
        assert (summary["undone_update_s"] > 0, 0 < summary["clip_rate"] < 1) == (clipped > 0, which == "some")
    elif clip == "defer" or which == "every":
        assert (summary["num_speculated_steps"], summary["undone_update_s"]) == (0, 0.0)
    assert {"every": clipped == NUM_STEPS, "no": clipped == 0, "some": 1 < clipped < NUM_STEPS - 1}[which], clipped


@pytest.mark.parametrize("max_grad_norm", slow_but([1.6], [0.3, 1.6]))
def test_accumulation_and_dropout_equal_stock(max_grad_norm: float, tmp_path: Path) -> None:
    settings = {"max_grad_norm": max_grad_norm, "gradient_accumulation_steps": 2}
    stock = train_stock("opt", tmp_path / "stock", {"dropout": 0.1}, **settings)
    offload = {**SMALL_BUDGETS, "_clip": "speculate"}
    ours = train_offloaded("opt", tmp_path / "ours", {"dropout": 0.1}, offload=offload, **settings)
    assert_equal(ours, stock)


def summary_in(folder: Path) -> Any:
    return json.loads((folder / "lohan" / "summary.json").read_text())


class Poisoned(StockTrainer):
    """The loss of some steps is not finite."""

    poisoned: frozenset[int] = frozenset()

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        self.poison = math.nan if self.state.global_step in self.poisoned else 1.0
        return super().training_step(model, inputs, *args, **kwargs)

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(model, inputs, *args, **kwargs) * self.poison


class PoisonedOffloaded(OffloadTrainerMixin, Poisoned):
    """`Poisoned` with offloading."""


def train_poisoned(folder: Path, poisoned: set[int], **settings: Any) -> Any:
    offload = {**SMALL_BUDGETS, "commit_every": 1, **settings.pop("offload", {})}
    trainer = PoisonedOffloaded(
        tiny_model("llama"), arguments(folder, max_steps=8, **settings), train_dataset=dataset(), offload=offload
    )
    trainer.poisoned = frozenset(poisoned)
    try:
        trainer.train()
    finally:
        trainer.final = stored_weights(trainer)
        trainer.offload_engine.close()
    return trainer


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_grad_norm", [0.0, 2.6])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_a_poisoned_step_changes_nothing(clip: str, max_grad_norm: float, tmp_path: Path) -> None:
    """A skipped step changes neither weights nor states nor the learning rate."""
    settings = {"max_grad_norm": max_grad_norm, "lr_scheduler_type": "constant_with_warmup", "warmup_steps": 4}
    skipping = train_poisoned(tmp_path / "bad", {0, 3, 4}, offload={"_clip": clip}, **settings)
    rows = [row for row in skipping.state.log_history if "loss" in row]
    assert summary_in(tmp_path / "bad")["num_skipped_steps"] == 3
    assert [row["learning_rate"] for row in rows] == [0.0, 0.0, 0.00025, 0.0005, 0.0005, 0.0005, 0.00075, 0.001]
    assert all(torch.isfinite(weight).all() for weight in skipping.final.values())

    class Skips(StockTrainer):
        def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(model, inputs, *args, **kwargs)
            if self.state.global_step in {0, 3, 4}:
                for parameter in model.parameters():
                    parameter.grad = None  # torch's AdamW then changes neither the parameter nor its states
                self.lr_scheduler.last_epoch -= 1  # the scheduler does not advance either
            return loss

    stock = Skips(tiny_model("llama"), arguments(tmp_path / "stock", max_steps=8, **settings), train_dataset=dataset())
    stock.train()
    assert_same_tensors(skipping.final, dict(stock.model.named_parameters()))


def test_too_many_poisoned_steps_end_the_run_and_harm_nothing(tmp_path: Path) -> None:
    with pytest.raises(NonFiniteGradientError, match=r"gradient of model\.embed_tokens\.weight is not finite"):
        train_poisoned(tmp_path / "run", set(range(2, 8)), offload={"max_skipped_steps": 2})
    assert hf_lohan.last_step(tmp_path / "run") == 3  # step 2 was skipped and counted; step 3 raised
    resumed = PoisonedOffloaded(
        tiny_model("llama"), arguments(tmp_path / "run", max_steps=8), train_dataset=dataset(), offload=SMALL_BUDGETS
    )
    resumed.train(resume_from_checkpoint="last_step")  # this trainer has no poisoned steps
    assert resumed.state.global_step == 8
    assert all(torch.isfinite(weight).all() for weight in stored_weights(resumed).values())
    resumed.offload_engine.close()

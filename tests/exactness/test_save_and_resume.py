"""Saving, resuming and loading the best model change no bit, experts included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from covering import slow_but
from trajectories import (
    SMALL_BUDGETS,
    arguments,
    assert_same_bits,
    assert_same_tensors,
    dataset,
    finish,
    stored_weights,
)
from transformers import AutoModelForCausalLM

import hf_lohan
from hf_lohan.testing.models import FAMILIES, tiny_model

NUM_STEPS = 4
HALF = 2
SETTINGS: dict[str, Any] = {
    "max_steps": NUM_STEPS,
    "save_strategy": "steps",
    "save_steps": HALF,
    "lr_scheduler_type": "cosine",
    "weight_decay": 0.1,
}


def make(family: str, folder: Path, *, offload: Any = None, model: Any = None, **settings: Any) -> Any:
    return hf_lohan.Trainer(
        model if model is not None else tiny_model(family, **({"dropout": 0.1} if family == "opt" else {})),
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=dataset(),
        eval_dataset=dataset(8),
        offload=offload or SMALL_BUDGETS,
    )


@pytest.mark.parametrize("family", slow_but(("opt", "mixtral"), FAMILIES))
def test_a_resumed_run_equals_an_uninterrupted_one(family: str, tmp_path: Path) -> None:
    whole = finish(make(family, tmp_path))
    resumed = make(family, tmp_path, model=tiny_model(family, seed=9, **({"dropout": 0.1} if family == "opt" else {})))
    assert_same_bits(finish(resumed, str(tmp_path / f"checkpoint-{HALF}")), whole)


@pytest.mark.parametrize("bf16", [pytest.param(False, marks=pytest.mark.slow), True])
def test_resume_elsewhere_with_other_budgets(bf16: bool, tmp_path: Path) -> None:
    """Another output folder, two paths instead of one and less RAM change no number."""
    whole = finish(make("llama", tmp_path / "a", bf16=bf16, offload={"cpu_memory": "16MiB", "gpu_memory": "4MiB"}))
    offload = {**SMALL_BUDGETS, "ssd": [str(tmp_path / "x"), str(tmp_path / "y")]}
    resumed = make("llama", tmp_path / "b", bf16=bf16, offload=offload)
    assert_same_bits(finish(resumed, str(tmp_path / "a" / f"checkpoint-{HALF}")), whole)


@pytest.mark.parametrize("family", slow_but(("mixtral",), ("llama", "mixtral")))
def test_a_streamed_model_trains_as_one_in_memory(family: str, tmp_path: Path) -> None:
    tiny_model(family).save_pretrained(tmp_path / "start", max_shard_size="200KB")
    streamed = make(family, tmp_path / "a", model=str(tmp_path / "start"), save_strategy="no")
    assert_same_bits(finish(streamed), finish(make(family, tmp_path / "b", save_strategy="no")))


@pytest.mark.parametrize("offload", [{}, {"experts": "streamed"}], ids=["whole", "streamed"])
def test_the_best_model_is_loaded_at_the_end(offload: dict[str, str], tmp_path: Path) -> None:
    """The learning rate ruins the model, so the first checkpoint is the best. Its experts are loaded too."""
    best_by_loss = {"eval_strategy": "steps", "eval_steps": 1, "load_best_model_at_end": True}
    settings = {"offload": {**SMALL_BUDGETS, **offload}, "learning_rate": 0.5, "max_steps": 4, "save_steps": 1}
    trainer = make("mixtral", tmp_path, **settings, **best_by_loss)
    trainer.train()
    best = AutoModelForCausalLM.from_pretrained(trainer.state.best_model_checkpoint)
    assert_same_tensors(stored_weights(trainer), dict(best.named_parameters()))
    losses = [row["eval_loss"] for row in trainer.state.log_history if "eval_loss" in row]
    assert trainer.evaluate()["eval_loss"] == min(losses)
    trainer.offload_engine.close()

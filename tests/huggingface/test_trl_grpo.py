"""GRPO with TRL's trainer goes as it does in memory: the streamed model generates what the one in memory does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hf_lohan.huggingface import engine_of

pytest.importorskip("trl")
import trl_runs
from trl_runs import both, prompts

SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trl_runs.save_checkpoint(tmp_path_factory.mktemp("llama"))


def vowels(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in completion)) for completion in completions]


@pytest.mark.parametrize(
    "settings",
    [{}, {"beta": 0.1}, {"steps_per_generation": 2, "gradient_accumulation_steps": 2}],
    ids=["plain", "reference", "accumulation"],
)
def test_a_streamed_model_generates_and_learns_as_in_memory(
    settings: dict[str, Any], checkpoint: Path, tmp_path: Path
) -> None:
    ours, stock = both(
        "GRPO",
        tmp_path,
        {**SETTINGS, **settings},
        lambda: {"model": str(checkpoint), "reward_funcs": vowels, "train_dataset": prompts()},
    )
    trl_runs.assert_same(ours, stock)
    assert any(row["reward_std"] > 0 for row in ours.logs if "reward_std" in row), "something to learn from"
    assert (ours.trainer.ref_model is not None) == ("beta" in settings)
    if ours.trainer.ref_model is not None:
        assert engine_of(ours.trainer.ref_model) is not None


def test_adapters_generate_and_learn_as_in_memory(checkpoint: Path, tmp_path: Path) -> None:
    ours, stock = both(
        "GRPO",
        tmp_path,
        {**SETTINGS, "beta": 0.1},
        lambda: {
            "model": str(checkpoint),
            "reward_funcs": vowels,
            "train_dataset": prompts(),
            "peft_config": trl_runs.lora(),
        },
    )
    trl_runs.assert_same(ours, stock)

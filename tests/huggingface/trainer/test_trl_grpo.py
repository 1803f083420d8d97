"""GRPO with TRL's trainer equals GRPO in memory, including the generated tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

import hf_lohan
from hf_lohan import engine_of

trl = pytest.importorskip("trl")
import trl_runs  # noqa: E402
from trl_runs import BUDGETS, arguments, both, prompts, run  # noqa: E402

SETTINGS: dict[str, Any] = {
    "max_steps": 2,
    "per_device_train_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 4,
    "learning_rate": 1e-2,
}


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
    assert any(row["reward_std"] > 0 for row in ours.logs if "reward_std" in row), "the rewards never differ"
    assert (ours.trainer.ref_model is not None) == ("beta" in settings)
    if ours.trainer.ref_model is not None:
        assert engine_of(ours.trainer.ref_model) is not None


def test_the_mixin_works_with_another_trl_trainer(checkpoint: Path, tmp_path: Path) -> None:
    class OffloadRLOOTrainer(hf_lohan.OffloadTrainerMixin, trl.RLOOTrainer):  # type: ignore[misc, name-defined]
        pass

    settings = {**SETTINGS, "beta": 0.1}
    given = {"model": str(checkpoint), "reward_funcs": vowels, "train_dataset": prompts()}
    stock = run("RLOO", arguments("RLOO", tmp_path / "stock", **settings), **given)
    trainer = OffloadRLOOTrainer(args=arguments("RLOO", tmp_path / "ours", **settings), offload=BUDGETS, **given)
    trainer.train()
    ours = trl_runs.Run(trainer, trl_runs.comparable(trainer.state.log_history), trl_runs.weights_of(trainer.model))
    trl_runs.close(ours)
    trl_runs.assert_same(ours, stock)


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


class Killed(Exception):
    pass


class KilledInStep3(TrainerCallback):  # type: ignore[misc]
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise Killed


def test_a_resumed_run_uses_the_tokens_generated_before_it_was_killed(checkpoint: Path, tmp_path: Path) -> None:
    settings = {**SETTINGS, "max_steps": 5, "steps_per_generation": 3, "logging_steps": 5}
    given = {"model": str(checkpoint), "reward_funcs": vowels, "train_dataset": prompts()}
    given["offload"] = {**BUDGETS, "commit_every": 1}
    whole = run("GRPO", arguments("GRPO", tmp_path / "a", **settings), **given)
    trl_runs.close(whole)
    args = arguments("GRPO", tmp_path / "b", **settings)
    with pytest.raises(Killed):
        run("GRPO", args, callbacks=[KilledInStep3()], **given)
    resumed = hf_lohan.trl.GRPOTrainer(args=args, **given)
    resumed.train(resume_from_checkpoint="last_step")
    assert trl_runs.comparable(resumed.state.log_history)[0] == whole.logs[0]
    weights = trl_runs.weights_of(resumed.model)
    assert all(torch.equal(weights[name], weight) for name, weight in whole.weights.items())
    resumed.offload_engine.close()


def test_the_record_counts_the_trained_tokens(checkpoint: Path, tmp_path: Path) -> None:
    args = arguments("GRPO", tmp_path, **SETTINGS)
    done = run("GRPO", args, offload=BUDGETS, model=str(checkpoint), reward_funcs=vowels, train_dataset=prompts())
    trl_runs.close(done)
    steps = [json.loads(line) for line in (tmp_path / "lohan" / "steps.jsonl").read_text().splitlines()]
    assert all(step["num_tokens"] > 4 * 4 for step in steps)

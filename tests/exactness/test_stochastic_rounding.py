"""With `stochastic_rounding` bfloat16 weights have no masters. The bits of a run depend only on its seed and its steps.
Budgets, speculation, interruptions and the order of updates change no bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import InterruptAfter, Outcome, assert_same, interrupt, make_trainer, outcome_of, train_to_end
from transformers import AutoModelForCausalLM, TrainerCallback

import hf_lohan
from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.files import ForeignStoreError
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.testing.models import tiny_model

SETTINGS: dict[str, Any] = {"bf16": True, "data_seed": 7, "logging_steps": 1, "max_grad_norm": 2.1, "weight_decay": 0.1}
"""Some steps clip with this `max_grad_norm`."""
ROUNDED = {"stochastic_rounding": True}


def trainer_with(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    offload = {**ROUNDED, **settings.pop("offload", {})}
    return make_trainer(folder, *callbacks, family="llama", offload=offload, **{**SETTINGS, **settings})


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    trainer = trainer_with(tmp_path_factory.mktemp("undisturbed"))
    outcome = train_to_end(trainer)
    assert {name.rpartition(".")[2] for name in outcome[1]} == {"param", "exp_avg", "exp_avg_sq", "moment_scales"}
    assert trainer.optimizer.param_groups[0]["rounding_seed"] == trainer.args.seed
    return outcome


def test_speculation_and_small_budgets_change_no_bit(undisturbed: Outcome, tmp_path: Path) -> None:
    offload = {"_clip": "speculate", "gpu_memory": "8MiB", "_resident_records": "none", "cpu_threads": 1}
    trainer = trainer_with(tmp_path, offload=offload)
    trainer.train()
    counts = json.loads((tmp_path / "lohan" / "summary.json").read_text())
    assert 0 < counts["num_redone_steps"] < counts["num_speculated_steps"]
    assert_same(outcome_of(trainer), undisturbed)


def test_a_resumed_run_has_the_seed_of_its_store(undisturbed: Outcome, tmp_path: Path) -> None:
    interrupt(trainer_with(tmp_path, InterruptAfter(3)))
    trainer = trainer_with(tmp_path)
    torch.manual_seed(trainer.args.seed + 1)
    assert_same(train_to_end(trainer, "last_step"), undisturbed)
    assert export_model(tmp_path, tmp_path / "exported") == 6
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "exported", dtype=torch.bfloat16)
    for name, parameter in exported.named_parameters():
        assert torch.equal(parameter.detach().flatten().view(torch.uint8), undisturbed[1][f"{name}.param"]), name


def test_another_seed_rounds_otherwise(undisturbed: Outcome, tmp_path: Path) -> None:
    """The order of rows and the first loss stay the same."""
    trainer = trainer_with(tmp_path)
    torch.manual_seed(trainer.args.seed + 1)
    rows, records = train_to_end(trainer)
    assert trainer.optimizer.param_groups[0]["rounding_seed"] == trainer.args.seed + 1
    assert rows[0] == undisturbed[0][0] and rows[-1] != undisturbed[0][-1]
    assert any(not torch.equal(record, undisturbed[1][name]) for name, record in records.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"bf16": False}, "rounds bfloat16 weights, and the trained weights are float32, as PEFT's"),
        (
            {"optim": "sgd"},
            r"stochastic_rounding: true is only for AdamW, and this run has SGD\(\); leave the setting out",
        ),
        ({"offload": {"optimizer": "muon"}}, r"stochastic_rounding: true is only for AdamW, and this run has Muon"),
    ],
    ids=["float32", "sgd", "muon"],
)
def test_what_cannot_be_rounded_is_refused(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer_with(tmp_path, **settings).train()
    assert hf_lohan.last_step(tmp_path) is None


def test_other_moments_and_an_exact_store_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="stores moments in int8, and optimizer_state_dtype is 'bfloat16'; leave"):
        OffloadConfig.load(ROUNDED, optimizer_state_dtype="bfloat16")
    assert OffloadConfig.load({**ROUNDED, "optimizer_state_dtype": "int8"}).stochastic_rounding
    interrupt(trainer_with(tmp_path, InterruptAfter(2), offload={"stochastic_rounding": False}))
    message = "a store with optimizer_state_dtype: float32, and this run has stochastic_rounding: true; use the setting"
    with pytest.raises(ForeignStoreError, match=message):
        trainer_with(tmp_path).train(resume_from_checkpoint="last_step")
    model = hf_lohan.from_pretrained(saved(tmp_path), bf16=True, offload={"ssd": str(tmp_path / "other")})
    with pytest.raises(
        ValueError, match="offloaded with optimizer_state_dtype: float32, and stochastic_rounding: true"
    ):
        trainer_with(tmp_path / "run", model=model)
    hf_lohan.engine_of(model).close()


def saved(folder: Path) -> Path:
    tiny_model("llama").save_pretrained(folder / "model")
    return folder / "model"

"""A Trainer whose batch needs more than `device_memory` ends before the batch's forward, and its store keeps the step
before.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset
from short_runs import SHORT_RUN
from transformers import TrainingArguments
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.costs import BudgetError
from hf_lohan.testing.models import tiny_batch, tiny_model

SHORT, LONG = 16, 120


def a_trainer(folder: Path, device_memory: Any) -> Any:
    rows = [tiny_batch(seed=seed, sequence_length=SHORT)["input_ids"][0].tolist() for seed in range(4)]
    rows += [tiny_batch(seed=seed, sequence_length=LONG)["input_ids"][0].tolist() for seed in range(2)]
    return hf_lohan.Trainer(
        tiny_model("llama"),
        TrainingArguments(
            str(folder), use_cpu=True, num_train_epochs=1, train_sampling_strategy="sequential", **SHORT_RUN
        ),
        train_dataset=Dataset.from_dict({"input_ids": rows, "labels": rows}),
        offload={"cpu_memory": "8MiB", "device_memory": device_memory, "commit_every": 1},
    )


@pytest.mark.slow
def test_the_run_ends_before_the_forward_and_the_next_one_continues(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path, "1200KiB")
    with pytest.raises(BudgetError, match=f"for this batch of 2 x {LONG} tokens") as refusal:
        trainer.train()
    assert trainer.state.global_step == 2
    trainer.offload_engine.close()
    assert hf_lohan.last_step(tmp_path) == 2
    assert CliRunner().invoke(app, ["verify", str(tmp_path)]).exit_code == 0
    advised = re.search(r"set device_memory to at least (\d+)", str(refusal.value))
    assert advised is not None
    trainer = a_trainer(tmp_path, int(advised[1]))
    trainer.train(resume_from_checkpoint="last_step")
    assert trainer.state.global_step == 3
    trainer.offload_engine.close()

"""If RAM holds records between commits, numbers equal stock and the SSD traffic is as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from trajectories import (
    arguments,
    assert_equal,
    assert_same_bits,
    assert_same_tensors,
    dataset,
    stored_weights,
    train_offloaded,
    train_stock,
)
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.testing.models import tiny_model

ALL_IN_RAM = {"cpu_memory": "64MiB", "gpu_memory": "2MiB"}
SOME_IN_RAM = {"cpu_memory": "7MiB", "gpu_memory": "2MiB"}


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("family", "offload", "max_grad_norm", "durability"),
    [
        ("llama", ALL_IN_RAM, 0.0, "step"),
        ("llama", SOME_IN_RAM, 3.2, "step"),
        ("mixtral", ALL_IN_RAM, 2.9, "step"),
        ("mixtral", SOME_IN_RAM, 0.0, "step"),
        ("llama", ALL_IN_RAM, 3.2, "checkpoint"),
        ("mixtral", SOME_IN_RAM, 0.0, "checkpoint"),
    ],
)
def test_equals_the_stock_trainer(
    family: str, offload: dict[str, Any], max_grad_norm: float, durability: str, tmp_path: Path
) -> None:
    settings = {"max_grad_norm": max_grad_norm, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    ours = train_offloaded(
        family, tmp_path / "ours", {}, offload={**offload, "commit_every": 3, "durability": durability}, **settings
    )
    assert_equal(ours, stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("settings", "offload"),
    [
        pytest.param({"bf16": True}, {}, marks=pytest.mark.slow),
        ({"bf16": True, "gradient_accumulation_steps": 2}, SOME_IN_RAM),
        ({}, {"optimizer_state_dtype": "int8"}),
        ({}, {"optimizer": "muon"}),
        pytest.param({"optim": "adafactor"}, {}, marks=pytest.mark.slow),
        pytest.param({"max_grad_norm": 0.0}, {"_schedule": "naive"}, marks=pytest.mark.slow),
        ({}, {"_schedule": "serial", "activations": "swap"}),
    ],
    ids=["bf16", "bf16-accumulated", "int8", "muon", "adafactor", "naive", "serial"],
)
def test_the_commit_interval_changes_no_bit(settings: dict[str, Any], offload: dict[str, Any], tmp_path: Path) -> None:
    asked = {"max_grad_norm": 3.1, "weight_decay": 0.1, "max_steps": 5, **settings}
    each, seldom = (
        train_offloaded(
            "llama", tmp_path / str(every), {}, offload={**ALL_IN_RAM, **offload, "commit_every": every}, **asked
        )
        for every in (1, 4)
    )
    assert_same_bits(seldom, each)


class Evaluates(TrainerCallback):
    """Evaluates between steps, and changes a weight once."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.trainer: Any = None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step % 3 == 0:
            self.losses.append(self.trainer.evaluate(dataset(num_rows=8))["eval_loss"])
        if state.global_step == 5:
            norm = self.trainer.model.model.norm
            with hf_lohan.gathered_parameters([norm.weight]), torch.no_grad():
                norm.weight.mul_(1.5)


@pytest.mark.covering(0)
@pytest.mark.parametrize("offload", [ALL_IN_RAM, SOME_IN_RAM], ids=["all", "some"])
def test_checkpoints_evaluation_and_changed_weights_equal_those_of_each_step(
    offload: dict[str, Any], tmp_path: Path
) -> None:
    """Reads and writes between two commits see the last step."""
    found = []
    for every in (1, 4):
        callback = Evaluates()
        folder = tmp_path / str(every)
        settings = {"max_steps": 7, "save_strategy": "steps", "save_steps": 6, "max_grad_norm": 1.0}
        trainer = hf_lohan.Trainer(
            tiny_model("llama"),
            arguments(folder, **settings),
            train_dataset=dataset(),
            callbacks=[callback],
            offload={**offload, "commit_every": every},
        )
        callback.trainer = trainer
        trainer.train()
        weights = stored_weights(trainer)
        trainer.offload_engine.close()
        saved = load_file(folder / "checkpoint-6" / "model.safetensors")
        found.append((callback.losses, weights, saved))
    each, seldom = found
    assert seldom[0] == each[0]
    assert_same_tensors(seldom[1], each[1])
    assert_same_tensors(seldom[2], each[2])


def trained_bytes(folder: Path, num_steps: int, **offload: Any) -> tuple[int, int, int]:
    """Train; return the bytes read, the bytes written and the bytes of one version of all records."""
    trainer = hf_lohan.Trainer(
        tiny_model("llama"),
        arguments(folder, max_steps=num_steps, max_grad_norm=1.0, gradient_accumulation_steps=1),
        train_dataset=dataset(),
        offload={**ALL_IN_RAM, "_clip": "defer", **offload},
    )
    trainer.train()
    engine = trainer.offload_engine
    engine.close()
    version_bytes = sum(record.num_bytes for record in engine.layout.records)
    assert len(engine.layout.resident_records) == len(engine.layout.records)
    return engine.tiers.io.read_bytes, engine.tiers.io.write_bytes, version_bytes


@pytest.mark.parametrize("num_steps", [pytest.param(8, marks=pytest.mark.slow), 6])
def test_only_committed_steps_are_written(num_steps: int, tmp_path: Path) -> None:
    """A run writes the loaded weights, then each step, or every fourth step and the last."""
    _, loaded_bytes, _ = trained_bytes(tmp_path / "loaded", 1, commit_every=4)
    read_bytes, each_bytes, version_bytes = trained_bytes(tmp_path / "each", num_steps, commit_every=1)
    loaded_bytes -= version_bytes  # this run also wrote its only step, because the last step is always committed
    assert each_bytes - loaded_bytes == num_steps * version_bytes
    seldom = trained_bytes(tmp_path / "seldom", num_steps, commit_every=4)
    assert seldom[0] == read_bytes
    assert seldom[1] - loaded_bytes == -(-num_steps // 4) * version_bytes
    assert hf_lohan.last_step(tmp_path / "seldom") == num_steps

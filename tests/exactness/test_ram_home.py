"""What lives in RAM between commits: numbers are stock's to the bit, and the SSD carries what the plan says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from trajectories import arguments, assert_equal, dataset, train_offloaded, train_stock

import hf_lohan
from hf_lohan.testing.models import tiny_model

ALL_IN_RAM = {"cpu_memory": "64MiB", "gpu_memory": "2MiB"}
SOME_IN_RAM = {"cpu_memory": "7MiB", "gpu_memory": "2MiB"}


@pytest.mark.parametrize("offload", [ALL_IN_RAM, SOME_IN_RAM], ids=["all", "some"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 2.6], ids=["no-clipping", "some-clip"])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("durability", ["step", "checkpoint"])
def test_equals_the_stock_trainer(
    family: str, max_grad_norm: float, offload: dict[str, Any], durability: str, tmp_path: Path
) -> None:
    settings = {"max_grad_norm": max_grad_norm, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    ours = train_offloaded(
        family, tmp_path / "ours", {}, offload={**offload, "commit_every": 7, "durability": durability}, **settings
    )
    assert_equal(ours, stock)


def trained_bytes(folder: Path, num_steps: int, **offload: Any) -> tuple[int, int, int]:
    """Bytes that so many steps read and wrote, and those of one version of all records."""
    trainer = hf_lohan.Trainer(
        tiny_model("llama"),
        arguments(folder, max_steps=num_steps, max_grad_norm=1.0, gradient_accumulation_steps=1),
        train_dataset=dataset(),
        offload={**ALL_IN_RAM, "clip": "defer", **offload},
    )
    trainer.train()
    engine = trainer.offload_engine
    engine.close()
    version_bytes = sum(record.num_bytes for record in engine.layout.records)
    assert len(engine.layout.resident_records) == len(engine.layout.records)
    return engine.tiers.io.read_bytes, engine.tiers.io.write_bytes, version_bytes


@pytest.mark.parametrize("num_steps", [12, 14])
def test_only_commits_are_written(num_steps: int, tmp_path: Path) -> None:
    """Beside what is loaded: each step, or one step of four and the last."""
    _, loaded_bytes, _ = trained_bytes(tmp_path / "loaded", 1, commit_every=4)
    read_bytes, each_bytes, version_bytes = trained_bytes(tmp_path / "each", num_steps, commit_every=1)
    loaded_bytes -= version_bytes  # its only step is the last
    assert each_bytes - loaded_bytes == num_steps * version_bytes
    seldom = trained_bytes(tmp_path / "seldom", num_steps, commit_every=4)
    assert seldom[0] == read_bytes
    assert seldom[1] - loaded_bytes == -(-num_steps // 4) * version_bytes
    assert hf_lohan.last_step(tmp_path / "seldom") == num_steps

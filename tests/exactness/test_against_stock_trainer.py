"""Losses, norms and weights equal those of the stock Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import trajectories
from covering import slow_but
from trajectories import assert_equal, train_offloaded, train_stock

from hf_lohan.testing.models import FAMILIES

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "always_clips": {"max_grad_norm": 0.3},
    "never_clips": {"max_grad_norm": 100.0},
    "updates_in_backward": {"max_grad_norm": 0.0},
    "weight_decay_and_cosine": {"weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 3},
    "accumulation_without_clipping": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.0},
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS.keys())
@pytest.mark.parametrize("family", FAMILIES)
def test_equals_the_stock_trainer(family: str, settings: dict[str, Any], tmp_path: Path) -> None:
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    ours = train_offloaded(family, tmp_path / "ours", {}, **settings)
    assert_equal(ours, stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize("schedule", ["naive", "serial"])
def test_schedules_differ_only_in_time(schedule: str, tmp_path: Path) -> None:
    stock = train_stock("llama", tmp_path / "stock", {}, max_grad_norm=0.0)
    offload = {**trajectories.SMALL_BUDGETS, "_schedule": schedule}
    assert_equal(train_offloaded("llama", tmp_path / "ours", {}, offload=offload, max_grad_norm=0.0), stock)


@pytest.mark.parametrize("max_grad_norm", slow_but([0.0], [0.0, 1.0]))
def test_kept_activations_equal_stock(max_grad_norm: float, tmp_path: Path) -> None:
    stock = train_stock("mixtral", tmp_path / "stock", {}, max_grad_norm=max_grad_norm)
    offload = {**trajectories.SMALL_BUDGETS, "activations": "keep"}
    assert_equal(train_offloaded("mixtral", tmp_path / "ours", {}, offload=offload, max_grad_norm=max_grad_norm), stock)


def test_dropout_draws_the_same_numbers(tmp_path: Path) -> None:
    dropout = {"dropout": 0.1, "attention_dropout": 0.1}
    stock = train_stock("opt", tmp_path / "stock", dropout)
    assert_equal(train_offloaded("opt", tmp_path / "ours", dropout), stock)


def test_the_router_loss_equals_stock(tmp_path: Path) -> None:
    router = {"output_router_logits": True}
    stock = train_stock("qwen3_moe", tmp_path / "stock", router)
    assert_equal(train_offloaded("qwen3_moe", tmp_path / "ours", router), stock)


@pytest.mark.parametrize("max_grad_norm", slow_but([1.0], [0.0, 1.0]))
def test_an_embedding_with_more_chunks_than_buffers_equals_stock(max_grad_norm: float, tmp_path: Path) -> None:
    wide = {"vocab_size": 40_000}
    stock = train_stock("llama", tmp_path / "stock", wide, max_steps=3, max_grad_norm=max_grad_norm)
    offload = {"cpu_memory": "4MiB", "gpu_memory": "32MiB"}
    ours = train_offloaded("llama", tmp_path / "ours", wide, offload=offload, max_steps=3, max_grad_norm=max_grad_norm)
    assert_equal(ours, stock)


def test_two_drives_change_no_number(tmp_path: Path) -> None:
    stock = train_stock("llama", tmp_path / "stock", {})
    drives = [{"path": str(tmp_path / "a"), "capacity": "64MiB"}, {"path": str(tmp_path / "b"), "capacity": "32MiB"}]
    offload = {**trajectories.SMALL_BUDGETS, "ssd": drives}
    assert_equal(train_offloaded("llama", tmp_path / "ours", {}, offload=offload), stock)

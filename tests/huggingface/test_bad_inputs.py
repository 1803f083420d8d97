"""What a user gets wrong is told in one line, before anything is written, and nothing that stood on disk is harmed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.files import CapacityError, ForeignStoreError
from hf_lohan.planner import BudgetError
from hf_lohan.testing.models import tiny_batch, tiny_model


def trainer(folder: Path, offload: Any, family: str = "llama") -> hf_lohan.Trainer:
    rows = [{key: value[0] for key, value in tiny_batch(seed=seed).items()} for seed in range(4)]
    args = TrainingArguments(
        str(folder), use_cpu=True, max_steps=1, report_to=[], save_strategy="no", disable_tqdm=True
    )
    return hf_lohan.Trainer(tiny_model(family), args, train_dataset=rows, offload=offload)


def error_of(expected: type[Exception], folder: Path, offload: Any, family: str = "llama") -> str:
    with pytest.raises(expected) as caught:
        trainer(folder, offload, family).train()
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_unknown_key(tmp_path: Path) -> None:
    message = error_of(hf_lohan.ConfigError, tmp_path, {"cpu_memroy": "4GiB"})
    assert "cpu_memroy" in message
    assert "cpu_memory" in message


@pytest.mark.parametrize("parent", ["a_file", "/proc"])
def test_unwritable_path(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("in the way")
    path = tmp_path / parent / "store"  # of an absolute parent, only that
    message = error_of(OSError, tmp_path, {"ssd": str(path)})
    assert str(path) in message
    assert "ssd path" in message


def test_too_small_capacity(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    message = error_of(CapacityError, tmp_path, {"ssd": [{"path": str(folder), "capacity": "64KiB"}]})
    assert str(folder) in message
    assert str(64 * 1024) in message.replace(",", "") or "64" in message
    assert not list(folder.glob("*.bin"))


@pytest.mark.parametrize("key", ["gpu_memory", "cpu_memory"])
def test_budget_smaller_than_two_blocks(key: str, tmp_path: Path) -> None:
    message = error_of(BudgetError, tmp_path, {key: "100KiB"})
    assert key in message
    assert "two blocks" in message
    needed = message.split()[-1]
    trainer(tmp_path, {key: int(needed)})  # what the message asks for is accepted as a size
    assert not list(tmp_path.glob("**/*.bin"))


def test_store_of_another_model(tmp_path: Path) -> None:
    offload = {"ssd": str(tmp_path / "store")}
    first = trainer(tmp_path, offload)
    first.train()
    engine = first.offload_engine
    assert engine is not None
    engine.close()
    before = (tmp_path / "store" / "records-0.bin").read_bytes()
    message = error_of(ForeignStoreError, tmp_path, offload, family="gpt2")
    assert "LlamaForCausalLM" in message
    assert (tmp_path / "store" / "records-0.bin").read_bytes() == before

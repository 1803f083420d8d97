"""Mistakes of users are reported in one line before anything is written, and files on disk do not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from short_runs import short_arguments

import hf_lohan
from hf_lohan.costs import BudgetError
from hf_lohan.files import CapacityError, ForeignStoreError
from hf_lohan.testing.models import tiny_model, tiny_rows


def trainer(folder: Path, offload: Any, family: str = "llama") -> hf_lohan.Trainer:
    rows = tiny_rows(4)
    return hf_lohan.Trainer(
        tiny_model(family), short_arguments(folder, max_steps=1), train_dataset=rows, offload=offload
    )


def error_of(expected: type[Exception], folder: Path, offload: Any, family: str = "llama") -> str:
    with pytest.raises(expected) as caught:
        trainer(folder, offload, family).train()
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("parent", ["a_file", "/proc"])
def test_an_unwritable_path_is_refused(parent: str, tmp_path: Path) -> None:
    (tmp_path / "a_file").write_text("in the way")
    path = tmp_path / parent / "store"  # an absolute parent replaces tmp_path
    message = error_of(OSError, tmp_path, {"ssd": str(path)})
    assert str(path) in message
    assert "ssd path" in message


def test_too_small_a_capacity_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    message = error_of(CapacityError, tmp_path, {"ssd": [{"path": str(folder), "capacity": "64KiB"}]})
    assert str(folder) in message
    assert str(64 * 1024) in message.replace(",", "") or "64" in message
    assert not list(folder.glob("*.bin"))


@pytest.mark.parametrize("key", ["gpu_memory", "cpu_memory"])
def test_a_budget_smaller_than_two_blocks_is_refused(key: str, tmp_path: Path) -> None:
    message = error_of(BudgetError, tmp_path, {key: "100KiB"})
    assert key in message
    assert "two blocks" in message
    needed = message.split()[-1]
    trainer(tmp_path, {key: int(needed)})  # the size in the message is accepted
    assert not list(tmp_path.glob("**/*.bin"))


def test_a_store_of_another_model_is_refused(tmp_path: Path) -> None:
    offload = {"ssd": str(tmp_path / "store")}
    first = trainer(tmp_path, offload)
    first.train()
    engine = first.offload_engine
    engine.close()
    before = (tmp_path / "store" / "records-0.bin").read_bytes()
    message = error_of(ForeignStoreError, tmp_path, offload, family="gpt2")
    assert "LlamaForCausalLM" in message
    assert (tmp_path / "store" / "records-0.bin").read_bytes() == before


def test_a_missing_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    run = trainer(tmp_path / "run", "lohan")
    for name, message in (("nowhere", "nowhere' does not exist; give"), ("empty", "has no trainer_state.json; give")):
        with pytest.raises(ValueError, match=message):
            run.train(resume_from_checkpoint=str(tmp_path / name))
    with pytest.raises(ValueError, match="resume_from_checkpoint='' does not exist"):
        run.train(resume_from_checkpoint="")
    (tmp_path / "run" / "checkpoint-3").mkdir(parents=True)
    with pytest.raises(ValueError, match=r"such as .*checkpoint-3, or \"last_step\""):
        run.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))


def test_a_token_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    run = trainer(tmp_path, "lohan")
    for row in run.train_dataset:
        row["input_ids"][1] = 5000
    for call in (run.train, lambda: run.evaluate(run.train_dataset)):
        with pytest.raises(ValueError, match="input_ids has the token 5000, and the model's vocabulary has 256 tokens"):
            call()


def test_a_wrong_peft_config_is_refused(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="peft_config='lora' is not a configuration of PEFT; give a configuration"):
        hf_lohan.from_pretrained(tmp_path / "model", peft_config="lora", default_ssd_path=tmp_path / "store")


def test_generation_needs_a_length(tmp_path: Path) -> None:
    tiny_model("llama").save_pretrained(tmp_path / "model")
    with pytest.raises(ValueError, match="max_length is required, because device memory is reserved"):
        hf_lohan.load_for_generation(tmp_path / "model", default_ssd_path=tmp_path / "store")

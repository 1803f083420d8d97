"""Trainer's checkpoints survive kills and failures while it saves, and the same ones are kept as by stock."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from datasets import Dataset
from short_runs import short_arguments
from transformers.trainer_utils import HPSearchBackend

import hf_lohan
from hf_lohan.files import StorageError
from hf_lohan.huggingface.models.reloading import reload_weights
from hf_lohan.huggingface.trainer import whole_checkpoints
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model


def dataset(num_rows: int = 16) -> Dataset:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(5, VOCAB_SIZE, (num_rows, 8), generator=generator).tolist()
    return Dataset.from_dict({"input_ids": rows, "labels": rows})


def make(folder: Path, *, stock: bool = False, **settings: Any) -> Any:
    args = short_arguments(folder, **{"max_steps": 6, "save_strategy": "steps", "save_steps": 2, **settings})
    data: dict[str, Any] = {"train_dataset": dataset(), "eval_dataset": dataset(4)}
    if stock:
        return transformers.Trainer(tiny_model("llama"), args, **data)
    return hf_lohan.Trainer(
        tiny_model("llama"), args, **data, offload={"cpu_memory": "64MiB", "gpu_memory": "2MiB", "ssd": f"{folder}-ssd"}
    )


@pytest.fixture
def make_trainer(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Return a function that makes Trainers. Their engines close with the test."""
    trainers: list[Any] = []

    def build(folder: Path = tmp_path / "run", **settings: Any) -> Any:
        for trainer in trainers:
            close(trainer)
        trainers.append(make(folder, **settings))
        return trainers[-1]

    yield build
    for trainer in trainers:
        close(trainer)


def close(trainer: Any) -> None:
    engine = getattr(trainer, "offload_engine", None)
    if engine is not None:
        engine.close()


def weights_of(trainer: Any) -> dict[str, torch.Tensor]:
    access = trainer.offload_engine.parameters
    return {name: access.read_parameter(name) for name in access.parts}


def test_a_finished_run_that_is_resumed_takes_no_further_step(make_trainer: Callable[..., Any]) -> None:
    trainer = make_trainer(max_steps=2)
    trainer.train()
    weights = weights_of(trainer)
    trainer = make_trainer(max_steps=2)
    trainer.train(resume_from_checkpoint=f"{trainer.args.output_dir}/checkpoint-2")
    assert trainer.state.global_step == 2
    assert all(torch.equal(weight, weights[name]) for name, weight in weights_of(trainer).items())


def checkpoints(folder: Path) -> list[str]:
    """Return the names in a run's folder, except the engine's own."""
    return sorted(name for name in os.listdir(folder) if name != "lohan")


def end_stage(owner: Any, name: str, checkpoint: str, end: Callable[[], None]) -> Callable[..., Any]:
    """Return the stage with `end` called after it has written its part of `checkpoint`."""
    real = getattr(owner, name)

    def stage(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = real(self, *args, **kwargs)
        if any(checkpoint in str(place) for place in (*args, *kwargs.values())):
            end()
        return result

    return stage


def raising(error: BaseException) -> Callable[[], None]:
    def end() -> None:
        raise error

    return end


STAGES = [
    (transformers.Trainer, "_save"),
    (hf_lohan.Trainer, "_save_optimizer_and_scheduler"),
    (transformers.Trainer, "_save_rng_state"),
    (transformers.TrainerState, "save_to_json"),
]


@pytest.mark.covering(0)
@pytest.mark.parametrize(("owner", "stage"), STAGES, ids=[name for _, name in STAGES])
def test_a_save_that_fails_leaves_the_last_checkpoint(
    owner: Any, stage: str, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(owner, stage, end_stage(owner, stage, "checkpoint-4", raising(full)))
    trainer = make_trainer(save_total_limit=1)
    with pytest.raises(StorageError, match=r"cannot save the checkpoint .*checkpoint-4 .*Earlier checkpoints are unt"):
        trainer.train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]
    state = json.loads((tmp_path / "run" / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2


BEST = {"eval_strategy": "steps", "eval_steps": 1, "save_steps": 1, "load_best_model_at_end": True}


class Removed(transformers.TrainerCallback):
    """Removes the best checkpoint, or its weights, before it is loaded."""

    def __init__(self, what: str) -> None:
        self.what = what

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        best = Path(state.best_model_checkpoint)
        if not self.what:
            shutil.rmtree(best)
        for path in best.glob(self.what or "*"):
            path.unlink()


@pytest.mark.covering(0)
@pytest.mark.parametrize("what", ["", "*.safetensors"])
def test_a_best_checkpoint_that_is_gone_leaves_the_last_weights(
    what: str, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    """Stock warns, and training ends well."""
    ours, stock = make_trainer(max_steps=2, **BEST), make(tmp_path / "stock", stock=True, max_steps=2, **BEST)
    for trainer in (ours, stock):
        trainer.args.num_train_epochs = 1
        trainer.train_dataset = dataset(4)
        trainer.add_callback(Removed(what))
        trainer.train()
    found = weights_of(ours)
    assert all(torch.equal(found[name], parameter) for name, parameter in stock.model.named_parameters())


def test_a_folder_without_weights_is_no_name_in_the_hub(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1, save_strategy="no")
    trainer.train()
    for folder in (tmp_path / "missing", tmp_path):
        with pytest.raises(ValueError, match=f"^'{folder}' has no weights of LlamaForCausalLM; give the folder of a"):
            reload_weights(trainer.offload_engine, trainer.model, folder)


WORSE = {"learning_rate": 0.5}
"""This learning rate ruins the model, so the first checkpoint stays the best."""


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "settings",
    [
        {"save_total_limit": 1},
        pytest.param({"save_total_limit": 2}, marks=pytest.mark.slow),
        pytest.param({"save_total_limit": None}, marks=pytest.mark.slow),
        pytest.param({**BEST, "save_total_limit": 2}, marks=pytest.mark.slow),
        {**BEST, **WORSE, "save_total_limit": 2},
        pytest.param({**BEST, **WORSE, "save_total_limit": 1}, marks=pytest.mark.slow),
        {**BEST, **WORSE, "save_strategy": "best"},
        {"save_only_model": True, "save_total_limit": 2},
    ],
    ids=["one", "two", "all", "best_is_new", "best_is_old", "best_alone", "best_only", "only_model"],
)
def test_the_same_checkpoints_are_kept_as_by_the_stock_trainer(
    settings: dict[str, Any], make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    stock, ours = tmp_path / "stock", tmp_path / "ours"
    bests = []
    for folder in (stock, ours):
        trainer = make_trainer(folder, stock=folder == stock, **settings)
        trainer.train()
        bests.append(trainer.state.best_model_checkpoint)
    assert checkpoints(ours) == checkpoints(stock)
    assert bests[1] == (bests[0] and bests[0].replace(str(stock), str(ours)))
    for name in checkpoints(stock):
        ours_files, stock_files = set(os.listdir(ours / name)), set(os.listdir(stock / name))
        assert ours_files - {"lohan", "lohan.yaml"} == stock_files
        states = [json.loads((folder / name / "trainer_state.json").read_text()) for folder in (stock, ours)]
        for state in states:
            state["best_metric"] = None
            state["log_history"] = None
        assert states[1] == json.loads(json.dumps(states[0]).replace(str(stock), str(ours)))


def test_old_checkpoints_are_removed_after_the_new_one_is_complete(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[str]] = []
    real = shutil.rmtree

    def rmtree(path: Any, *args: Any, **kwargs: Any) -> None:
        if Path(path).name.startswith("checkpoint-"):
            seen.append(checkpoints(tmp_path / "run"))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    make_trainer(save_total_limit=1).train()
    assert seen == [["checkpoint-2", "checkpoint-4"], ["checkpoint-4", "checkpoint-6"]]


def test_a_failed_save_does_not_become_the_best(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = end_stage(transformers.Trainer, "_save_rng_state", "checkpoint-2", raising(RuntimeError("broken")))
    monkeypatch.setattr(transformers.Trainer, "_save_rng_state", stage)
    trainer = make_trainer(**BEST)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.train()
    assert trainer.state.best_global_step == 2
    assert trainer.state.best_model_checkpoint == str(tmp_path / "run" / "checkpoint-1")


def test_the_best_checkpoint_of_a_moved_run_is_found(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    make_trainer(tmp_path / "first", max_steps=2, **BEST, **WORSE).train()
    (tmp_path / "first").rename(tmp_path / "moved")
    trainer = make_trainer(tmp_path / "moved", max_steps=3, **BEST, **WORSE)
    trainer.train(resume_from_checkpoint=str(tmp_path / "moved" / "checkpoint-2"))
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-1")
    state = json.loads((tmp_path / "moved" / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "moved" / "checkpoint-1")


def test_a_checkpoint_is_pushed_after_it_has_its_name(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pushed: list[tuple[str, bool]] = []
    monkeypatch.setattr(
        transformers.Trainer,
        "_push_from_checkpoint",
        lambda self, folder: pushed.append((folder, (Path(folder) / "trainer_state.json").is_file())),
    )
    trainer = make_trainer(save_strategy="no", max_steps=1)
    trainer.train()
    trainer.args.push_to_hub = True  # set earlier, it would create a repository
    trainer._save_checkpoint(trainer.model, None)
    trainer.args.push_to_hub = False
    trainer._save_checkpoint(trainer.model, None)
    assert pushed == [(str(tmp_path / "run" / "checkpoint-1"), True)]


def test_a_hyperparameter_search_has_a_folder_for_each_run(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    trainer = make_trainer(save_strategy="no", max_steps=1)
    trainer.train()
    trainer.hp_search_backend = HPSearchBackend.OPTUNA
    trainer._save_checkpoint(trainer.model, SimpleNamespace(number=3))
    assert checkpoints(tmp_path / "run") == ["run-3"]
    assert checkpoints(tmp_path / "run" / "run-3") == ["checkpoint-1"]


def test_without_offload_the_stock_trainer_saves(
    make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(whole_checkpoints, "unfinished_together", None)
    args = short_arguments(tmp_path / "run", max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    hf_lohan.Trainer(tiny_model("llama"), args, train_dataset=dataset()).train()
    assert checkpoints(tmp_path / "run") == ["checkpoint-2"]


@pytest.mark.covering(0)
@pytest.mark.parametrize("by_path", [False, True])
def test_the_name_of_an_output_folder_is_no_pattern(
    by_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the setting `ssd` is expanded. The store of a run without it lies in the folder that was given."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_SUCH_VARIABLE", raising=False)
    folder = "~no_such_user-{local_rank}-{node}-cost$5-${NO_SUCH_VARIABLE}"
    model: Any = tiny_model("llama")
    if by_path:
        model.save_pretrained("model")
        model = "model"
    trainer = hf_lohan.Trainer(
        model,
        short_arguments(folder, max_steps=1),
        train_dataset=dataset(),
        offload={"cpu_memory": "64MiB", "gpu_memory": "2MiB"},
    )
    trainer.train()
    trainer.offload_engine.close()
    assert {path.name for path in tmp_path.iterdir()} - {"model"} == {folder}
    assert hf_lohan.last_step(folder) == 1

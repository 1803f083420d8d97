"""Features of TrainingArguments besides numbers: pushes, searches and checkpoints on SIGTERM."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub import ModelCard
from huggingface_hub.utils import filter_repo_objects
from short_runs import StopsAfter, short_arguments
from stored_weights import assert_stored
from transformers import TrainerCallback

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.testing.models import tiny_model, tiny_rows

BUDGETS = {"cpu_memory": "4MiB", "gpu_memory": "2MiB", "commit_every": 1}


def rows(count: int = 8) -> list[dict[str, torch.Tensor]]:
    return tiny_rows(count)


@pytest.fixture
def make_trainer() -> Iterator[Callable[..., Any]]:
    """Return a function that makes stock or offloaded trainers. Engines close with the test."""
    made: list[Any] = []

    def make(folder: Path, *, offload: Any = BUDGETS, options: dict[str, Any] | None = None, **settings: Any) -> Any:
        args = short_arguments(folder, **{"max_steps": 4, "save_strategy": "steps", **settings})
        options = {"train_dataset": rows(), "eval_dataset": rows(2), **(options or {})}
        if "model_init" not in options:
            options["model"] = tiny_model("llama", num_layers=2)
        made.append(hf_lohan.Trainer(args=args, offload=offload, **options))
        return made[-1]

    yield make
    for trainer in made:
        if trainer.model is not None and (engine := engine_of(trainer.model)) is not None:
            engine.close()


class UnfreezesGradually(TrainerCallback):
    """Trains only the head at first, and one more layer every second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.model.requires_grad_(False)
        for layer in range(state.global_step // 2):
            model.model.layers[1 - layer].requires_grad_(True)


def test_gradual_unfreezing_equals_the_stock_trainer(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """The offloaded run also resumes from its last step. The store has states of all weights that first required a
    gradient.
    """
    settings = {"max_steps": 6, "save_strategy": "no", "max_grad_norm": 0.5, "weight_decay": 0.1, "learning_rate": 1e-2}
    options = {"callbacks": [UnfreezesGradually()]}
    stock = make_trainer(tmp_path / "stock", offload=None, options=options, **settings)
    stock.train()
    first = make_trainer(tmp_path / "ours", options={"callbacks": [UnfreezesGradually(), StopsAfter(3)]}, **settings)
    first.train()
    first.offload_engine.close()
    ours = make_trainer(tmp_path / "ours", options=options, **settings)
    ours.train(resume_from_checkpoint="last_step")
    assert_stored(ours.model, stock.model)
    norms = [[row["grad_norm"] for row in each.state.log_history if "grad_norm" in row] for each in (stock, ours)]
    assert norms[0] == norms[1]


class Uploads:
    """Stands for the Hub. Notes the files of each upload by their path in the repository."""

    def __init__(self) -> None:
        self.sent: list[set[str]] = []

    def create_repo(self, repo_id: str, **kwargs: Any) -> Any:
        return SimpleNamespace(repo_id=f"somebody/{repo_id}")

    def upload_folder(
        self, *, folder_path: str, path_in_repo: str = "", ignore_patterns: list[str] | None = None, **kwargs: Any
    ) -> Any:
        paths = [path.relative_to(folder_path) for path in Path(folder_path).rglob("*") if path.is_file()]
        kept = filter_repo_objects([path.as_posix() for path in paths], ignore_patterns=ignore_patterns)
        self.sent.append({os.path.join(path_in_repo, path) for path in kept})
        return SimpleNamespace(done=lambda: True, is_done=lambda: True)


@pytest.mark.covering(0)
@pytest.mark.parametrize("strategy", ["every_save", "checkpoint"])
def test_pushed_files_equal_those_of_the_stock_trainer(
    strategy: str, make_trainer: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent = []
    for folder, offload in (("stock", None), ("ours", {**BUDGETS, "ssd": str(tmp_path / "ours" / "run" / "ssd")})):
        hub = Uploads()
        monkeypatch.setattr(transformers.trainer, "hf_api", lambda hub=hub: hub)
        trainer = make_trainer(
            tmp_path / folder / "run", offload=offload, push_to_hub=True, save_steps=2, hub_strategy=strategy
        )
        trainer.train()
        trainer.push_to_hub()
        sent.append(hub.sent)
    stock, ours = sent
    assert (tmp_path / "ours" / "run" / "lohan" / "summary.json").is_file()
    assert len(stock) == len(ours) == (3 if strategy == "every_save" else 5)
    for theirs, files in zip(stock, ours, strict=True):
        of_states = {name for name in files if name.startswith("last-checkpoint/lohan")}
        assert files - of_states == theirs
        assert bool(of_states) == ("last-checkpoint/optimizer.pt" in theirs), "a run resumes with these states"


def test_the_model_card_describes_offloading_unless_disabled(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    cards = []
    for name, offload in (("stock", None), ("off", {**BUDGETS, "hub_model_card": False}), ("ours", BUDGETS)):
        trainer = make_trainer(tmp_path / name / "run", offload=offload, max_steps=2, save_strategy="no")
        trainer.train()
        trainer.create_model_card(model_name="tiny", tags="small")
        trainer.create_model_card(model_name="tiny", tags="small")  # as a second push does
        cards.append(ModelCard.load(tmp_path / name / "run" / "README.md"))
    stock, left_out, ours = cards
    assert sorted(left_out.data.tags) == sorted(stock.data.tags)
    assert "Offloading" not in left_out.content
    assert set(ours.data.tags) == {*stock.data.tags, "hf_lohan"}
    lines = ours.text.split("### Offloading")[1].strip().splitlines()
    assert len(lines) == 3
    assert f"hf_lohan {hf_lohan.__version__}" in lines[0]
    assert lines[1].startswith("- 2 steps of ")


class SignalsItself(TrainerCallback):
    def __init__(self, event: str, step: int) -> None:
        self._step = step
        setattr(self, event, self._signal)

    def _signal(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self._step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("event", "settings", "last"),
    [
        ("on_pre_optimizer_step", {}, 3),
        pytest.param("on_step_begin", {"max_grad_norm": 0.0}, 3, marks=pytest.mark.slow),
        ("on_step_end", {"save_steps": 2}, 2),
        pytest.param("on_log", {}, 2, marks=pytest.mark.slow),
    ],
)
def test_sigterm_saves_a_checkpoint_if_set(
    event: str, settings: dict[str, Any], last: int, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    options = {"callbacks": [SignalsItself(event, 2)]}
    settings = {"enable_jit_checkpoint": True, **settings}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    before = signal.getsignal(signal.SIGTERM)
    trainer = make_trainer(tmp_path / "run", options=options, **settings)
    with pytest.raises(SystemExit) as exit_info:
        trainer.train()
    assert exit_info.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    assert [path.name for path in sorted((tmp_path / "run").glob("checkpoint-*"))] == [f"checkpoint-{last}"]
    resumed = make_trainer(tmp_path / "elsewhere", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{last}"))
    assert losses(resumed) == losses(whole)


class EndsItsGroup(TrainerCallback):
    """Signals the process and the workers of its data loader, like a signal to the process group."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            for pid in (os.getpid(), *(child.pid for child in multiprocessing.active_children())):
                assert pid is not None
                os.kill(pid, signal.SIGTERM)


def test_sigterm_to_the_process_group_ends_the_run_as_to_the_process(
    make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    settings = {"dataloader_num_workers": 2, "max_steps": 6, "save_strategy": "no"}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    trainer = make_trainer(tmp_path / "run", options={"callbacks": [EndsItsGroup()]}, **settings)
    with pytest.raises(SystemExit) as exit_info:
        trainer.train()
    assert exit_info.value.code == 143
    assert hf_lohan.last_step(tmp_path / "run") in (2, 3)
    again = make_trainer(tmp_path / "run", **settings)
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)


def losses(trainer: Any) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in trainer.state.log_history if "loss" in row]


def test_each_training_begins_with_a_new_model(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    """`model_init` makes a new model, which uses the store of the previous one."""
    trainer = make_trainer(tmp_path, options={"model_init": lambda: tiny_model("llama", num_layers=2)}, save_steps=4)
    trainer.train()
    first, model = losses(trainer), trainer.model
    trainer.train()
    assert losses(trainer) == first and trainer.model is not model
    assert engine_of(model).is_closed and not engine_of(trainer.model).is_closed


def test_a_hyperparameter_search_equals_the_stock_trainer(make_trainer: Callable[..., Any], tmp_path: Path) -> None:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    found = []
    for folder, offload in (("stock", None), ("ours", BUDGETS)):
        made = {"model_init": lambda trial: tiny_model("llama", num_layers=2)}
        trainer = make_trainer(tmp_path / folder, offload=offload, options=made, save_strategy="no", max_steps=2)
        best = trainer.hyperparameter_search(
            hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 1e-4, 1e-1, log=True)},
            n_trials=3,
            direction="minimize",
            backend="optuna",
            sampler=optuna.samplers.RandomSampler(seed=1),
        )
        found.append((best.run_id, best.objective, best.hyperparameters))
    assert found[0] == found[1]


class RunsOutOfMemory:
    """Raises torch's out-of-memory error in a layer of one step."""

    def __init__(self, trainer: Any, at_step: int, *, in_backward: bool) -> None:
        self._trainer, self._at_step, self._in_backward = trainer, at_step, in_backward
        layer = trainer.model.model.layers[0]
        self._handle = layer.register_forward_hook(self._after_layer)

    def _after_layer(self, _module: Any, _args: Any, output: Any) -> None:
        if self._trainer.state.global_step == self._at_step and torch.is_grad_enabled():
            if not self._in_backward:
                self._fail()
            (output[0] if isinstance(output, tuple) else output).register_hook(lambda _gradient: self._fail())

    def _fail(self) -> None:
        self._handle.remove()
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB. If reserved but unallocated ...")


@pytest.mark.parametrize("in_backward", [False, True], ids=["forward", "backward"])
def test_a_run_out_of_device_memory_says_what_to_change_and_resumes(
    in_backward: bool, make_trainer: Callable[..., Any], tmp_path: Path
) -> None:
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    expected = [row["loss"] for row in whole.state.log_history if "loss" in row]

    broken = make_trainer(tmp_path / "run")
    RunsOutOfMemory(broken, at_step=2, in_backward=in_backward)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        broken.train()
    (said,) = raised.value.args
    assert said.startswith("CUDA out of memory. Tried to allocate 2.00 MiB.")
    assert "The plan needs" in said and "slots" in said and "for batches of 2 x" in said
    assert "se a smaller batch size or shorter sequences" in said
    broken.offload_engine.close()

    resumed = make_trainer(tmp_path / "run")
    resumed.train(resume_from_checkpoint="last_step")
    assert [row["loss"] for row in resumed.state.log_history if "loss" in row] == expected

"""A run that resumes from its last committed step equals an uninterrupted run. All runs are in one process."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import (
    COMMIT_EACH_STEP,
    SETTINGS,
    InterruptAfter,
    assert_same,
    interrupt,
    make_trainer,
    outcome_of,
    train_to_end,
)
from short_runs import StopsAfter
from trajectories import arguments, dataset
from transformers import EarlyStoppingCallback, TrainerCallback

import hf_lohan
from hf_lohan.store import last_commit
from hf_lohan.testing.models import tiny_model


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Any:
    trainer = make_trainer(tmp_path_factory.mktemp("uninterrupted"))
    return train_to_end(trainer)


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_a_run_interrupted_several_times_equals_an_uninterrupted_run(
    clip: str, tmp_path: Path, uninterrupted: Any
) -> None:
    """Runs have dropout, accumulation and a schedule, and log every third step."""
    settings = {"offload": {"_clip": clip}}
    resume = None
    for step in (1, 4):
        trainer = make_trainer(tmp_path / "run", InterruptAfter(step), **settings)
        interrupt(trainer, resume)
        assert hf_lohan.last_step(tmp_path / "run") == step
        resume = "last_step"
    trainer = make_trainer(tmp_path / "run", **settings)
    assert_same(train_to_end(trainer, True), uninterrupted)


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_an_interrupted_step_is_committed_whole_or_not_at_all(
    clip: str, tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Held gradients of a step that is not committed are dropped."""
    from hf_lohan.threads import WorkThread

    breaks = InterruptAfter(-1)
    # With other activations, planning also calls the thread between steps.
    trainer = make_trainer(tmp_path / "run", breaks, offload={"_clip": clip, "activations": "recompute"})
    stock_call = WorkThread.call
    num_calls = when = 0

    def interrupted_call(thread: Any, command: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == when:
            thread.submit(command)  # the command runs, but the caller does not wait for it
            raise KeyboardInterrupt
        return stock_call(thread, command)

    resume = None
    for number in (5, 5, 6, 2, 3, 4):
        num_calls, when = 0, number
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(WorkThread, "call", interrupted_call)
            trainer.train(resume_from_checkpoint=resume)
        trainer.offload_engine.wait_for_updates()  # a commit may be running
        resume = "last_step" if hf_lohan.last_step(tmp_path / "run") is not None else None
    assert_same(train_to_end(trainer, "last_step"), uninterrupted)


def lora_model() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def half_frozen_model() -> Any:
    """Make a model in which some frozen parameters share a granule, and so a home, with trained ones."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "mlp" not in name)
    return model


def runs_of(make_model: Callable[[], Any], folder: Path) -> Callable[..., Any]:
    """Return a function that makes a trainer for the model in a named folder."""

    def run(name: str, *callbacks: TrainerCallback) -> Any:
        return hf_lohan.Trainer(
            model=make_model(),
            args=arguments(folder / name, **SETTINGS),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload=COMMIT_EACH_STEP,
        )

    return run


def assert_resumes(run: Callable[..., Any], between: Callable[[], None] = lambda: None) -> None:
    """Check that an interrupted and resumed run equals an uninterrupted one. Call `between` before the run resumes."""
    whole = run("whole")
    whole.train()
    broken = run("run", InterruptAfter(5))
    interrupt(broken)
    between()
    again = run("run")
    assert_same(train_to_end(again, "last_step"), outcome_of(whole))


@pytest.mark.covering(0)
@pytest.mark.parametrize("make_model", [lora_model, half_frozen_model])
def test_a_run_with_frozen_weights_resumes(make_model: Any, tmp_path: Path) -> None:
    run = runs_of(make_model, tmp_path)

    def evaluate() -> None:
        evaluated = run("run")
        evaluated.evaluate(dataset(2))  # this loads the frozen weights again
        evaluated.offload_engine.close()
        assert hf_lohan.last_step(tmp_path / "run") == 5

    assert_resumes(run, evaluate)


def test_a_run_from_a_model_path_resumes(tmp_path: Path) -> None:
    """Loading the model again does not lose the committed steps."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    assert_resumes(runs_of(lambda: str(tmp_path / "model"), tmp_path))


def test_sigterm_finishes_and_commits_the_step(tmp_path: Path, uninterrupted: Any) -> None:
    trainer = make_trainer(tmp_path / "run", InterruptAfter(3, lambda: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(SystemExit) as exited:
        trainer.train()
    assert exited.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert hf_lohan.last_step(tmp_path / "run") == 4
    trainer = make_trainer(tmp_path / "run")
    assert_same(train_to_end(trainer, "last_step"), uninterrupted)


def test_true_resumes_from_the_last_step_or_a_checkpoint(tmp_path: Path, uninterrupted: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(tmp_path / "run", InterruptAfter(5), **settings)
    interrupt(trainer)
    resumed = make_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._resume_point.commit.facts["global_step"] == 5
    assert_same(outcome_of(resumed), uninterrupted)
    elsewhere = make_trainer(tmp_path / "run", **settings, offload={"ssd": str(tmp_path / "other_drive")})
    elsewhere.args.max_steps = 9
    elsewhere.train(resume_from_checkpoint=True)  # its store is empty, so the last checkpoint is used
    assert elsewhere._resume_point.commit is None
    assert elsewhere.state.global_step == 9
    elsewhere.offload_engine.close()


def test_true_resumes_from_a_newer_checkpoint_of_another_store(tmp_path: Path) -> None:
    """The run goes on with a second store, and then with the first. The last commit of the first store has the number
    of the commit before the last checkpoint of the second store."""
    settings = {"save_strategy": "steps", "save_steps": 1, "max_steps": 5}
    interrupt(make_trainer(tmp_path / "run", InterruptAfter(2), **settings))
    numbers = [last_commit([str(tmp_path / "run/_lohan/store")]).number]
    second = make_trainer(tmp_path / "run", **settings, offload={"ssd": str(tmp_path / "second")})
    train_to_end(second, True)
    numbers.append(last_commit([str(tmp_path / "second")]).number - 1)
    assert numbers[0] == numbers[1]
    first = make_trainer(tmp_path / "run", **settings)
    first.train(resume_from_checkpoint=True)
    assert first._resume_point.commit is None
    first.offload_engine.close()


class StopsWithinStep(TrainerCallback):
    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop |= state.global_step == 3


def test_the_last_step_is_committed_if_a_callback_ends_the_next(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", StopsWithinStep(), offload={"commit_every": 100})
    trainer.train()
    trainer.offload_engine.close()
    assert hf_lohan.last_step(tmp_path / "run") == 3


class EndsAtSave(TrainerCallback):
    """Ends the run after a checkpoint and before the commit of its step."""

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt


@pytest.mark.covering(0)
@pytest.mark.parametrize("save_steps", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_a_run_killed_between_a_checkpoint_and_its_commit_loses_nothing(save_steps: int, tmp_path: Path) -> None:
    """Step 2 is between two logs. Step 3 is the last of its epoch, which is evaluated after the checkpoint."""
    settings = {"rows": dataset(12), "eval_strategy": "epoch", "eval_on_start": True, "logging_strategy": "steps"}
    saving = {"save_strategy": "steps", "save_steps": save_steps}
    whole = make_trainer(tmp_path / "whole", **settings, **saving)
    whole.train()
    broken = make_trainer(tmp_path / "run", EndsAtSave(), **settings, **saving)
    interrupt(broken)
    again = make_trainer(tmp_path / "run", **settings, **saving)
    again.train(resume_from_checkpoint=True)

    def evaluations(trainer: Any) -> list[tuple[int, float]]:
        return [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]

    assert [step for step, _ in evaluations(whole)] == [0, 3, 6]
    assert evaluations(again) == evaluations(whole)
    assert_same(outcome_of(again), outcome_of(whole))


def test_states_of_callbacks_that_are_not_restored_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = {"logging_steps": 1, "eval_strategy": "steps", "eval_steps": 1, "metric_for_best_model": "eval_loss"}
    settings |= {"greater_is_better": True, "learning_rate": 1e-2, "lr_scheduler_type": "constant"}

    def run(**more: Any) -> Any:
        stopping = EarlyStoppingCallback(early_stopping_patience=2)
        return make_trainer(tmp_path / "run", stopping, gradient_accumulation_steps=1, **settings, **more)

    first = run()
    first.train()
    first.offload_engine.close()
    assert first.state.global_step < first.state.max_steps
    for restores in (False, True):
        caplog.clear()
        again = run(restore_callback_states_from_checkpoint=restores)
        interrupted = InterruptAfter(first.state.global_step)
        again.add_callback(interrupted)
        interrupt(again, "last_step")
        assert ("EarlyStoppingCallback begins anew" in caplog.text) is not restores
        assert f"a callback had ended training after step {first.state.global_step} of 6" in caplog.text


@pytest.mark.slow
def test_a_loaded_checkpoint_is_committed_as_the_last_step(tmp_path: Path, uninterrupted: Any) -> None:
    """A run ends with a checkpoint that is newer than its last step, resumes there, and ends before another step."""
    # The run logs when it saves, because a checkpoint does not keep the losses summed since the last log.
    settings = {"save_strategy": "steps", "save_steps": 3}
    trainer = make_trainer(tmp_path / "run", EndsAtSave(), **settings)
    interrupt(trainer)
    assert hf_lohan.last_step(tmp_path / "run") == 2
    again = make_trainer(tmp_path / "run", InterruptAfter(3), **settings)
    interrupt(again, str(tmp_path / "run" / "checkpoint-3"))
    assert hf_lohan.last_step(tmp_path / "run") == 3
    last = make_trainer(tmp_path / "run", **settings)
    assert_same(train_to_end(last, "last_step"), uninterrupted)


class RunsOutOfMemory(TrainerCallback):
    """Raises once after some steps, and keeps the first weight of each attempt."""

    def __init__(self) -> None:
        self.trainer: Any = None
        self.has_failed = False
        self.first_weights: list[torch.Tensor] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        name, _ = next(self.trainer.model.named_parameters())
        self.first_weights.append(self.trainer.offload_engine.parameters.read_parameter(name).clone())

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 5 and not self.has_failed:
            self.has_failed = True
            raise RuntimeError("CUDA out of memory.")


@pytest.mark.slow
def test_a_smaller_batch_size_starts_from_the_checkpoint_again(tmp_path: Path) -> None:
    """The weights of the failed attempt are not used."""
    settings = {"save_strategy": "steps", "save_steps": 3}
    first = make_trainer(tmp_path / "run", max_steps=3, **settings)
    train_to_end(first)
    runs_out = RunsOutOfMemory()
    again = make_trainer(tmp_path / "run", runs_out, auto_find_batch_size=True, **settings)
    runs_out.trainer = again
    again.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))
    again.offload_engine.close()
    assert runs_out.has_failed and len(runs_out.first_weights) == 2
    assert torch.equal(*runs_out.first_weights)


def test_the_end_of_an_epoch_is_neither_lost_nor_repeated(tmp_path: Path) -> None:
    """Evaluation and logging at the end of an epoch come after its last step."""
    settings = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "logging_strategy": "epoch"}

    def run(folder: str, *callbacks: TrainerCallback) -> Any:
        return make_trainer(tmp_path / folder, *callbacks, rows=dataset(8), **settings)

    whole = run("whole")
    whole.train()
    broken = run("run", InterruptAfter(whole.state.max_steps // 3))
    interrupt(broken)
    again = run("run")
    again.train(resume_from_checkpoint="last_step")

    def evaluations(trainer: Any) -> list[tuple[int, float]]:
        return [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]

    assert evaluations(again) == evaluations(whole)
    assert len(evaluations(whole)) == 3
    assert_same(outcome_of(again), outcome_of(whole))


def test_persistent_buffers_are_committed_with_the_step(tmp_path: Path) -> None:
    """Buffers such as router biases and running statistics are part of the model's state."""
    from hf_lohan.huggingface.models.export import export_model

    def trainer(*callbacks: TrainerCallback) -> Any:
        model = tiny_model("llama")
        model.register_buffer("num_forwards", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, _: module.num_forwards.add_(1) and None)
        return hf_lohan.Trainer(
            model,
            arguments(tmp_path, max_steps=4),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload=COMMIT_EACH_STEP,
        )

    first = trainer(StopsAfter(3))
    train_to_end(first)
    second = trainer()
    second.train(resume_from_checkpoint="last_step")
    assert second.model.num_forwards.item() == 4
    second.offload_engine.close()
    export_model(tmp_path, tmp_path / "out")

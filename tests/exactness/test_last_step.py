"""Going on from the last committed step, in one process: the numbers are those of a run that was never stopped."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from trajectories import arguments, dataset
from transformers import TrainerCallback

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model

SETTINGS = {
    "max_steps": 8,
    "logging_steps": 3,
    "lr_scheduler_type": "cosine",
    "max_grad_norm": 0.8,
    "gradient_accumulation_steps": 2,
}


class Breaks(TrainerCallback):
    """Ends the run when `step` steps are done, with what `how` raises or does."""

    def __init__(self, step: int, how: Any = KeyboardInterrupt) -> None:
        self.step = step
        self.how = how

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            if isinstance(self.how, type):
                raise self.how
            self.how()


def a_trainer(folder: Path, *callbacks: TrainerCallback, **settings: Any) -> Any:
    offload = settings.pop("offload", {})
    family = settings.pop("family", "opt")
    rows = settings.pop("rows", dataset())
    overrides = {"dropout": 0.1} if family == "opt" else {}
    return hf_lohan.Trainer(
        tiny_model(family, **overrides),
        arguments(folder, **{**SETTINGS, **settings}),
        train_dataset=rows,
        eval_dataset=rows,
        callbacks=list(callbacks),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", **offload},
    )


def outcome(trainer: Any) -> tuple[list[dict[str, Any]], dict[str, Tensor]]:
    keys = ("step", "loss", "grad_norm", "learning_rate", "epoch")
    rows = [{key: row[key] for key in keys} for row in trainer.state.log_history if "loss" in row]
    parameters = trainer.offload_engine.parameters
    weights = {name: parameters.read_parameter(name) for name, _ in trainer.model.named_parameters()}
    trainer.offload_engine.close()
    return rows, weights


def assert_same(ours: Any, expected: Any) -> None:
    assert ours[0] == expected[0]
    assert all(torch.equal(ours[1][name], weight) for name, weight in expected[1].items())


@pytest.fixture
def uninterrupted(tmp_path: Path) -> Any:
    trainer = a_trainer(tmp_path / "whole")
    trainer.train()
    return outcome(trainer)


@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_broken_off_again_and_again(clip: str, tmp_path: Path, uninterrupted: Any) -> None:
    """With dropout, accumulation, a schedule, and three steps between two logs."""
    settings = {"offload": {"clip": clip}}
    resume = None
    for step in (2, 3, 5, 7):
        trainer = a_trainer(tmp_path / "run", Breaks(step), **settings)
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        trainer.offload_engine.close()
        assert hf_lohan.last_step(tmp_path / "run") == step
        resume = "last_step"
    trainer = a_trainer(tmp_path / "run", **settings)
    trainer.train(resume_from_checkpoint=True)
    assert_same(outcome(trainer), uninterrupted)


@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_an_interrupt_within_step(
    clip: str, tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever in it: the step counts whole or not at all, and what was held for it is gone."""
    from hf_lohan.device import WorkThread

    breaks = Breaks(-1)
    # Planning asks the thread, too, but between steps.
    trainer = a_trainer(tmp_path / "run", breaks, offload={"clip": clip, "activations": "recompute"})
    stock_call = WorkThread.call
    num_calls = when = 0

    def interrupted_call(thread: Any, command: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        if num_calls == when:
            thread.put(command)  # it runs, but nobody waits for it
            raise KeyboardInterrupt
        return stock_call(thread, command)

    resume = None
    for number in (4, 5, 6, 2, 3, 4):
        num_calls, when = 0, number
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(WorkThread, "call", interrupted_call)
            trainer.train(resume_from_checkpoint=resume)
        resume = "last_step" if hf_lohan.last_step(tmp_path / "run") is not None else None
    trainer.train(resume_from_checkpoint="last_step")
    assert_same(outcome(trainer), uninterrupted)


def lora_model() -> Any:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(5)
    return get_peft_model(tiny_model("llama"), LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def half_frozen_model() -> Any:
    """Frozen parameters that share a granule, which only has one home."""
    model = tiny_model("llama")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("norm" not in name and "mlp" not in name)
    return model


@pytest.mark.parametrize("make_model", [lora_model, half_frozen_model])
def test_with_frozen_weights(make_model: Any, tmp_path: Path) -> None:
    def trainer(folder: str, *callbacks: TrainerCallback) -> Any:
        return hf_lohan.Trainer(
            make_model(),
            arguments(tmp_path / folder, **SETTINGS),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
        )

    whole = trainer("whole")
    whole.train()
    broken = trainer("run", Breaks(5))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.offload_engine.close()
    looked_at = trainer("run")
    looked_at.evaluate(dataset(2))  # loads the frozen weights over themselves
    looked_at.offload_engine.close()
    assert hf_lohan.last_step(tmp_path / "run") == 5
    again = trainer("run")
    again.train(resume_from_checkpoint="last_step")
    assert_same(outcome(again), outcome(whole))


def test_in_the_same_trainer(tmp_path: Path, uninterrupted: Any) -> None:
    """What a notebook does after an interrupt."""
    breaks = Breaks(4)
    trainer = a_trainer(tmp_path / "run", breaks)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    breaks.step = -1
    trainer.train(resume_from_checkpoint="last_step")
    assert_same(outcome(trainer), uninterrupted)


def test_a_model_given_by_path(tmp_path: Path) -> None:
    """Loading the checkpoint again does not cost the steps that were taken."""
    tiny_model("llama").save_pretrained(tmp_path / "model")

    def trainer(folder: str, *callbacks: TrainerCallback) -> Any:
        return hf_lohan.Trainer(
            model=str(tmp_path / "model"),
            args=arguments(tmp_path / folder, **SETTINGS),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
        )

    whole = trainer("whole")
    whole.train()
    broken = trainer("run", Breaks(5))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.offload_engine.close()
    again = trainer("run")
    again.train(resume_from_checkpoint="last_step")
    assert_same(outcome(again), outcome(whole))


def test_sigterm_finishes_and_commits_the_step(tmp_path: Path, uninterrupted: Any) -> None:
    trainer = a_trainer(tmp_path / "run", Breaks(3, lambda: signal.raise_signal(signal.SIGTERM)))
    with pytest.raises(SystemExit) as exited:
        trainer.train()
    assert exited.value.code == 143
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert hf_lohan.last_step(tmp_path / "run") == 4
    trainer = a_trainer(tmp_path / "run")
    trainer.train(resume_from_checkpoint="last_step")
    assert_same(outcome(trainer), uninterrupted)


def test_true_takes_what_is_newer(tmp_path: Path, uninterrupted: Any) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2}
    trainer = a_trainer(tmp_path / "run", Breaks(5), **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.offload_engine.close()
    resumed = a_trainer(tmp_path / "run", **settings)
    resumed.train(resume_from_checkpoint=True)
    assert resumed._resumes is not None and resumed._resumes.facts["global_step"] == 5
    assert_same(outcome(resumed), uninterrupted)
    elsewhere = a_trainer(tmp_path / "run", **settings, offload={"ssd": str(tmp_path / "other_drive")})
    elsewhere.args.max_steps = 9
    elsewhere.train(resume_from_checkpoint=True)  # its store knows nothing: the last checkpoint is what there is
    assert elsewhere._resumes is None
    assert elsewhere.state.global_step == 9
    elsewhere.offload_engine.close()


def test_the_end_of_an_epoch_belongs_to_its_last_step(tmp_path: Path) -> None:
    """Evaluation and logging at the end of an epoch come after the step, and are neither lost nor repeated."""
    settings = {"max_steps": -1, "num_train_epochs": 3, "eval_strategy": "epoch", "logging_strategy": "epoch"}

    def run(folder: str, *callbacks: TrainerCallback) -> Any:
        return a_trainer(tmp_path / folder, *callbacks, rows=dataset(8), **settings)

    whole = run("whole")
    whole.train()
    broken = run("run", Breaks(whole.state.max_steps // 3))
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.offload_engine.close()
    again = run("run")
    again.train(resume_from_checkpoint="last_step")

    def evaluations(trainer: Any) -> list[tuple[int, float]]:
        return [(row["step"], row["eval_loss"]) for row in trainer.state.log_history if "eval_loss" in row]

    assert evaluations(again) == evaluations(whole)
    assert len(evaluations(whole)) == 3
    assert_same(outcome(again), outcome(whole))


def test_a_run_that_had_ended_takes_no_further_step(tmp_path: Path, uninterrupted: Any) -> None:
    first = a_trainer(tmp_path / "run")
    first.train()
    first.offload_engine.close()
    again = a_trainer(tmp_path / "run")
    again.train(resume_from_checkpoint="last_step")
    assert_same(outcome(again), uninterrupted)


def test_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "run")
    with pytest.raises(ValueError, match="no step has been committed in"):
        trainer.train(resume_from_checkpoint="last_step")
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)
    assert hf_lohan.last_step(tmp_path / "run") is None


def test_another_run_does_not_take_these_steps_for_its_own(tmp_path: Path) -> None:
    offload = {"ssd": str(tmp_path / "drive")}
    first = a_trainer(tmp_path / "first", max_steps=2, offload=offload)
    first.train()
    first.offload_engine.close()
    second = a_trainer(tmp_path / "second", offload=offload)
    with pytest.raises(ValueError, match=r"holds steps of the run in .*first, not of that in .*second"):
        second.train(resume_from_checkpoint="last_step")


def test_forwards_and_backwards_before_training_cost_no_step(tmp_path: Path) -> None:
    old = a_trainer(tmp_path / "run", max_steps=2)
    old.train()
    old.offload_engine.close()
    new = a_trainer(tmp_path / "run", max_steps=3)
    new.evaluate(dataset(2))
    new.model.train()(**tiny_batch(seed=0)).loss.backward()
    new.model.zero_grad()
    new.offload_engine.settle()
    assert hf_lohan.last_step(tmp_path / "run") == 2
    new.train(resume_from_checkpoint="last_step")
    assert new.state.global_step == 3
    new.offload_engine.close()


def test_callbacks_may_log_tensors_and_save_in_their_own_way(tmp_path: Path) -> None:
    class Own(hf_lohan.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"seen": torch.tensor(float(self.state.global_step))})
            return super().training_step(*args, **kwargs)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Path(self.args.output_dir, "mine").mkdir(exist_ok=True)

    trainer = Own(
        tiny_model("llama"),
        arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1),
        train_dataset=dataset(),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
    )
    trainer.train()
    trainer.offload_engine.close()
    assert hf_lohan.last_step(tmp_path) == 3


def test_persistent_buffers_belong_to_the_step(tmp_path: Path) -> None:
    """Router biases, running statistics: no parameter, but part of the model's state."""
    from hf_lohan.integrations.export import export

    def trainer(*callbacks: TrainerCallback) -> Any:
        model = tiny_model("llama")
        model.register_buffer("num_forwards", torch.zeros(()))
        model.register_forward_pre_hook(lambda module, _: module.num_forwards.add_(1) and None)
        return hf_lohan.Trainer(
            model,
            arguments(tmp_path, max_steps=4),
            train_dataset=dataset(),
            callbacks=list(callbacks),
            offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
        )

    class Stops(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = state.global_step == 3

    first = trainer(Stops())
    first.train()
    first.offload_engine.close()
    second = trainer()
    second.train(resume_from_checkpoint="last_step")
    assert second.model.num_forwards.item() == 4
    second.offload_engine.close()
    export(tmp_path, tmp_path / "out")


def test_a_new_run_ends_the_old_ones_steps(tmp_path: Path) -> None:
    """Not before it begins to train: loading alone costs nothing."""
    old = a_trainer(tmp_path / "run", max_steps=2)
    old.train()
    old.offload_engine.close()
    new = a_trainer(tmp_path / "run", Breaks(0))
    new.evaluate(dataset().select(range(2)))
    assert hf_lohan.last_step(tmp_path / "run") == 2
    with pytest.raises(KeyboardInterrupt):
        new.train()
    new.offload_engine.close()
    assert hf_lohan.last_step(tmp_path / "run") is None


def test_one_version_is_torn_by_a_crash_and_says_where_to_go_on(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "offload": {"durability": "checkpoint"}}
    trainer = a_trainer(tmp_path / "run", Breaks(3), **settings)
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    trainer.offload_engine.close()
    again = a_trainer(tmp_path / "run", **settings)
    with pytest.raises(ValueError, match=r"one version .*durability: checkpoint.*resume from .*checkpoint-2"):
        again.train(resume_from_checkpoint="last_step")
    from hf_lohan.integrations.export import export

    with pytest.raises(ValueError, match="checkpoint-2"):
        export(tmp_path / "run", tmp_path / "out")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 8
    again.offload_engine.close()
    export(tmp_path / "run", tmp_path / "out")  # a run that ended leaves its store whole


@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt2"])
def test_export_is_what_save_model_writes(family: str, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from hf_lohan.integrations.export import export

    trainer = a_trainer(tmp_path / "run", family=family, max_steps=2)
    trainer.train()
    trainer.save_model(str(tmp_path / "saved"))
    trainer.offload_engine.close()
    assert export(tmp_path / "run", tmp_path / "exported") == 2
    models = [AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("saved", "exported")]
    for (name, saved), exported in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(saved, exported), name
    batch = tiny_batch(seed=1)
    assert torch.equal(models[0](**batch).loss, models[1](**batch).loss)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("saved", "exported")]
    assert configs[0] == configs[1]


def test_a_moved_run_is_found(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "run", max_steps=2)
    trainer.train()
    trainer.offload_engine.close()
    (tmp_path / "run").rename(tmp_path / "moved")
    assert hf_lohan.last_step(tmp_path / "moved") == 2
    moved = a_trainer(tmp_path / "moved", max_steps=3)
    moved.train(resume_from_checkpoint="last_step")
    assert moved.state.global_step == 3
    moved.offload_engine.close()


def test_what_is_on_disk_is_private(tmp_path: Path) -> None:
    trainer = a_trainer(tmp_path / "run", max_steps=1)
    trainer.train()
    trainer.offload_engine.close()
    trainer = a_trainer(tmp_path / "run", max_steps=2)
    trainer.train(resume_from_checkpoint="last_step")
    trainer.offload_engine.close()
    for folder in (tmp_path / "run" / "_lohan" / "store", tmp_path / "run" / "_lohan" / "last_step"):
        for path in (folder, *folder.rglob("*")):
            assert path.stat().st_mode & 0o077 == 0, path

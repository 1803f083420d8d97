"""A run resumes only from its own steps, and not from overwritten or torn ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from interrupted_runs import InterruptAfter, assert_same, interrupt, make_trainer, train_to_end
from trajectories import arguments, assert_same_tensors, dataset

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model


def test_resuming_without_a_committed_step_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run")
    with pytest.raises(ValueError, match="no step has been committed in"):
        trainer.train(resume_from_checkpoint="last_step")
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        trainer.train(resume_from_checkpoint=True)
    assert hf_lohan.last_step(tmp_path / "run") is None


def test_steps_of_another_run_are_refused(tmp_path: Path) -> None:
    offload = {"ssd": str(tmp_path / "drive")}
    first = make_trainer(tmp_path / "first", max_steps=2, offload=offload)
    train_to_end(first)
    second = make_trainer(tmp_path / "second", offload=offload)
    with pytest.raises(ValueError, match=r"has steps of the run in .*first, and this run's output_dir is .*second"):
        second.train(resume_from_checkpoint="last_step")


def test_a_new_run_logs_which_step_it_overwrites(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def run(**options: Any) -> str:
        caplog.clear()
        trainer = make_trainer(tmp_path / "run", max_steps=3 if options else 2)
        trainer.train(**options)
        trainer.offload_engine.close()
        return caplog.text

    assert "is overwritten" not in run()
    log = run()
    assert f"step 2, the last committed step of the run in {tmp_path / 'run'}, is overwritten" in log
    assert "this run begins at step 0; to resume from such a step, call trainer.train(" in log
    assert "is overwritten" not in run(resume_from_checkpoint="last_step")


def test_forward_and_backward_before_training_keep_the_last_step(tmp_path: Path) -> None:
    old = make_trainer(tmp_path / "run", max_steps=2)
    train_to_end(old)
    new = make_trainer(tmp_path / "run", max_steps=3)
    new.evaluate(dataset(2))
    new.model.train()(**tiny_batch(seed=0)).loss.backward()
    new.model.zero_grad()
    new.offload_engine.wait_for_updates()
    assert hf_lohan.last_step(tmp_path / "run") == 2
    new.train(resume_from_checkpoint="last_step")
    assert new.state.global_step == 3
    new.offload_engine.close()


def test_subclasses_may_log_tensors_and_save_differently(tmp_path: Path) -> None:
    class CustomTrainer(hf_lohan.Trainer):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            self.log({"seen": torch.tensor(float(self.state.global_step))})
            return super().training_step(*args, **kwargs)

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            Path(self.args.output_dir, "mine").mkdir(exist_ok=True)

    trainer = CustomTrainer(
        tiny_model("llama"),
        arguments(tmp_path, max_steps=3, save_strategy="steps", save_steps=1),
        train_dataset=dataset(),
        offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB"},
    )
    train_to_end(trainer)
    assert hf_lohan.last_step(tmp_path) == 3


def test_a_new_run_discards_the_steps_of_the_old_one(tmp_path: Path) -> None:
    """A new run discards old steps when it begins to train, not when it loads."""
    old = make_trainer(tmp_path / "run", max_steps=2)
    train_to_end(old)
    new = make_trainer(tmp_path / "run", InterruptAfter(0))
    new.evaluate(dataset().select(range(2)))
    assert hf_lohan.last_step(tmp_path / "run") == 2
    interrupt(new)
    assert hf_lohan.last_step(tmp_path / "run") is None


def test_the_error_of_a_torn_single_version_store_names_the_checkpoint(tmp_path: Path) -> None:
    settings = {"save_strategy": "steps", "save_steps": 2, "offload": {"durability": "checkpoint"}}
    trainer = make_trainer(tmp_path / "run", InterruptAfter(3), **settings)
    interrupt(trainer)
    again = make_trainer(tmp_path / "run", **settings)
    with pytest.raises(ValueError, match=r"one version .*durability: checkpoint.*resume from .*checkpoint-2"):
        again.train(resume_from_checkpoint="last_step")
    from hf_lohan.huggingface.models.export import export_model

    with pytest.raises(ValueError, match="checkpoint-2"):
        export_model(tmp_path / "run", tmp_path / "out")
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 6
    again.offload_engine.close()
    export_model(tmp_path / "run", tmp_path / "out")  # a finished run leaves its store whole


def test_a_moved_run_resumes(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path / "run", max_steps=2)
    train_to_end(trainer)
    (tmp_path / "run").rename(tmp_path / "moved")
    assert hf_lohan.last_step(tmp_path / "moved") == 2
    moved = make_trainer(tmp_path / "moved", max_steps=3)
    moved.train(resume_from_checkpoint="last_step")
    assert moved.state.global_step == 3
    moved.offload_engine.close()


def test_a_restarted_attempt_does_not_continue_another_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first attempt failed before it trained, and the folder has the store of a run that another launch made."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "other")
    expected = train_to_end(make_trainer(tmp_path / "run"))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert_same(train_to_end(make_trainer(tmp_path / "run")), expected)
    assert "attempt 2 of this run continues from its beginning" in caplog.text


def test_a_restarted_attempt_continues_from_a_checkpoint_without_kept_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"offload": {"durability": "checkpoint"}, "save_strategy": "steps", "save_steps": 2}
    expected = train_to_end(make_trainer(tmp_path / "undisturbed", **settings))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    interrupt(make_trainer(tmp_path / "run", InterruptAfter(5), **settings))
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    ours = train_to_end(make_trainer(tmp_path / "run", **settings))
    assert_same_tensors(ours[1], expected[1])  # upstream begins new sums of losses after a checkpoint

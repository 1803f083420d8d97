"""A resumed run sees the data of an epoch in the order of an uninterrupted run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from equal_tensors import assert_same_tensors
from interrupted_runs import InterruptAfter, assert_same, interrupt, make_trainer, outcome_of, train_to_end
from trajectories import dataset
from transformers import TrainerCallback


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    "settings",
    [{"accelerator_config": {"use_seedable_sampler": False}}, {"train_sampling_strategy": "group_by_length"}],
    ids=["torch_sampler", "by_length"],
)
def test_a_resumed_epoch_keeps_its_order(settings: dict[str, Any], tmp_path: Path) -> None:
    """Resume within the third epoch, from the last step and from a checkpoint."""
    settings = {"gradient_accumulation_steps": 1, "max_steps": 9, "logging_steps": 1, "rows": dataset(6), **settings}
    whole = make_trainer(tmp_path / "whole", family="llama", **settings)
    expected = train_to_end(whole)
    saving = {**settings, "save_strategy": "steps", "save_steps": 7}
    broken = make_trainer(tmp_path / "run", InterruptAfter(8), family="llama", **saving)
    interrupt(broken)
    for resume in ("last_step", str(tmp_path / "run" / "checkpoint-7")):
        torch.manual_seed(99)
        again = make_trainer(tmp_path / "run", family="llama", **saving)
        assert_same(train_to_end(again, resume), expected)


@pytest.mark.slow
@pytest.mark.parametrize("resume", [pytest.param("last_step", marks=pytest.mark.slow), "checkpoint-6"])
def test_an_epoch_that_began_with_a_resume_keeps_its_order(resume: str, tmp_path: Path) -> None:
    """Interrupt at the end of the second epoch, and again within the third."""
    settings = {"gradient_accumulation_steps": 1, "max_steps": 9, "logging_steps": 1, "rows": dataset(6)}
    settings |= {"accelerator_config": {"use_seedable_sampler": False}, "family": "llama"}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    expected, saving = outcome_of(whole), {**settings, "save_strategy": "steps", "save_steps": 6}
    from_where = resume if resume == "last_step" else str(tmp_path / "run" / resume)
    for step, resumed in ((6, None), (7, from_where)):
        broken = make_trainer(tmp_path / "run", InterruptAfter(step), **saving)
        interrupt(broken, resumed)
        torch.manual_seed(99)  # a new process has another seed
    again = make_trainer(tmp_path / "run", **saving)
    assert_same(train_to_end(again, "last_step"), expected)


class EndsEpochAfter(TrainerCallback):
    def __init__(self, step: int) -> None:
        self._step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_epoch_stop |= state.global_step == self._step


@pytest.mark.parametrize("accumulated", [pytest.param(1, marks=pytest.mark.slow), 2])
@pytest.mark.parametrize("kind", ["iterable", "ended_by_callback"])
def test_epochs_of_unequal_length_resume_at_their_place(kind: str, accumulated: int, tmp_path: Path) -> None:
    """Five batches are an epoch without a known length, so that two micro-batches end it within a step. Or a callback
    ends the first epoch."""
    rows: Any = dataset(10)
    rows = rows.to_iterable_dataset(2).shuffle(seed=1, buffer_size=4) if kind == "iterable" else rows
    saving = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "epoch", "logging_steps": 1}
    settings = {"max_steps": 9, "gradient_accumulation_steps": accumulated, "rows": rows, **saving}

    def run(folder: str, *callbacks: TrainerCallback) -> Any:
        ending = (EndsEpochAfter(2),) if kind == "ended_by_callback" else ()
        return make_trainer(tmp_path / folder, *ending, *callbacks, family="llama", **settings)

    expected = train_to_end(run("whole"))
    for step in (2, 5):
        interrupt(run("run", InterruptAfter(step)), "last_step" if step > 2 else None)
    number = 4 if kind == "iterable" else 2
    for resume in ("last_step", str(tmp_path / "run" / f"checkpoint-{number}")):
        assert_same(train_to_end(run("run"), resume), expected)


def test_an_iterable_dataset_goes_on_at_its_row_if_max_steps_grows(tmp_path: Path) -> None:
    """The end of the first run is no end of its epoch."""
    settings = {"rows": dataset(12).to_iterable_dataset(), "lr_scheduler_type": "constant", "logging_steps": 1}

    def run(folder: str, max_steps: int, resume: str | None = None) -> Any:
        return train_to_end(make_trainer(tmp_path / folder, max_steps=max_steps, family="llama", **settings), resume)

    expected = run("whole", 3)
    run("run", 2)
    assert_same_tensors(run("run", 3, "last_step")[1], expected[1])


def test_a_checkpoint_within_a_step_repeats_the_first_micro_batch_of_the_step(tmp_path: Path) -> None:
    """The fifth batch ends an epoch without a known length, and a checkpoint is saved. Its gradients are not in it."""
    settings = {"rows": dataset(10).to_iterable_dataset(), "max_steps": 4, "save_strategy": "epoch", "logging_steps": 1}
    expected = train_to_end(make_trainer(tmp_path, family="llama", **settings))
    again = make_trainer(tmp_path, family="llama", **settings)
    assert_same(train_to_end(again, str(tmp_path / "checkpoint-2")), expected)

"""Trainer classes order their arguments differently, so the mixin passes them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer as StockTrainer
from transformers import TrainingArguments

import hf_lohan
from hf_lohan.testing.models import tiny_batch, tiny_model


class Scored(StockTrainer):  # type: ignore[misc]
    """Has an extra argument between two of Trainer's, as TRL's trainers do."""

    def __init__(self, model: Any, scorer: Any, args: Any = None, **kwargs: Any) -> None:
        self.scorer = scorer
        super().__init__(model=model, args=args, **kwargs)


class Logged(Scored):
    """Passes on unknown arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)


@pytest.mark.parametrize("base", [Scored, Logged])
@pytest.mark.parametrize("offload", [None, {"cpu_memory": "4MiB", "gpu_memory": "2MiB"}], ids=["stock", "offloaded"])
def test_arguments_by_position_and_by_name_are_assigned_right(base: type, offload: Any, tmp_path: Path) -> None:
    class Ours(hf_lohan.OffloadTrainerMixin, base):  # type: ignore[misc]
        pass

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)
    rows = [{name: value[0] for name, value in tiny_batch().items()}]
    by_position = Ours(tiny_model("llama"), "by length", args, train_dataset=rows, offload=offload)
    by_name = Ours(scorer="by length", model=tiny_model("llama"), args=args, train_dataset=rows, offload=offload)
    for trainer in (by_position, by_name):
        assert (trainer.scorer, trainer.args, trainer.train_dataset) == ("by length", args, rows)


@pytest.mark.parametrize("path", ["models/llama", Path("models/llama")], ids=["str", "Path"])
def test_a_path_without_offload_is_refused(path: Any, tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(
        ValueError,
        match=r"model=.models/llama. is the path or the name of a model, and only an offloading Trainer loads",
    ):
        hf_lohan.Trainer(model=path, args=args)


def test_training_arguments_as_model_are_refused(tmp_path: Path) -> None:
    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(ValueError, match=r'write Trainer\(model=\.\.\., args=args, offload="lohan"\)'):
        hf_lohan.Trainer(args, offload="lohan")


def test_too_many_arguments_are_an_error_as_in_any_call(tmp_path: Path) -> None:
    class Ours(hf_lohan.OffloadTrainerMixin, Scored):
        pass

    args = TrainingArguments(str(tmp_path), use_cpu=True, report_to=[])
    with pytest.raises(TypeError, match="takes 3 arguments by position, not 4"):
        Ours(tiny_model("llama"), "by length", args, "another", offload="lohan")
    with pytest.raises(TypeError, match="got 'args' by position and by name"):
        Ours(tiny_model("llama"), "by length", args, args=args, offload="lohan")

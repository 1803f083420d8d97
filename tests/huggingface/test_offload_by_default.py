"""Trainer, replaced for scripts that know only transformers."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.trainer

import hf_lohan
from hf_lohan.config import ConfigError
from hf_lohan.huggingface import engine_of
from hf_lohan.huggingface.launch import offload_by_default
from hf_lohan.testing.models import tiny_batch, tiny_model


def arguments(tmp_path: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)


def evaluates_offloaded(trainer: Any) -> bool:
    batch = tiny_batch()
    trainer.evaluate([{name: values[0] for name, values in batch.items()}])
    return engine_of(trainer.model) is not None


def test_every_class_derived_from_trainer_offloads_by_default(tmp_path: Path) -> None:
    import transformers.trainer_seq2seq  # as if a script's library had imported it before

    with offload_by_default("lohan"):
        from transformers import Seq2SeqTrainer, Trainer
        from transformers.trainer import Trainer as SameTrainer

        class Derived(Trainer):  # type: ignore[misc]
            pass

        assert Trainer is SameTrainer
        assert issubclass(Seq2SeqTrainer, Trainer)
        for number, kind in enumerate((Trainer, Derived, hf_lohan.Trainer)):
            trainer = kind(tiny_model("llama"), arguments(tmp_path / str(number)))
            assert isinstance(trainer, Trainer)
            assert evaluates_offloaded(trainer)
        seq2seq_args = transformers.Seq2SeqTrainingArguments(output_dir=str(tmp_path / "s"), use_cpu=True, report_to=[])
        assert evaluates_offloaded(Seq2SeqTrainer(tiny_model("llama"), seq2seq_args))


def test_an_explicit_offload_wins(tmp_path: Path) -> None:
    with offload_by_default("lohan"):
        stock = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "stock"), offload=None)
        assert not evaluates_offloaded(stock)
        own = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "own"), offload={"prefetch_blocks": 3})
        assert evaluates_offloaded(own)
        assert own.offload_engine.config.prefetch_blocks == 3


def test_a_script_may_use_the_mixin_itself(tmp_path: Path) -> None:
    with offload_by_default("lohan"):

        class Mixed(hf_lohan.OffloadTrainerMixin, transformers.Trainer):  # type: ignore[misc]
            pass

        assert evaluates_offloaded(Mixed(tiny_model("llama"), arguments(tmp_path)))


def test_the_replacement_is_undone() -> None:
    import transformers.trainer_seq2seq

    def state() -> list[object]:
        return [
            transformers.Trainer,
            transformers.trainer.Trainer,
            hf_lohan.Trainer,
            hf_lohan.OffloadTrainerMixin,
            transformers.trainer_seq2seq.Seq2SeqTrainer.__mro__,
        ]

    before = state()
    with pytest.raises(KeyError), offload_by_default("lohan"):
        assert state() != before
        raise KeyError
    assert state() == before
    with pytest.raises(ConfigError), offload_by_default("no such file"):
        pass
    assert state() == before


def test_the_replacement_looks_like_the_trainer_it_replaces() -> None:
    stock = transformers.Trainer
    with offload_by_default("lohan"):
        assert inspect.signature(transformers.Trainer.__init__) == inspect.signature(stock.__init__)
        assert transformers.Trainer.__name__ == "Trainer"
        assert issubclass(transformers.Trainer, stock)

"""`offload_by_default` replaces Trainer for scripts that use only transformers."""

from __future__ import annotations

import inspect
import logging
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import transformers
import transformers.trainer
from accelerate.commands import launch as accelerate_launch

import hf_lohan
from hf_lohan import engine_of
from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.huggingface import launch
from hf_lohan.huggingface.unmodified_scripts import offload_by_default
from hf_lohan.testing.models import tiny_batch, tiny_model


def arguments(tmp_path: Path) -> transformers.TrainingArguments:
    return transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True)


def evaluates_offloaded(trainer: Any) -> bool:
    batch = tiny_batch()
    trainer.evaluate([{name: values[0] for name, values in batch.items()}])
    return engine_of(trainer.model) is not None


def test_every_class_derived_from_trainer_offloads_by_default(tmp_path: Path) -> None:
    import transformers.trainer_seq2seq  # a library of a script may have imported it before

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
        args = hf_lohan.TrainingArguments(str(tmp_path / "args"), use_cpu=True, offload={"prefetch_blocks": 4})
        assert transformers.Trainer(tiny_model("llama"), args)._offload_config.prefetch_blocks == 4


def test_settings_of_the_command_are_used_or_a_warning_names_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = {"cpu_memory": "64MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / "ssd")}
    not_used = "the script has its own offload settings"
    tiny_model("llama").save_pretrained(tmp_path / "base")
    with offload_by_default(OffloadConfig(trace=True)):
        streamed = hf_lohan.from_pretrained(tmp_path / "base", offload=own, torch_device="cpu")
        engine = engine_of(streamed)
        assert engine.timeline.is_tracing and engine.config.trace
        engine.close()
        trainer = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "run"), offload=own)
        assert evaluates_offloaded(trainer) and trainer.offload_engine.timeline.is_tracing
        trainer.offload_engine.close()
    assert not_used not in caplog.text
    with offload_by_default({"cpu_memory": "65MiB"}):
        trainer = transformers.Trainer(tiny_model("llama"), arguments(tmp_path / "other"), offload=own)
        assert evaluates_offloaded(trainer) and not trainer.offload_engine.timeline.is_tracing
        trainer.offload_engine.close()
    assert caplog.text.count(not_used) == 1


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
    assert not hasattr(hf_lohan.Accelerator.__init__, "__wrapped__")  # ours is as it was written
    assert not hasattr(hf_lohan.Trainer.__init__, "__wrapped__")


def test_the_replacement_looks_like_the_trainer_it_replaces() -> None:
    stock = transformers.Trainer
    with offload_by_default("lohan"):
        assert inspect.signature(transformers.Trainer.__init__) == inspect.signature(stock.__init__)
        assert transformers.Trainer.__name__ == "Trainer"
        assert issubclass(transformers.Trainer, stock)


@pytest.mark.parametrize(("code", "is_logged"), [(None, True), (0, True), (1, False), ("an error", False)])
def test_a_program_that_offloads_nothing_gets_a_warning_at_exit(
    code: int | str | None, is_logged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING), pytest.raises(SystemExit) as caught, offload_by_default("lohan"):
        raise SystemExit(code)  # every installed program ends with `sys.exit(main())`
    assert caught.value.code == code
    assert ("nothing was offloaded" in caplog.text) == is_logged


def test_a_script_that_a_program_launches_is_offloaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """TRL's command line starts its scripts through accelerate's launcher."""
    launched: list[tuple[Namespace, OffloadConfig]] = []

    def note(options: Namespace) -> None:
        launched.append((options, OffloadConfig.load(options.training_script_args[1])))

    monkeypatch.setattr(launch, "launch_command", note)
    offload = {"prefetch_blocks": 3, "ssd": [{"path": str(tmp_path), "capacity": "1GiB"}], "trace": True}
    with offload_by_default(offload):
        from accelerate.commands.launch import launch_command, launch_command_parser

        launch_command(launch_command_parser().parse_args(["--num_processes", "1", "sft.py", "--lr", "1"]))
    ((options, config),) = launched
    assert (options.training_script, options.module) == ("hf_lohan.run", True)
    assert options.training_script_args[0] == "--offload"
    assert options.training_script_args[2:] == ["sft.py", "--lr", "1"]
    assert config == OffloadConfig.load(offload)
    assert "nothing was offloaded" not in caplog.text, "the script logs this itself"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"each would start sft\.py"), offload_by_default(offload):
        accelerate_launch.launch_command(launch_command_parser().parse_args(["sft.py"]))

"""Long work shows its progress on a terminal, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import sys
import termios
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import ProgressCallback, TrainingArguments
from transformers.utils import logging as transformers_logging

import hf_lohan
from hf_lohan.cli import plan_request
from hf_lohan.huggingface import progress
from hf_lohan.huggingface.models.export import export_model
from hf_lohan.huggingface.progress import advance, live_line, long_work
from hf_lohan.testing.models import tiny_batch, tiny_model

OFFLOAD = {"cpu_memory": "5MiB", "gpu_memory": "1MiB"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """Make stderr a pseudo-terminal. Return a function that returns the text written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    monkeypatch.setattr(progress, "DELAY_S", 0)
    transformers_logging.enable_progress_bar()
    with os.fdopen(theirs, "w") as stderr:
        # pytest replaces `sys.stderr` again before the test runs.
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))

        def written() -> str:
            stderr.flush()
            parts = []
            while select.select([ours], [], [], 0.2)[0]:  # the text arrives a little later
                parts.append(os.read(ours, 1 << 16))
            return b"".join(parts).decode(errors="replace")

        yield written
    os.close(ours)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def test_loading_planning_merging_and_saving_show_progress(terminal: Callable[[], str], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    given: dict[str, Any] = {"torch_device": "cpu", "default_ssd_path": tmp_path / "store", "peft_config": lora()}
    terminal()
    model = hf_lohan.from_pretrained(tmp_path / "base", OFFLOAD, **given)
    shown = terminal()
    assert f"streaming {tmp_path / 'base'}: 100%" in shown
    assert "B/s" in shown
    model.train()
    assert torch.isfinite(model(**tiny_batch()).loss)
    assert "planning the first step" in terminal()
    merged = model.merge_and_unload()
    assert "merging adapters: 100%" in terminal()
    merged.save_pretrained(tmp_path / "saved")
    assert f"saving {tmp_path / 'saved'}: 100%" in terminal()
    engine = hf_lohan.engine_of(merged)
    engine.close()


def test_planning_and_exporting_show_progress(
    terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    model = hf_lohan.from_pretrained(
        tmp_path / "base", OFFLOAD, torch_device="cpu", default_ssd_path=tmp_path / "store"
    )
    optimizer = hf_lohan.OffloadAdamW(model.parameters(), lr=1e-3, engine=hf_lohan.engine_of(model))
    model.train()(**tiny_batch()).loss.backward()
    optimizer.step()
    engine = hf_lohan.engine_of(model)
    engine.close()
    terminal()
    export_model(tmp_path / "store", tmp_path / "exported")
    shown = terminal()
    assert shown.count("saving ") > 0
    assert "100%" in shown
    seen = []

    def measured(*args: Any, **kwargs: Any) -> None:
        seen.append(terminal())
        raise ValueError("measured enough")

    monkeypatch.setattr(plan_request, "cached_hardware", measured)
    with pytest.raises(ValueError, match="measured enough"):
        plan_request.plan_run(plan_request.PlanRequest(model=str(tmp_path / "base"), batch_size=1, sequence_length=8))
    assert "measuring this machine" in seen[0]


@pytest.mark.parametrize("why", ["no terminal", "switched off"])
def test_no_progress_is_shown_without_a_terminal_or_if_switched_off(
    why: str, terminal: Callable[[], str], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    if why == "no terminal":
        monkeypatch.setattr(progress, "sys", sys)
    else:
        transformers_logging.disable_progress_bar()
    with long_work("reading", 10):
        advance(10)
    transformers_logging.enable_progress_bar()
    assert terminal() == ""
    assert capfd.readouterr() == ("", "")


def test_nested_work_has_one_line(terminal: Callable[[], str]) -> None:
    with long_work("outer", 20):
        with long_work("inner", 10):
            advance(10)
        advance(10)
    shown = terminal()
    assert "outer: 100%" in shown
    assert "inner" not in shown
    advance(10)  # without work in progress, nothing is shown
    assert terminal() == ""


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write a line for each block."""
    monkeypatch.setattr(progress, "_MIN_INTERVAL_S", 0)
    monkeypatch.setattr(progress, "_RATE_INTERVAL_S", 0)


def train(model: Any, folder: Path, **settings: Any) -> None:
    """Train three steps, and evaluate two batches."""
    ids = tiny_batch(batch_size=8)["input_ids"].tolist()
    rows = Dataset.from_dict({"input_ids": ids, "labels": ids})
    args = TrainingArguments(
        str(folder), max_steps=3, per_device_train_batch_size=2, per_device_eval_batch_size=4, report_to="none",
        use_cpu=True, **settings,
    )  # fmt: skip
    trainer = hf_lohan.Trainer(model, args, train_dataset=rows, eval_dataset=rows, offload=OFFLOAD)
    trainer.remove_callback(ProgressCallback)
    trainer.train()
    trainer.evaluate()
    trainer.offload_engine.close()


def test_training_shows_step_block_and_time(
    terminal: Callable[[], str], at_once: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tiny_model("llama", num_layers=2), tmp_path)
    shown = terminal()
    said = r"RAM: ([\d.]+) MiB of 5 MiB; device memory: ([\d.]+) KiB of 1 MiB"
    used = re.search(said, capsys.readouterr().out)
    assert used is not None and 0 < float(used[1]) <= 5 and 0 < float(used[2]) < 1024
    assert "step 1/3  planning the first step (on a new machine this measures the hardware) ..." in shown
    for where in ("forward block 1/5", "forward block 5/5", "backward block 1/5", "backward block 4/5"):
        assert re.search(rf"step 2/3  {where}  SSD [\d.e+-]+ GB/s  ETA \d\d:\d\d", shown), where
    evaluated = shown[shown.index("evaluation batch") :]
    assert "evaluation batch 1/2  forward block 3/5" in evaluated
    assert re.search(r"evaluation batch 2/2  forward block 5/5  SSD \S+ GB/s  ETA 00:00", evaluated)
    assert "backward" not in evaluated


def test_training_shows_no_progress_with_disable_tqdm(
    terminal: Callable[[], str], at_once: None, tmp_path: Path
) -> None:
    tiny_model("llama", num_layers=2).save_pretrained(tmp_path / "base")
    terminal()
    train(str(tmp_path / "base"), tmp_path / "run", disable_tqdm=True)
    shown = terminal()
    assert "block" not in shown and "streaming" not in shown and "planning" not in shown


def test_the_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = SimpleNamespace(s=1000.0)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: now.s))
    with live_line("step") as line:
        for number, seconds in enumerate((100.0, 10.0, 10.0), start=1):  # the first step measures hardware
            line.begin_step(number, 16, 20.0)
            line.enter_block("forward", 5, 32, lambda: 0)
            if number == 1:
                assert line.text(now.s + 5) == "step 1/16  forward block 5/32  ETA 05:15", "by the plan"
            now.s += seconds
        line.begin_step(4, 16, 20.0)
        line.enter_block("backward", 12, 32, lambda: 3_000_000_000)
        now.s += 4
        line.enter_block("backward", 13, 32, lambda: 9_000_000_000)
        assert line.text(now.s) == "step 4/16  backward block 13/32  SSD 1.5 GB/s  ETA 02:06"
        with long_work("saving the world"):
            assert line.text(now.s) == "step 4/16  saving the world ..."


def test_a_line_is_not_written_more_than_ten_times_a_second(terminal: Callable[[], str]) -> None:
    with long_work("reading", 100_000):
        for _ in range(100_000):
            advance(1)
    assert 2 <= terminal().count("\r") < 40

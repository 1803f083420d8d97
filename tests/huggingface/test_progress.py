"""Long work shows itself on a terminal, and nowhere else."""

from __future__ import annotations

import fcntl
import os
import pty
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
from transformers.utils import logging as transformers_logging

import hf_lohan
from hf_lohan.cli import plan_request
from hf_lohan.huggingface import progress
from hf_lohan.huggingface.export import export
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.testing.models import tiny_batch, tiny_model

OFFLOAD = {"cpu_memory": "5MiB", "gpu_memory": "1MiB"}


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], str]]:
    """stderr is a pseudo-terminal; gives what was written to it."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 160, 0, 0))
    monkeypatch.setattr(progress, "DELAY_S", 0)
    transformers_logging.enable_progress_bar()
    with os.fdopen(theirs, "w") as stderr:
        # pytest puts its own into `sys` once more before the test itself.
        monkeypatch.setattr(progress, "sys", SimpleNamespace(stderr=stderr))

        def written() -> str:
            stderr.flush()
            parts = []
            while select.select([ours], [], [], 0.2)[0]:  # what is written arrives a little later
                parts.append(os.read(ours, 1 << 16))
            return b"".join(parts).decode(errors="replace")

        yield written
    os.close(ours)


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=2, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")


def test_loading_planning_merging_and_saving_show_themselves(terminal: Callable[[], str], tmp_path: Path) -> None:
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
    assert engine is not None
    engine.close()


def test_planning_and_exporting_show_themselves(
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
    assert engine is not None
    engine.close()
    terminal()
    export(tmp_path / "store", tmp_path / "exported")
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
def test_it_is_quiet_where_nobody_looks(
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


def test_work_within_work_has_one_line(terminal: Callable[[], str]) -> None:
    with long_work("outer", 20):
        with long_work("inner", 10):
            advance(10)
        advance(10)
    shown = terminal()
    assert "outer: 100%" in shown
    assert "inner" not in shown
    advance(10)  # outside, nothing happens
    assert terminal() == ""


def test_a_line_is_not_written_more_than_ten_times_a_second(terminal: Callable[[], str]) -> None:
    with long_work("reading", 100_000):
        for _ in range(100_000):
            advance(1)
    assert 2 <= terminal().count("\r") < 40

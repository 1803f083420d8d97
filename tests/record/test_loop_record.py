"""The record of a loop without a Trainer: a line per step, a summary, a trace and a report."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

from hf_lohan import Accelerator, LohanPlugin, engine_of
from hf_lohan.report import write_report
from hf_lohan.testing.models import tiny_batch, tiny_model


def run_loop(project: Path | None, store: Path, *, num_steps: int, trace: bool = False, log: bool = True) -> None:
    plugin = LohanPlugin(offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(store), "trace": trace})
    accelerator = Accelerator(
        cpu=True, project_dir=project and str(project), lohan_plugin=plugin, gradient_accumulation_steps=2
    )
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))
    for _ in range(num_steps):
        for _ in range(2):
            with accelerator.accumulate(model):
                loss = model(**tiny_batch()).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
        if log:
            accelerator.log({"loss": loss.item(), "accuracy": 0.5})
    accelerator.end_training()
    engine = engine_of(model)
    engine.close()


def test_a_trace_is_written_when_training_ends(tmp_path: Path) -> None:
    run_loop(tmp_path / "project", tmp_path / "store", num_steps=1, trace=True)
    events = json.loads((tmp_path / "project" / "lohan" / "trace.json").read_text())["traceEvents"]
    assert {"compute", "ssd read", "ssd write", "cpu optimizer", "step"} <= {event.get("cat") for event in events}


def test_the_files_are_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        (tmp_path / "project").mkdir(mode=0o755)
        run_loop(tmp_path / "project", tmp_path / "store", num_steps=1, trace=True)
        write_report(tmp_path / "project")
    finally:
        os.umask(before)
    paths = list((tmp_path / "project").rglob("*"))
    assert {"config.json", "summary.json", "steps.jsonl", "trace.json", "report.html"} <= {path.name for path in paths}
    assert not [f"{path.name} {path.stat().st_mode:o}" for path in paths if path.stat().st_mode & 0o022]


def test_a_loop_in_a_project_can_be_reported_on(tmp_path: Path) -> None:
    run_loop(tmp_path / "project", tmp_path / "store", num_steps=3)
    folder = tmp_path / "project" / "lohan"
    lines = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line] == [1, 2, 3]
    assert {line["num_tokens"] for line in lines} == {2 * tiny_batch()["input_ids"].numel()}
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["is_finished"] and summary["num_steps"] == 3
    assert "3 steps" in write_report(tmp_path / "project").read_text()


def test_a_loop_without_a_project_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    run_loop(None, tmp_path / "store", num_steps=1, log=False)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_logged_values_that_are_not_numbers_are_ignored(tmp_path: Path) -> None:
    plugin = LohanPlugin(offload={"cpu_memory": "4MiB", "gpu_memory": "2MiB", "ssd": str(tmp_path / "store")})
    accelerator = Accelerator(cpu=True, project_dir=str(tmp_path), lohan_plugin=plugin)
    model, optimizer = accelerator.prepare(model := tiny_model("llama"), torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(tiny_batch()["input_ids"], labels=tiny_batch()["labels"]).loss)
    optimizer.step()
    no_numbers = {"learning_rate": [1e-3], "loss": {"train": 1.0}, "eval_loss": None}
    accelerator.log({**no_numbers, "grad_norm": torch.tensor(2.0)})
    engine = engine_of(model)
    engine.close()
    accelerator.end_training()  # the numbers are still recorded
    (line,) = (json.loads(line) for line in (tmp_path / "lohan" / "steps.jsonl").read_text().splitlines())
    assert line["grad_norm"] == 2.0 and "learning_rate" not in line and "loss" not in line
    assert line["num_tokens"] == tiny_batch()["input_ids"].numel()

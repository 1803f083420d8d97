"""The record of a run: a line per step, a trace and the report."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from small_trainer import small_trainer
from torch import Tensor
from transformers import TrainerCallback
from typer.testing import CliRunner

import hf_lohan
from hf_lohan.cli import app
from hf_lohan.costs import HardwareProfile, plan_offload
from hf_lohan.files import StorageError
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.timeline import COMPUTE, COMPUTE_WAITS, CPU_OPTIMIZER, D2H, SSD_READ, SSD_WRITE

NUM_STEPS, MORE_STEPS, BATCH_SIZE, ACCUMULATE, SEQUENCE_LENGTH = 6, 2, 2, 2, 16
SETTINGS = {"cpu_memory": "3MiB", "gpu_memory": "1MiB", "_resident_records": "none"}


def trainer_in(folder: Path, *, num_steps: int = NUM_STEPS, trace: bool = False) -> hf_lohan.Trainer:
    return small_trainer(
        folder,
        {**SETTINGS, "trace": trace},
        num_rows=64,
        max_steps=num_steps,
        gradient_accumulation_steps=ACCUMULATE,
        logging_steps=2,
        lr_scheduler_type="constant",
    )


def finish(trainer: hf_lohan.Trainer, **options: Any) -> dict[str, Any]:
    """Train and close. Return the losses, a weight, and the planned model and setup."""
    trainer.train(**options)
    engine = trainer.offload_engine
    weight: Tensor = engine.parameters.read_parameter("model.layers.1.mlp.up_proj.weight")
    plan = run_plan_of(engine)
    engine.close()
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    return {"losses": losses, "weight": weight, "model": plan.first.profile, "setup": plan.first.setup}


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """The last line of each step, in order."""
    lines = [json.loads(line) for line in (folder / "lohan" / "steps.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted(line["step"] for line in lines)
    return list({line["step"]: line for line in lines}.values())


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A traced run and its files."""
    folder = tmp_path_factory.mktemp("traced")
    result = finish(trainer_in(folder, trace=True))
    summary = json.loads((folder / "lohan" / "summary.json").read_text())
    trace = json.loads((folder / "lohan" / "trace.json").read_text())
    yield {"folder": folder, "lines": lines_of(folder), "summary": summary, "trace": trace, **result}


def test_the_record_has_one_line_per_step(run: dict[str, Any]) -> None:
    lines = run["lines"]
    assert [line["step"] for line in lines] == list(range(1, NUM_STEPS + 1))
    for line in lines:
        assert line["num_tokens"] == ACCUMULATE * BATCH_SIZE * SEQUENCE_LENGTH
        assert line["step_s"] >= line["between_s"] + line["forward_s"] + line["backward_s"]
        assert not line["is_skipped"]
        assert line["updates"] in ("deferred", "accepted", "redone")
        assert line["anon_rss_bytes"] > 3 << 20
        assert 0 < sum(line["cpu_pool_bytes"].values()) <= 3 << 20
        assert 0 < line["device_slots_bytes"] <= 1 << 20
        for lane in (COMPUTE, SSD_READ, CPU_OPTIMIZER):
            assert 0 <= line["busy_s"].get(lane, 0.0) <= line["step_s"] + 1e-5
        assert "weights" in line["waits_s"][COMPUTE_WAITS]


def test_logged_values_are_in_the_line_of_their_step(run: dict[str, Any]) -> None:
    logged = {line["step"]: line["loss"] for line in run["lines"] if "loss" in line}
    assert list(logged) == [2, 4, 6]
    assert list(logged.values()) == run["losses"]
    assert all({"grad_norm", "learning_rate"} <= line.keys() for line in run["lines"] if line["step"] in logged)


def test_bytes_of_steps_add_up_to_those_of_the_summary(run: dict[str, Any]) -> None:
    lines, summary = run["lines"], run["summary"]
    for name, lane in (("ssd_read_bytes", SSD_READ), ("ssd_write_bytes", SSD_WRITE)):
        during = sum(line[name] for line in lines) + lines[-1]["after"][name]
        assert lines[0]["before"][name] + during == summary[name]
        assert sum(part["bytes"].get(lane, 0) for part in (*lines, lines[-1]["after"])) == during
    assert summary["is_finished"]
    assert summary["num_planned_steps"] == NUM_STEPS


def test_the_floor_is_below_the_prediction(run: dict[str, Any]) -> None:
    summary = run["summary"]
    floors = summary["floor_by_resource_s"]
    assert 0 < max(floors.values()) <= summary["predicted_step_s"]
    assert summary["prediction"]["step_s"] == summary["predicted_step_s"]
    assert summary["measured_hardware"]["ssd"][0]["read_bytes_per_s"] > 0


@pytest.mark.parametrize("mixed", [None, 0.1, 1.0, 3.0])
def test_the_floor_is_below_the_prediction_for_any_mixed_rate(run: dict[str, Any], mixed: float | None) -> None:
    """The parameter `mixed` is the rate of mixed reads and writes divided by the rate of reads."""
    measured = HardwareProfile.from_mapping(run["summary"]["measured_hardware"])
    read_bytes_per_s = measured.ssd_read_bytes_per_s
    hardware = replace(
        measured,
        ssd_together_write_bytes_per_s=read_bytes_per_s,
        ssd_mixed_bytes_per_s=None if mixed is None else mixed * read_bytes_per_s,
    )
    plan = plan_offload(run["model"], hardware, run["setup"])
    floors = plan.prediction.floor_by_resource_s
    assert floors["ssd"] >= plan.prediction.ssd_read_bytes_per_step / read_bytes_per_s * (1 - 1e-9)
    assert max(floors.values()) <= plan.prediction.step_s * (1 + 1e-9)


def test_the_trace_has_tasks_of_every_lane(run: dict[str, Any]) -> None:
    events = [event for event in run["trace"]["traceEvents"] if event["ph"] == "X"]
    lanes = {event["cat"] for event in events}
    assert lanes >= {COMPUTE, D2H, SSD_READ, SSD_WRITE, CPU_OPTIMIZER, COMPUTE_WAITS, "step"}
    assert all({"pid", "tid", "ts", "dur", "name"} <= event.keys() and event["dur"] >= 0 for event in events)
    traced = {lane: sum(event["args"].get("bytes", 0) for event in events if event["cat"] == lane) for lane in lanes}
    assert traced[SSD_READ] == run["summary"]["ssd_read_bytes"], "the trace misses reads before the first step"
    assert traced[SSD_WRITE] == run["summary"]["ssd_write_bytes"]
    steps = [event for event in events if event["cat"] == "step"]
    assert [event["args"]["step"] for event in steps] == list(range(1, NUM_STEPS + 1))


def test_an_unwritable_record_changes_no_number(
    run: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "lohan" / "steps.jsonl").mkdir(parents=True)
    untraced = finish(trainer_in(tmp_path))
    assert untraced["losses"] == run["losses"]
    assert torch.equal(untraced["weight"], run["weight"])
    assert not (tmp_path / "lohan" / "trace.json").exists()
    assert "steps are not recorded" in caplog.text


class Break(TrainerCallback):
    """Interrupts training after a step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise KeyboardInterrupt


def test_an_interrupted_run_is_recorded_and_continues_in_the_same_file(tmp_path: Path) -> None:
    broken = trainer_in(tmp_path, trace=True)
    broken.add_callback(Break())
    with pytest.raises(KeyboardInterrupt):
        broken.train()
    broken.offload_engine.close()
    assert [line["step"] for line in lines_of(tmp_path)] == [1, 2, 3]
    assert not json.loads((tmp_path / "lohan" / "summary.json").read_text())["is_finished"]
    assert json.loads((tmp_path / "lohan" / "trace.json").read_text())["traceEvents"]
    page = report_of(tmp_path)
    assert f"it is at step 3 of {NUM_STEPS}" in page

    steps = tmp_path / "lohan" / "steps.jsonl"
    # steps 4 and 5 were never committed
    steps.write_text(steps.read_text() + '{"step": 4, "step_s": 1}\n{"step": 5, "st')
    finish(trainer_in(tmp_path, num_steps=3 + MORE_STEPS), resume_from_checkpoint="last_step")
    lines = lines_of(tmp_path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    assert all("busy_s" in line for line in lines)
    assert "before" in lines[3] and "after" in lines[4]


def report_of(folder: Path) -> str:
    output = folder / "report.html"
    result = CliRunner().invoke(app, ["report", str(folder), "--output", str(output)])
    assert result.exit_code == 0, result.stderr
    assert str(output) in result.stdout
    return output.read_text()


def test_the_report_has_the_figures_and_is_self_contained(run: dict[str, Any]) -> None:
    page, summary = report_of(run["folder"]), run["summary"]
    assert "LlamaForCausalLM" in page
    for chart in ("Step time", "Who was busy", "Who waited for what", "One step", "Memory", "SSD traffic", "Loss"):
        assert f"<h2>{chart}" in page
    assert re.search(r"The loss went from [\d.]+ at step 2 to [\d.]+ at step 6", page)
    assert f"{run['losses'][-1]:.3f}" in page
    assert f"{summary['num_planned_steps']} of {summary['num_planned_steps']} steps" in page
    assert "3 MiB" in page and "_resident_records" in page
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.DOTALL)
    for chart in charts:
        ElementTree.fromstring(chart)
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(charts) == 7 and len(ids) == len(set(ids))
    outside = re.sub(r'xmlns(:xlink)?="[^"]+"', "", page)
    assert not re.search(r"https?:|<script|<link|<img", outside)


def test_a_pipe_with_the_name_of_the_file_is_replaced(tmp_path: Path) -> None:
    """Reading the pipe would block forever."""
    (tmp_path / "lohan").mkdir()
    for name in ("steps.jsonl", "steps.jsonl.new", "plan.json"):
        os.mkfifo(tmp_path / "lohan" / name)
    finish(trainer_in(tmp_path, num_steps=1))
    assert [line["step"] for line in lines_of(tmp_path)] == [1]
    assert json.loads((tmp_path / "lohan" / "plan.json").read_text())


@pytest.mark.parametrize("name", ["plan.json", "summary.json"])
def test_a_folder_with_the_name_of_a_file_is_refused_before_the_first_step(name: str, tmp_path: Path) -> None:
    (tmp_path / "lohan" / name).mkdir(parents=True)
    trainer = trainer_in(tmp_path)
    with pytest.raises(StorageError, match=rf"this run writes a file, but there is a folder at .*/lohan/{name}: move"):
        trainer.train()
    assert trainer.state.global_step == 0
    trainer.offload_engine.close()

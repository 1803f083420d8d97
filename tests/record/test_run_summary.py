"""The summary of a run has its documented keys."""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_trainer import small_trainer
from transformers import TrainerCallback
from transformers.integrations.integration_utils import TensorBoardCallback

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface.offloaded_model import engine_of, run_plan_of
from hf_lohan.planning import PlannedStep
from hf_lohan.planning.wear import Wear, wear_of
from hf_lohan.record import run_record
from hf_lohan.wording import drive_bytes

NUM_STEPS, ACCUMULATE, BATCH_SIZE, SEQUENCE_LENGTH = 4, 2, 2, 16
CONTRACT = {
    "num_steps", "step_s", "tokens_per_s", "ssd_read_bytes", "ssd_write_bytes", "store_bytes", "peak_gpu_pool_bytes",
    "peak_cpu_pool_bytes", "peak_anon_rss_bytes", "config", "num_parameters", "hardware",
}  # fmt: skip
SETTINGS = {"cpu_memory": "3MiB", "gpu_memory": "1MiB"}


class Tracker(TensorBoardCallback):
    """Keeps the logged rows."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None: ...

    def on_train_end(self, *args: Any, **kwargs: Any) -> None: ...

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.rows.append(dict(logs))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("run")
    trainer = small_trainer(
        folder, SETTINGS, max_steps=NUM_STEPS, gradient_accumulation_steps=ACCUMULATE, logging_steps=2
    )
    tracker = Tracker()
    trainer.add_callback(tracker)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        trainer.train()
    engine = trainer.offload_engine
    files_bytes = sum(path.stat().st_size for path in (folder / "_lohan" / "store").glob("*.bin"))
    engine.close()
    return {
        "summary": json.loads((folder / "lohan" / "summary.json").read_text()),
        "lines": [json.loads(line) for line in (folder / "lohan" / "steps.jsonl").read_text().splitlines()],
        "console": printed.getvalue(),
        "history": trainer.state.log_history,
        "tracked": tracker.rows,
        "logs": [row for row in trainer.state.log_history if "loss" in row],
        "files_bytes": files_bytes,
    }


def test_the_summary_has_the_documented_keys(run: dict[str, Any]) -> None:
    assert run["summary"].keys() >= CONTRACT


def test_steps_and_tokens_are_counted_over_micro_batches(run: dict[str, Any]) -> None:
    summary = run["summary"]
    assert summary["num_steps"] == NUM_STEPS
    assert summary["step_s"] > 0
    tokens_per_step = ACCUMULATE * BATCH_SIZE * SEQUENCE_LENGTH
    counted = {line["step"]: line["num_tokens"] for line in run["lines"]}  # the last line of a step counts
    assert list(counted.values()) == [tokens_per_step] * NUM_STEPS
    # The median of four steps is at most twice their mean, but the mean may be far above the median.
    assert 0 < summary["tokens_per_s"] * summary["step_s"] / tokens_per_step <= 2


def test_bytes_match_the_state(run: dict[str, Any]) -> None:
    summary = run["summary"]
    state_bytes = 12 * summary["num_parameters"]
    assert summary["store_bytes"] >= state_bytes
    assert summary["store_bytes"] + summary["scratch_bytes"] == run["files_bytes"]
    # Every step reads and writes weights and moments once. The start writes the weights.
    assert summary["ssd_write_bytes"] >= NUM_STEPS * state_bytes + state_bytes / 3
    assert summary["ssd_read_bytes"] >= NUM_STEPS * state_bytes


def test_peaks_are_within_the_budgets(run: dict[str, Any]) -> None:
    summary = run["summary"]
    config = OffloadConfig.load(summary["config"])  # the resolved config can be loaded
    assert (config.cpu_memory, config.gpu_memory) == (3 << 20, 1 << 20)
    assert 0 < summary["peak_cpu_pool_bytes"] <= 3 << 20
    assert 0 < summary["peak_gpu_pool_bytes"] <= 1 << 20
    assert summary["peak_anon_rss_bytes"] > 3 << 20


def test_trackers_get_the_figures(run: dict[str, Any]) -> None:
    rows_with_figures = [row for row in run["tracked"] if "lohan/step_s" in row]
    assert len(rows_with_figures) == len(run["logs"]) == NUM_STEPS // 2
    figures = {key.removeprefix("lohan/") for key in rows_with_figures[0]}
    assert figures >= CONTRACT - {"config", "num_parameters", "hardware"}
    written = [row["lohan/ssd_write_bytes"] for row in rows_with_figures]
    assert written[0] < written[1] <= run["summary"]["ssd_write_bytes"]


def test_the_console_has_two_more_lines_than_stock(run: dict[str, Any]) -> None:
    """hf_lohan prints one line before the first log and one after the last."""
    ours = [line.startswith("hf_lohan: ") for line in run["console"].splitlines()]
    assert ours == [True, *[False] * (len(run["logs"]) + 1), True], run["console"]
    assert not any(key.startswith("lohan/") for row in run["history"] for key in row)
    first, *_, last = run["console"].splitlines()
    assert "; state in " in first and "_lohan/store" in first
    wear = run["summary"]["wear"]
    assert f"; {wear['words']}; " in first
    written = drive_bytes(NUM_STEPS * run["summary"]["prediction"]["ssd_write_bytes_per_step"])
    assert wear["words"].startswith(f"this run writes {written} to the SSDs; with ")
    assert re.search(r"; without offloading it would need [\d.]+ MiB of .*, so offloading is not needed$", first)
    assert re.search(r"4 steps of [\d.e-]+ s.*, [\d,]+ tokens a second; .*lohan report", last)


def test_a_run_that_takes_much_of_the_endurance_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def of_small_drives(planned: PlannedStep, num_steps: int | None) -> Wear:
        ssd = tuple(replace(drive, endurance_bytes=1 << 20) for drive in planned.hardware.ssd)
        return wear_of(replace(planned, hardware=replace(planned.hardware, ssd=ssd)), num_steps)

    monkeypatch.setattr(run_record, "wear_of", of_small_drives)
    trainer = small_trainer(tmp_path, SETTINGS, max_steps=1)
    trainer.train()
    trainer.offload_engine.close()
    (warning,) = [record for record in caplog.records if record.message.startswith("this run writes ")]
    assert warning.levelname == "WARNING" and re.search(r" to the SSDs, \d+% of their endurance", warning.message)


def test_a_stock_run_has_no_figures(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, None, max_steps=1, logging_steps=1)
    trainer.train()
    assert not any(key.startswith("lohan/") for row in trainer.state.log_history for key in row)
    assert not (tmp_path / "lohan").exists()


class DecidesChunks(TrainerCallback):
    """Decides the tokens of a chunk after the first step, as a longer batch does."""

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        plan = run_plan_of(engine_of(model))
        assert plan is not None and plan.first is not None and plan.first.plan.chunk_tokens is None
        plan.cut_layers(16)


def test_the_plan_has_chunks_that_were_decided_later(tmp_path: Path) -> None:
    trainer = small_trainer(tmp_path, SETTINGS, max_steps=1)
    trainer.add_callback(DecidesChunks())
    trainer.train()
    trainer.offload_engine.close()
    assert json.loads((tmp_path / "lohan" / "plan.json").read_text())["chunk_tokens"] == 16


def test_a_machine_that_begins_to_swap_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    swapped = itertools.count(1 << 30, 300 << 20)  # bytes, before training and after each step
    monkeypatch.setattr(run_record.psutil, "swap_memory", lambda: SimpleNamespace(sout=next(swapped)))
    trainer = small_trainer(tmp_path, SETTINGS, max_steps=4)
    trainer.train()
    trainer.offload_engine.close()
    warned = [record.getMessage() for record in caplog.records if "swapped out" in record.getMessage()]
    assert warned == [
        "the machine swapped out 300 MiB during a step, so steps take longer; set cpu_memory to at most 1.5 MiB "
        "(it is 3 MiB)"
    ]

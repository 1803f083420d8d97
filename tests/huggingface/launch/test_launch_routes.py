"""A script that uses only transformers is offloaded by each launcher and trains the same."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hf_lohan.threads import usable_cpus

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import json, os, sys
import torch
from transformers import Trainer, TrainingArguments
from hf_lohan.testing.models import tiny_batch, tiny_model

class MyTrainer(Trainer):
    pass

output_dir, report = sys.argv[1:]
batch = tiny_batch(batch_size=8)
rows = [{name: values[row] for name, values in batch.items()} for row in range(8)]
args = TrainingArguments(
    output_dir=output_dir, max_steps=3, per_device_train_batch_size=2, learning_rate=1e-2, logging_steps=1,
    save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True, seed=3,
)
trainer = MyTrainer(model=tiny_model("llama"), args=args, train_dataset=rows)
trainer.train()
facts = {
    "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
    "grad_norms": [entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry],
    "num_threads": torch.get_num_threads(),
    "omp_num_threads": os.environ.get("OMP_NUM_THREADS"),
}
with open(report, "w") as file:
    json.dump(facts, file)
"""
ACCELERATE_CONFIG = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 1
use_cpu: false
"""
ROUTES = {
    "python": ["-m", "hf_lohan.run", "--offload", "lohan", "script.py"],
    "accelerate": [
        *["-m", "accelerate.commands.launch", "--config_file", "single.yaml"],
        *["-m", "hf_lohan.run", "--offload", "offload.yaml", "script.py"],
    ],
    "lohan": [
        *["-m", "hf_lohan.cli", "launch", "--config_file", "single.yaml", "--offload", "offload.yaml"],
        *["--mixed_precision", "no", "script.py"],
    ],
}


QUICK_ROUTES = ("python", "lohan")
"""`lohan launch` starts `accelerate launch -m hf_lohan.run`. So a launch by accelerate itself is slow."""
Report = tuple[dict[str, Any], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, testrun_uid: str, worker_id: str) -> dict[str, Report]:
    """Return the script's report and output directory for the quick launchers and for the stock Trainer. All workers of
    pytest share them, because these tests may be divided among them."""
    base = tmp_path_factory.getbasetemp()
    folder = (base if worker_id == "master" else base.parent) / f"routes-{testrun_uid}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "stock.json").exists():
            run_all(folder, QUICK_ROUTES)
    return {route: report_in(folder, route) for route in ("stock", *QUICK_ROUTES)}


def report_in(folder: Path, route: str) -> Report:
    return json.loads((folder / f"{route}.json").read_text()), folder / route


def run_all(folder: Path, routes: Sequence[str]) -> None:
    """Run the script by launchers and as it is. The launchers run in parallel. Stock runs in this process, and writes
    its report last."""
    (folder / "script.py").write_text(SCRIPT)
    (folder / "single.yaml").write_text(ACCELERATE_CONFIG)
    (folder / "offload.yaml").write_text("cpu_memory: 64MiB\ngpu_memory: 16MiB\n")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    environment.pop("OMP_NUM_THREADS", None)
    started = {
        route: subprocess.Popen(
            [sys.executable, *ROUTES[route], str(folder / route), str(folder / f"{route}.json")],
            cwd=folder,
            env=environment | ({"OMP_NUM_THREADS": "1"} if route == "python" else {}),  # as accelerate does
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for route in routes
    }
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "argv", ["script.py", str(folder / "stock"), str(folder / "stock.part")])
        exec(compile(SCRIPT, "script.py", "exec"), {"__name__": "__main__"})
    outputs = {route: process.communicate(timeout=200)[0] for route, process in started.items()}
    for route, process in started.items():
        assert process.returncode == 0, f"{route}:\n{outputs[route]}"
    (folder / "stock.part").rename(folder / "stock.json")


def assert_offloaded_and_as_stock(ours: Report, stock: Report) -> None:
    (facts, output_dir), (stock_facts, stock_dir) = ours, stock
    summary = json.loads((output_dir / "lohan" / "summary.json").read_text())
    assert summary["num_steps"] == 3
    assert summary["ssd_write_bytes"] > 0
    assert len(facts["losses"]) == 3
    assert facts["losses"] == pytest.approx(stock_facts["losses"], rel=1e-6)
    assert facts["grad_norms"] == pytest.approx(stock_facts["grad_norms"], rel=1e-5)
    assert not (stock_dir / "lohan").exists()


@pytest.mark.parametrize("route", QUICK_ROUTES)
def test_an_unmodified_script_is_offloaded_and_trains_the_same(runs: dict[str, Report], route: str) -> None:
    assert_offloaded_and_as_stock(runs[route], runs["stock"])


def assert_has_settings(output_dir: Path) -> None:
    summary = json.loads((output_dir / "lohan" / "summary.json").read_text())
    assert summary["config"]["cpu_memory"] == 64 * 2**20


def test_the_settings_of_the_launcher_reach_the_script(runs: dict[str, Report]) -> None:
    assert_has_settings(runs["lohan"][1])


def test_the_optimizer_uses_every_core_whatever_the_launcher_exports(runs: dict[str, Report]) -> None:
    for route in QUICK_ROUTES:
        assert runs[route][0]["num_threads"] == usable_cpus()
    assert runs["python"][0]["omp_num_threads"] == "1"
    assert runs["lohan"][0]["omp_num_threads"] == str(usable_cpus())


@pytest.mark.slow
def test_accelerate_launches_the_same(tmp_path: Path) -> None:
    run_all(tmp_path, ["accelerate"])
    ours = report_in(tmp_path, "accelerate")
    assert_offloaded_and_as_stock(ours, report_in(tmp_path, "stock"))
    assert_has_settings(ours[1])
    assert ours[0]["num_threads"] == usable_cpus()
    assert ours[0]["omp_num_threads"] == "1", "accelerate no longer exports one thread"

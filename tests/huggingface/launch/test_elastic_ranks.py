"""Processes are killed, and the run goes on with another number of them, as a run that nothing disturbed."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from typer.testing import CliRunner

from hf_lohan import last_step
from hf_lohan.cli import app
from hf_lohan.device import num_gpus

ROOT = Path(__file__).resolve().parents[3]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(num_gpus() > 0, reason="the launchers would take the GPUs"),
]
SCRIPT = """
import json, os, signal, sys, time
from datasets import Dataset
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from hf_lohan.testing.models import tiny_model

folder, dies_at, waits_s, resume = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), sys.argv[4]
num_ranks = int(os.environ["WORLD_SIZE"])

class Kill(TrainerCallback):
    def on_step_begin(self, args, state, control, **kwargs):
        time.sleep(waits_s)
        if (state.global_step, args.process_index) == (dies_at, num_ranks - 1):
            os.kill(os.getpid(), signal.SIGKILL)

    def on_step_end(self, args, state, control, **kwargs):
        if args.process_index == 0:
            with open(folder + "-steps", "a") as file:
                file.write(f"{state.global_step}/{num_ranks}\\n")

rows = torch.randint(5, 60, (64, 8), generator=torch.Generator().manual_seed(3)).tolist()
args = TrainingArguments(
    folder, max_steps=9, per_device_train_batch_size=1, report_to=[], logging_steps=1, save_strategy="no",
    gradient_accumulation_steps=2 // num_ranks, use_cpu=True, disable_tqdm=True,
)
rows = Dataset.from_dict({"input_ids": rows, "labels": rows})
trainer = Trainer(tiny_model("llama", num_layers=2), args, train_dataset=rows, callbacks=[Kill()])
trainer.train(resume_from_checkpoint=resume or None)
trainer.save_model(folder + "/final")
if args.process_index == 0:
    trainer.state.save_to_json(folder + "/state.json")
"""
# On a slow drive, `auto` would commit after several steps.
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOHAN_OFFLOAD": "offload.yaml"}


def launch(
    folder: Path, num_ranks: int, name: str, *, dies_at: int = -1, resume: str = "", offload: str = "lohan"
) -> str:
    """Run the script with `lohan launch`, and return its stderr."""
    command = ["-m", "hf_lohan.cli", "launch", "--cpu", "--num_processes", str(num_ranks), "--offload", offload]
    done = subprocess.run(
        [sys.executable, *command, "script.py", name, str(dies_at), "0", resume],
        cwd=folder,
        env=ENVIRONMENT | {"WORLD_SIZE": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.returncode == 0) == (dies_at < 0), done.stderr
    return done.stderr


def outcome(folder: Path, name: str) -> tuple[list[Any], bytes]:
    rows = json.loads((folder / name / "state.json").read_text())["log_history"]
    losses = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    assert len(losses) == 9
    return losses, (folder / name / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the script, and an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "script.py").write_text(SCRIPT)
    (folder / "offload.yaml").write_text("commit_every: 1\n")
    launch(folder, 2, "undisturbed")
    return folder


def test_stores_on_drives_that_ssd_names_by_rank_are_found(folder: Path) -> None:
    """`last_step` and the commands find them in the settings that the run has written, which have the path of each
    rank. Then one rank copies them to its own drive."""
    (folder / "offload.yaml").write_text(f"ssd: {folder}/drive{{local_rank}}/store\n")
    launch(folder, 2, "by-rank", dies_at=3, offload="offload.yaml")
    run = folder / "by-rank"
    assert last_step(run) in (2, 3)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    assert CliRunner().invoke(app, ["reshard", str(run), "--ranks", "3", "--remove-old"]).exit_code == 0
    assert last_step(run) in (2, 3)
    launch(folder, 1, "by-rank", dies_at=6, resume="last_step", offload="offload.yaml")
    assert last_step(run) in (5, 6)
    launch(folder, 2, "by-rank", resume="last_step", offload="offload.yaml")
    assert outcome(folder, "by-rank") == outcome(folder, "undisturbed")
    assert [*folder.glob("drive1/store/rank-1-of-2.g3")] and last_step(run) == 9


def test_a_machine_leaves_and_another_one_joins(folder: Path) -> None:
    """Each launcher of torchrun is a machine. The second one is killed with its process, and a third one joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "3"],
        *["--rdzv_backend", "c10d", "--rdzv_id", "elastic", "--rdzv_endpoint", f"127.0.0.1:{port}"],
        *[
            "--rdzv_conf",
            "last_call_timeout=2,join_timeout=120",
            "--local_addr",
            "127.0.0.1",
            "--monitor_interval",
            "0.1",
        ],
        *["-m", "hf_lohan.run", "script.py", "elastic", "-1", "2.5", ""],
    ]
    environment = ENVIRONMENT | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    machines: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with (folder / f"machine-{len(machines)}").open("wb") as log:
            machines.append(
                subprocess.Popen(
                    [sys.executable, *command],
                    cwd=folder,
                    env=environment,
                    stdout=log,
                    stderr=log,
                )
            )

    def steps() -> str:
        """The number of ranks of each step."""
        file = folder / "elastic-steps"
        return "".join(line.split("/")[1] for line in file.read_text().splitlines()) if file.exists() else ""

    def wait_for(pattern: str) -> None:
        until_s = time.monotonic() + 200
        while not re.search(pattern, steps()):
            assert time.monotonic() < until_s and machines[0].poll() is None, f"{steps()}\n{logs()}"
            time.sleep(0.05)

    def logs() -> str:
        return "\n".join((folder / f"machine-{number}").read_text() for number in range(len(machines)))

    try:
        start()
        while not is_open(port):  # the first machine has the store of the rendezvous
            time.sleep(0.05)
        start()
        wait_for("22$")
        end(machines[1])
        wait_for("21$")
        start()
        assert machines[0].wait(200) == 0 and machines[2].wait(60) == 0, logs()
    finally:
        for machine in machines:
            end(machine)
    assert outcome(folder, "elastic") == outcome(folder, "undisturbed")
    assert re.search("2+1+2+$", steps())  # the second machine may have come late
    assert "by 2 ranks, and its stores are resharded for 1 rank" in logs()
    assert "by 1 rank, and its stores are resharded for 2 ranks" in logs()


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def end(machine: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and its processes."""
    if machine.poll() is None:
        for process in [*psutil.Process(machine.pid).children(recursive=True), psutil.Process(machine.pid)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        machine.wait()

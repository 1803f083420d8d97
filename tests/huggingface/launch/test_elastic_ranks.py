"""Processes are killed, and the run goes on with restarted ones, with another number of them, or with other owners of
experts. It ends as a run that nothing disturbed.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from python_runs import ROOT, run_python
from resharded_stores import STORE
from typer.testing import CliRunner

from hf_lohan import last_step
from hf_lohan.annexes.resharding import reshard as resharding
from hf_lohan.cli import app
from hf_lohan.device import num_gpus
from hf_lohan.testing.models import tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.skipif(num_gpus() > 0, reason="the launchers would take the GPUs")]
SCRIPT = str(Path(__file__).with_name("disturbed_run.py"))
EXPERTS = """
cpu_memory: 32MiB
gpu_memory: 8MiB
experts: streamed
experts.lazy: false
commit_every: 1
"""


def lohan(folder: Path, *arguments: object, fails: bool = False) -> subprocess.CompletedProcess[str]:
    command = ["-m", "hf_lohan.cli", *arguments]
    return run_python(*command, cwd=folder, status=None if fails else 0, OMP_NUM_THREADS="1", WORLD_SIZE="1")


def launch(
    folder: Path, num_ranks: int, name: str, *, offload: str = "offload", restarts: int = 0, **options: Any
) -> str:
    """Run the script with `lohan launch`, and return its stderr."""
    launcher = ["launch", "--cpu", "--num_processes", num_ranks, "--offload", f"{offload}.yaml"]
    command = [*launcher, "--max_restarts", restarts, SCRIPT, name, json.dumps(options)]
    return lohan(folder, *command, fails=bool(options.get("dies")) and not restarts).stderr


def outcome(folder: Path, name: str) -> tuple[list[Any], bytes]:
    rows = json.loads((folder / name / "state.json").read_text())["log_history"]
    losses = [(row["step"], row["loss"], row["grad_norm"]) for row in rows if "loss" in row]
    assert len(losses) == 9
    return losses, (folder / name / "final" / "model.safetensors").read_bytes()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with settings, and an undisturbed run of two ranks."""
    folder = tmp_path_factory.mktemp("elastic")
    (folder / "offload.yaml").write_text("commit_every: 1\n")  # on a slow drive, `auto` commits after several steps
    launch(folder, 2, "undisturbed")
    return folder


def test_restarted_attempts_end_as_an_undisturbed_run(folder: Path) -> None:
    stderr = launch(folder, 2, "restarted", restarts=3, dies=[(0, 2, 0), (1, 4, 1), (2, 6, 0)])
    assert stderr.count("of this run continues from last_step") == 3, stderr
    assert outcome(folder, "restarted") == outcome(folder, "undisturbed")


def test_stores_on_drives_that_ssd_names_by_rank_are_found(folder: Path) -> None:
    """`last_step` and the commands find them in the settings that the run has written, which have the path of each
    rank. Then one rank copies them to its own drive."""
    (folder / "by_rank.yaml").write_text(f"ssd: {folder}/drive{{local_rank}}/store\ncommit_every: 1\n")
    launch(folder, 2, "by-rank", offload="by_rank", dies=[(0, 3, -1)])
    run = folder / "by-rank"
    assert last_step(run) in (2, 3)
    assert CliRunner().invoke(app, ["verify", str(run)]).exit_code == 0
    assert CliRunner().invoke(app, ["reshard", str(run), "--ranks", "3", "--remove-old"]).exit_code == 0
    assert last_step(run) in (2, 3)
    launch(folder, 1, "by-rank", offload="by_rank", dies=[(0, 6, -1)], resume="last_step")
    assert last_step(run) in (5, 6)
    launch(folder, 2, "by-rank", offload="by_rank", resume="last_step")
    assert outcome(folder, "by-rank") == outcome(folder, "undisturbed")
    assert [*folder.glob("drive1/store/rank-1-of-2.g3")] and last_step(run) == 9


def test_a_machine_leaves_and_another_one_joins(folder: Path) -> None:
    """Each launcher of torchrun is a machine. The second one is killed with its process, and a third one joins."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *["-m", "torch.distributed.run", "--nnodes", "1:2", "--nproc_per_node", "1", "--max-restarts", "3"],
        *["--rdzv_backend", "c10d", "--rdzv_id", "elastic", "--rdzv_endpoint", f"127.0.0.1:{port}"],
        *["--rdzv_conf", "last_call_timeout=2,join_timeout=120", "--local_addr", "127.0.0.1"],
        *["--monitor_interval", "0.1", "-m", "hf_lohan.run", SCRIPT, "elastic", '{"waits_s": 2.5}'],
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "LOHAN_OFFLOAD": "offload.yaml"}
    environment["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
    machines: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        with (folder / f"machine-{len(machines)}").open("wb") as log:
            machines.append(
                subprocess.Popen([sys.executable, *command], cwd=folder, env=environment, stdout=log, stderr=log)
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


def test_a_run_with_balanced_experts_ends_as_an_undisturbed_run(tmp_path: Path) -> None:
    (tmp_path / "offload.yaml").write_text(EXPERTS)
    launch(tmp_path, 2, "undisturbed", family="mixtral")
    launch(tmp_path, 2, "run", family="mixtral", dies=[(0, 3, -1)])
    told = lohan(tmp_path, "reshard", "run", "--num_processes", 2, "--balance").stdout
    assert "rows of experts, the most loaded rank of a layer has on average 1." in told and "step" in told
    launch(tmp_path, 2, "run", family="mixtral", resume="last_step")
    assert outcome(tmp_path, "run") == outcome(tmp_path, "undisturbed")
    assert "all 2 ranks hold" in lohan(tmp_path, "verify", "run").stdout
    assert "of 2 ranks is in" in lohan(tmp_path, "reshard", "run", "--ranks", 1, "--remove-old").stdout


def fails_at(call: int, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``function``, which fails instead at this call."""
    numbers = itertools.count(1)

    def counted(*args: Any, **kwargs: Any) -> Any:
        if next(numbers) == call:
            raise KeyboardInterrupt
        return function(*args, **kwargs)

    return counted


def test_a_streamed_model_resumes_beside_new_stores_of_a_balance_that_was_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A killed one leaves new stores without commits, with other owners of experts than a run would choose."""
    tiny_model("mixtral", num_layers=2).save_pretrained(tmp_path / "model")
    (tmp_path / "offload.yaml").write_text(EXPERTS)
    launch(tmp_path, 1, "run", path="model", dies=[(0, 3, -1)])
    monkeypatch.setattr(resharding, "copy_records", fails_at(1, resharding.copy_records))
    monkeypatch.setattr(resharding, "remove_folder", lambda folder: None)
    with pytest.raises(KeyboardInterrupt):
        resharding.reshard([[str(tmp_path / "run" / STORE)]], 2, balances=True)
    assert [*(tmp_path / "run" / STORE).glob("rank-*")]
    launch(tmp_path, 2, "run", path="model", resume="last_step")
    assert outcome(tmp_path, "run")

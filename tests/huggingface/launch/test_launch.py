"""`lohan launch` starts the script with the right number of processes, threads and settings."""

from __future__ import annotations

import os
import signal
import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

import hf_lohan.huggingface.launch as launching

TWO_PROCESSES = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 2
use_cpu: false
"""
VARIABLES = ("ACCELERATE_USE_CPU", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT")
Launched = Callable[..., Namespace]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """Return a function that gives the options that accelerate gets for a command line in a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launching, "default_config_file", str(tmp_path / "no_default.yaml"))
    monkeypatch.setattr(launching, "usable_cpus", lambda: 12)
    monkeypatch.setattr(launching, "num_gpus", lambda: 4)
    (tmp_path / "script.py").touch()
    (tmp_path / "offload.yaml").write_text("prefetch_blocks: 3\n")
    (tmp_path / "two.yaml").write_text(TWO_PROCESSES)
    received: list[Namespace] = []

    def start(options: Namespace) -> None:
        options.variables = {name: os.environ.get(name) for name in VARIABLES}
        received.append(options)

    monkeypatch.setattr(launching, "launch_command", start)

    def launch(*command: str) -> Namespace:
        assert launching.launch_script(command) == 0
        return received[-1]

    return launch


def test_the_script_is_started_with_our_runner(launched: Launched, tmp_path: Path) -> None:
    options = launched("--offload", "offload.yaml", "script.py", "--offload", "its own", "--num_processes", "7")
    assert (options.module, options.training_script) == (True, "hf_lohan.run")
    ours = ["--offload", str(tmp_path / "offload.yaml"), "script.py"]
    assert options.training_script_args == [*ours, "--offload", "its own", "--num_processes", "7"]
    options = launched("-m", "package.train", "x")
    assert options.training_script_args == ["--offload", "lohan", "-m", "package.train", "x"]
    options = launched("--trace", "script.py", "--trace")
    assert options.training_script_args == ["--offload", "lohan", "--trace", "script.py", "--trace"]


def test_the_environment_changes_the_default(
    launched: Launched, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOHAN_OFFLOAD", "offload.yaml")
    assert launched("script.py").training_script_args[1] == str(tmp_path / "offload.yaml")
    assert launched("--offload", "lohan", "script.py").training_script_args[1] == "lohan"
    for wrong, message in (("nope.yaml", "LOHAN_OFFLOAD in the environment"), ("auto", "'auto' is for a Trainer")):
        monkeypatch.setenv("LOHAN_OFFLOAD", wrong)
        assert launched("--offload", "lohan", "script.py").training_script_args[1] == "lohan"
        with pytest.raises(ValueError, match=message):
            launched("script.py")


def test_threads_are_shared_among_the_processes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched("script.py").num_cpu_threads_per_process == 12
    assert launched("script.py").num_processes == 1
    assert launched("--num_processes", "4", "script.py").num_cpu_threads_per_process == 3
    assert launched("--config_file", "two.yaml", "script.py").num_cpu_threads_per_process == 6
    assert launched("--num-cpu-threads-per-process", "5", "script.py").num_cpu_threads_per_process == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # accelerate uses this number
    assert launched("script.py").num_cpu_threads_per_process is None


def test_several_processes_are_started_by_torchrun(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate alone starts a single process with `cpu`, and with fewer than two GPUs."""
    alone = launched("script.py")
    assert (alone.multi_gpu, alone.main_process_port) == (False, None)
    on_gpus = launched("--num_processes", "4", "script.py")
    assert (on_gpus.multi_gpu, on_gpus.cpu, on_gpus.main_process_port) == (True, False, 0)
    assert on_gpus.variables == {"ACCELERATE_USE_CPU": None, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}
    on_cpus = launched("--cpu", "--num_processes", "8", "--main_process_port", "29501", "script.py")
    assert (on_cpus.multi_gpu, on_cpus.cpu, on_cpus.main_process_port) == (True, False, 29501)
    assert on_cpus.variables["ACCELERATE_USE_CPU"] == "true"
    monkeypatch.setattr(launching, "num_gpus", lambda: 0)
    assert launched("--num_processes", "2", "script.py").variables["ACCELERATE_USE_CPU"] == "true"
    assert "ACCELERATE_USE_CPU" not in os.environ


def test_machines_have_their_own_processes(launched: Launched) -> None:
    two_machines = ["--num_machines", "2", "--machine_rank", "1", "--main_process_ip", "10.0.0.1"]
    options = launched("--num_processes", "8", *two_machines, "--main_process_port", "29500", "script.py")
    assert (options.multi_gpu, options.num_cpu_threads_per_process) == (True, 3)
    with pytest.raises(ValueError, match="5 processes on this machine, which has 4 GPUs"):
        launched("--num_processes", "10", *two_machines, "script.py")


def test_a_signal_that_ends_a_rank_ends_the_launcher(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    def end(error: Exception) -> int:
        def raise_it(_options: Namespace) -> None:
            raise error

        monkeypatch.setattr(launching, "launch_command", raise_it)
        return launching.launch_script(["--num_processes", "2", "script.py"])

    first = ProcessFailure(local_rank=1, pid=1, exitcode=-9, error_file="none")
    assert end(ChildFailedError("script", {1: first})) == 137
    assert end(SignalException("asked", signal.SIGTERM)) == 143


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "no script 'missing.py'"),
        (["--offload", "nope", "script.py"], "'nope' is neither"),
        (["--config_file", "missing.yaml", "script.py"], "no accelerate config 'missing.yaml'"),
        (["--no_python", "script.py"], "--no_python"),
        (["--mixed_precision", "fp8", "script.py"], "mixed_precision='fp8' needs layers of another package"),
        (["--num_processes", "5", "script.py"], "5 processes .* has 4 GPUs; start one process for each GPU"),
    ],
)
def test_commands_that_cannot_be_launched_are_refused(launched: Launched, command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launched(*command)


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (-9, 137)])
def test_the_exit_status_is_that_of_the_script(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    def fail(options: Namespace) -> None:
        raise subprocess.CalledProcessError(status, ["python"])

    monkeypatch.setattr(launching, "launch_command", fail)
    assert launching.launch_script(["script.py"]) == expected


def test_another_number_of_processes_than_a_launcher_has_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was ignored."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launching.launch_lohan(1, []) is launching.launch_lohan(2, []) is None
    with pytest.raises(ValueError, match="num_processes=4 is set, but a launcher has started 2 processes"):
        launching.launch_lohan(4, [])

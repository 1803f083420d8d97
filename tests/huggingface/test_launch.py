"""What `lohan launch` starts, and with which settings."""

from __future__ import annotations

import subprocess
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

import hf_lohan.huggingface.launch as launching

TWO_PROCESSES = """
compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
mixed_precision: 'no'
num_processes: 2
use_cpu: false
"""
Launched = Callable[..., Namespace]


@pytest.fixture
def launched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launched:
    """The options that accelerate would get for a command line, started in a folder with a script."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(launching, "default_config_file", str(tmp_path / "no_default.yaml"))
    monkeypatch.setattr(launching, "usable_cpus", lambda: 12)
    (tmp_path / "script.py").touch()
    (tmp_path / "offload.yaml").write_text("prefetch_blocks: 3\n")
    (tmp_path / "two.yaml").write_text(TWO_PROCESSES)
    received: list[Namespace] = []
    monkeypatch.setattr(launching, "launch_command", received.append)

    def launch(*command: str) -> Namespace:
        assert launching.launch(command) == 0
        return received[-1]

    return launch


def test_the_script_is_started_by_our_runner(launched: Launched, tmp_path: Path) -> None:
    options = launched("--offload", "offload.yaml", "script.py", "--offload", "its own", "--num_processes", "7")
    assert (options.module, options.training_script) == (True, "hf_lohan.run")
    ours = ["--offload", str(tmp_path / "offload.yaml"), "script.py"]
    assert options.training_script_args == [*ours, "--offload", "its own", "--num_processes", "7"]
    options = launched("-m", "package.train", "x")
    assert options.training_script_args == ["--offload", "lohan", "-m", "package.train", "x"]
    options = launched("--trace", "script.py", "--trace")
    assert options.training_script_args == ["--offload", "lohan", "--trace", "script.py", "--trace"]


def test_threads_are_shared_among_the_processes(launched: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    assert launched("script.py").num_cpu_threads_per_process == 12
    assert launched("script.py").num_processes == 1
    assert launched("--num_processes", "4", "script.py").num_cpu_threads_per_process == 3
    assert launched("--config_file", "two.yaml", "script.py").num_cpu_threads_per_process == 6
    assert launched("--num-cpu-threads-per-process", "5", "script.py").num_cpu_threads_per_process == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "7")  # which accelerate then takes over
    assert launched("script.py").num_cpu_threads_per_process is None


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (["missing.py"], "no script 'missing.py'"),
        (["--offload", "nope", "script.py"], "'nope' is neither"),
        (["--config_file", "missing.yaml", "script.py"], "no accelerate config 'missing.yaml'"),
        (["--no_python", "script.py"], "--no_python"),
    ],
)
def test_what_cannot_be_launched_is_refused(launched: Launched, command: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launched(*command)


@pytest.mark.parametrize(("status", "expected"), [(3, 3), (-9, 137)])
def test_the_exit_status_is_the_scripts(
    launched: Launched, monkeypatch: pytest.MonkeyPatch, status: int, expected: int
) -> None:
    def fail(options: Namespace) -> None:
        raise subprocess.CalledProcessError(status, ["python"])

    monkeypatch.setattr(launching, "launch_command", fail)
    assert launching.launch(["script.py"]) == expected

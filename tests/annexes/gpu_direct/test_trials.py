"""Whether device memory goes straight to the drives: what is refused, what the trial's process says, what doctor
shows."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from cufile_double import FakeCuFile
from engines import open_engine, resolved

from hf_lohan.annexes.gpu_direct import trials
from hf_lohan.annexes.gpu_direct.cufile import CuFileBackend, CuFileLibrary
from hf_lohan.annexes.gpu_direct.trials import GpuDirectTrial, TrialRates, open_direct_io, try_folder, why_not
from hf_lohan.annexes.gpu_direct.xxh3 import Xxh3Hasher
from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.hardware import examine_machine
from hf_lohan.planning import lay_out
from hf_lohan.testing.models import tiny_model

FAST, SLOW = TrialRates(3e9, 2.5e9, 0.1), TrialRates(2e9, 2e9, 0.5)


class Gpu(CpuDevice):
    """As far as the decision sees."""

    torch_device = torch.device("cuda", 0)

    def __init__(self, name: str = "NVIDIA A100") -> None:
        super().__init__()
        self.name = name

    def describe(self) -> dict[str, object]:
        return {"name": self.name, "pinned_host_memory": True}


@pytest.fixture(autouse=True)
def fresh_trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with nvidia-fs."""
    monkeypatch.setattr(trials, "_NVIDIA_FS", "/proc/self")
    trials._trials.cache_clear()
    yield
    trials._trials.cache_clear()


def answer(monkeypatch: pytest.MonkeyPatch, *trials: GpuDirectTrial, stderr: str = "", code: int = 0) -> list[Any]:
    """Have the trial's process print these trials. Returns the commands."""
    commands: list[Any] = []

    def run(command: Any, **settings: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        text = "a line of a library\n" + json.dumps([asdict(trial) for trial in trials]) if trials else ""
        return subprocess.CompletedProcess(command, code, text, stderr)

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_true_without_a_gpu_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    config = resolved(tmp_path / "store", gpu_direct=True)
    model = tiny_model("llama")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True, memory_is_host=True)
    with pytest.raises(ConfigError) as caught:
        open_engine(model, layout, config)
    assert str(caught.value) == (
        "gpu_direct: true cannot be used, because there is no GPU; set gpu_direct to auto or false"
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("setting", ["auto", False])
def test_without_a_gpu_nothing_is_tried(tmp_path: Path, setting: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(monkeypatch)
    assert open_direct_io(resolved(tmp_path, gpu_direct=setting), CpuDevice()) is None
    assert not commands


@pytest.mark.parametrize("value", ["yes", 1, None, "cufile"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(ConfigError, match="gpu_direct"):
        OffloadConfig.load({"gpu_direct": value})


def test_auto_does_not_try_a_geforce(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands, gpu = answer(monkeypatch), Gpu("NVIDIA GeForce RTX 4090")
    assert open_direct_io(resolved(tmp_path), gpu) is None
    assert why_not(gpu, [str(tmp_path)])[0] == (
        "NVIDIA's drivers have no GPUDirect Storage for a GeForce (NVIDIA GeForce RTX 4090)"
    )
    assert not commands


def test_without_nvidia_fs_and_p2pdma_auto_does_not_try(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(
        monkeypatch, GpuDirectTrial(folder=str(tmp_path), problem="cuFileDriverOpen failed with 5001 (x)")
    )
    monkeypatch.setattr(trials, "_NVIDIA_FS", str(tmp_path / "none"))
    monkeypatch.setattr(trials, "_P2P_MEMORY", str(tmp_path / "devices"))
    problem, _ = why_not(Gpu(), [str(tmp_path)])
    assert problem == "the kernel module nvidia-fs is not loaded, and no device offers p2pdma"
    assert not commands
    with pytest.raises(ConfigError, match=r"because cuFileDriverOpen failed with 5001 \(x\) in "):  # true tries
        open_direct_io(resolved(tmp_path, gpu_direct=True), Gpu())
    (tmp_path / "devices" / "0000:01:00.0" / "p2pmem").mkdir(parents=True)
    assert why_not(Gpu(), [str(tmp_path)])[0].startswith("cuFileDriverOpen failed")


def test_true_on_a_geforce_says_what_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, GpuDirectTrial(folder="/d", problem="cuFileHandleRegister failed"))
    with pytest.raises(
        ConfigError, match=r"failed in /d \(a GeForce has no GPUDirect Storage, and this is NVIDIA GeFo"
    ):
        open_direct_io(resolved(tmp_path, gpu_direct=True), Gpu("NVIDIA GeForce RTX 4090"))


def test_a_trial_that_crashes_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, stderr="something\nSegmentation fault", code=-11)
    assert why_not(Gpu(), [str(tmp_path)])[0] == f"the trial ended with -11: Segmentation fault in {tmp_path}"


def test_the_trial_runs_once_for_the_folders_that_exist(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    commands = answer(
        monkeypatch, GpuDirectTrial(folder=str(tmp_path), mechanism="nvidia-fs", direct=FAST, through_host=SLOW)
    )
    for _ in range(2):
        problem, trials = why_not(Gpu(), [str(tmp_path / "store")])
        assert problem == "" and trials[0].is_faster
    assert [command[1:] for command in commands] == [["-m", "hf_lohan.annexes.gpu_direct", "0", str(tmp_path)]]


@pytest.mark.parametrize(
    ("direct", "is_faster"), [(FAST, True), (TrialRates(3e9, 1e9, 0.1), False), (TrialRates(1e9, 3e9, 0.1), False)]
)
def test_faster_means_both_directions(direct: TrialRates, is_faster: bool) -> None:
    assert GpuDirectTrial(folder="/d", mechanism="p2pdma", direct=direct, through_host=SLOW).is_faster == is_faster


def test_doctor_sees_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answer(monkeypatch, GpuDirectTrial(folder="/d", mechanism="p2pdma", direct=FAST, through_host=SLOW))
    facts = examine_machine(resolved(tmp_path), Gpu())
    assert facts.gpudirect_problem == ""
    assert facts.gpudirect_rates == (
        "/d: p2pdma: reads 3 GB/s, writes 2.5 GB/s, 0.10 CPU seconds; "
        "through host memory: reads 2 GB/s, writes 2 GB/s, 0.50 CPU seconds; faster"
    )


def test_a_gpu_with_other_checksums_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run would end at its first weight, although the way through host memory works."""
    backend, hashes = CuFileBackend(CuFileLibrary(FakeCuFile())), Xxh3Hasher.hashes
    right = try_folder(CpuDevice(), backend, str(tmp_path), num_bytes=1 << 20)
    assert right.problem in ("", "the file system has no O_DIRECT")
    monkeypatch.setattr(Xxh3Hasher, "hashes", lambda *args: hashes(*args) ^ 1)
    wrong = try_folder(CpuDevice(), backend, str(tmp_path), num_bytes=1 << 20)
    assert wrong.problem == "the GPU computes different checksums than the CPU"
    backend.close_library()

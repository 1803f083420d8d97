"""Facts about paths and the machine. Examining a path leaves no files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.files import StorageError
from hf_lohan.hardware import examine_machine, examine_path
from hf_lohan.threads import usable_cpus


def test_a_writable_directory(tmp_path: Path) -> None:
    facts = examine_path(str(tmp_path / "not" / "there"), "auto")
    assert facts.problem == ""
    assert facts.path == str(tmp_path / "not" / "there")
    assert facts.file_system
    status = os.statvfs(tmp_path)
    assert facts.free_bytes == pytest.approx(status.f_bavail * status.f_frsize, rel=0.2)
    assert (facts.wear_percent is None) == bool(facts.wear_problem)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_not_writable() -> None:
    facts = examine_path("/proc/nowhere", 5)
    assert facts.problem
    assert not facts.is_direct
    assert facts.capacity == 5


def test_refused_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refusing(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refusing)
    facts = examine_path(str(tmp_path), "auto")
    assert not facts.is_direct
    assert facts.problem == ""


def test_working_o_direct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "O_DIRECT", 0)  # works on every file system
    assert examine_path(str(tmp_path), "auto").is_direct


@pytest.mark.parametrize("outcome", [True, False, StorageError("cannot clone", path="x", advice="y")])
def test_reflinks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> None:
    def clone(*arguments: int) -> bool:
        if isinstance(outcome, Exception):
            raise outcome
        return bool(outcome)

    monkeypatch.setattr("hf_lohan.hardware.paths.clone_range", clone)
    assert examine_path(str(tmp_path), "auto").can_reflink is (outcome is True)


def test_the_machine(config: OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    facts = examine_machine(config, CpuDevice())
    assert facts.device_type == "cpu"
    assert facts.usable_cpus == usable_cpus()
    assert facts.cpu_threads == 1
    assert facts.omp_num_threads == "1"
    assert facts.gpudirect_problem == "there is no GPU"
    assert not facts.is_pinned
    assert facts.cpu_memory == config.cpu_memory
    assert 0 < facts.available_memory_bytes <= facts.memory_bytes


def test_pinned_memory_is_that_of_the_device(config: OffloadConfig) -> None:
    class Gpu(CpuDevice):
        torch_device = torch.device("meta")
        pins = True

        def describe(self) -> dict[str, object]:
            return {"name": "a GPU", "pinned_host_memory": self.pins}

    gpu = Gpu()
    facts = examine_machine(config, gpu)
    assert (facts.device_name, facts.is_pinned) == ("a GPU", True)
    assert facts.gpudirect_problem != "there is no GPU"
    gpu.pins = False
    assert not examine_machine(config, gpu).is_pinned

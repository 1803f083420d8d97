"""The cache of hardware profiles: what is measured again, damaged files, and concurrent processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import HardwareProfile
from hf_lohan.device import CpuDevice
from hf_lohan.hardware import (
    AttentionShape,
    MatrixShape,
    MeasuringEffort,
    cached_hardware,
    has_cached_hardware,
    profiles,
)

SHAPES = (MatrixShape(64, 32, 16),)
Ask = Callable[..., HardwareProfile]


class Measurer:
    """Replaces measuring: counts its calls and returns another rate each time."""

    def __init__(self, profile: HardwareProfile) -> None:
        self.num_calls = 0
        self.profile = profile

    def __call__(self, config: OffloadConfig, device: CpuDevice, **options: Any) -> HardwareProfile:
        self.num_calls += 1
        return replace(self.profile, h2d_bytes_per_s=1e9 * self.num_calls)


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(profiles, "cache_directory", lambda: str(tmp_path / "cache"))


@pytest.fixture
def measurer(profile: HardwareProfile) -> Measurer:
    return Measurer(profile)


@pytest.fixture
def ask(config: OffloadConfig, measurer: Measurer) -> Ask:
    def ask(**changes: Any) -> HardwareProfile:
        asked = {"matrix_shapes": SHAPES, "dtype": torch.bfloat16} | changes
        chosen = asked.pop("config", config)
        return cached_hardware(chosen, asked.pop("device", CpuDevice()), measure=measurer, **asked)

    return ask


def files_in(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.json"))


def test_hardware_is_measured_once_and_the_file_is_private(ask: Ask, measurer: Measurer, tmp_path: Path) -> None:
    first, again = ask(), ask()
    assert measurer.num_calls == 1
    assert again.h2d_bytes_per_s == first.h2d_bytes_per_s
    assert again.ssd[1].capacity_bytes == 1 << 30, "the free space was not read again"
    [file] = files_in(tmp_path / "cache")
    assert file.stat().st_mode & 0o777 == 0o600


def test_has_cached_hardware(ask: Ask, config: OffloadConfig, tmp_path: Path) -> None:
    asked: dict[str, Any] = {"matrix_shapes": SHAPES}
    assert not has_cached_hardware(config, CpuDevice(), dtype=torch.bfloat16, **asked)
    ask()
    assert has_cached_hardware(config, CpuDevice(), dtype=torch.bfloat16, **asked)
    assert not has_cached_hardware(config, CpuDevice(), dtype=torch.float32, **asked)


def test_measuring_again_replaces_the_profile(ask: Ask) -> None:
    assert ask().h2d_bytes_per_s == 1e9
    assert ask(measure_again=True).h2d_bytes_per_s == 2e9
    assert ask().h2d_bytes_per_s == 2e9


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float32},
        {"matrix_shapes": (MatrixShape(64, 32, 8),)},
        {"matrix_shapes": (MatrixShape(64, 32, 16, count=2),)},
        {"attention": AttentionShape(num_heads=4, num_tokens=64, key_dim=16, value_dim=16)},
        {"effort": MeasuringEffort(copy_bytes=4096)},
        *({"config": setting} for setting in ({"cpu_threads": 2}, {"io_threads": 3}, {"io_piece_bytes": 4096})),
        {"config": {"optimizer_state_dtype": "int8"}},
    ],
)
def test_other_shapes_dtypes_efforts_and_configs_are_measured(
    ask: Ask, measurer: Measurer, config: OffloadConfig, change: dict[str, Any]
) -> None:
    change = {name: replace(config, **value) if name == "config" else value for name, value in change.items()}
    ask()
    ask(**change)
    ask(**change)
    assert measurer.num_calls == 2


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("cpu_name", lambda: "another CPU"),
        ("device_name", lambda device: "another device"),
        ("usable_cpus", lambda: 77),
        ("_drive", lambda path: [9, "xfs"]),
    ],
)
def test_other_hardware_is_measured(
    ask: Ask, measurer: Measurer, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    ask()
    monkeypatch.setattr(profiles, name, value)
    ask()
    assert measurer.num_calls == 2


def test_another_folder_on_the_same_drive_is_not_measured(
    ask: Ask, measurer: Measurer, config: OffloadConfig, tmp_path: Path
) -> None:
    ask()
    moved = OffloadConfig.load(config, ssd=[str(tmp_path / "c"), str(tmp_path / "d")])
    assert [ssd.path for ssd in ask(config=moved).ssd] == [str(tmp_path / "c"), str(tmp_path / "d")]
    assert measurer.num_calls == 1


def cut(content: dict[str, Any]) -> str:
    return json.dumps(content)[:-20]


def of_other_hardware(content: dict[str, Any]) -> str:
    return json.dumps(content | {"key": content["key"] | {"cpu": "another"}})


def with_no_rate(content: dict[str, Any]) -> str:
    del content["profile"]["h2d_bytes_per_s"]
    return json.dumps(content)


def with_one_drive(content: dict[str, Any]) -> str:
    content["profile"]["ssd"].pop()
    return json.dumps(content)


@pytest.mark.parametrize(
    "damage", [cut, of_other_hardware, with_no_rate, with_one_drive, lambda content: "[]", lambda content: "\0\0\0"]
)
def test_a_damaged_file_is_measured_again_and_replaced(
    ask: Ask, measurer: Measurer, tmp_path: Path, damage: Callable[[dict[str, Any]], str]
) -> None:
    ask()
    [file] = files_in(tmp_path / "cache")
    file.write_text(damage(json.loads(file.read_text())))
    ask()
    assert measurer.num_calls == 2
    ask()
    assert measurer.num_calls == 2


@pytest.mark.parametrize("place", ["/proc/nowhere", "file"])
def test_an_unusable_cache_measures_each_time(
    ask: Ask,
    measurer: Measurer,
    tmp_path: Path,
    place: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(
        profiles, "cache_directory", lambda: str(tmp_path / place)
    )  # an absolute path replaces tmp_path
    ask()
    ask()
    assert measurer.num_calls == 2
    assert "cannot be saved" in caplog.text


def test_links_in_the_cache_are_not_followed(ask: Ask, measurer: Measurer, tmp_path: Path) -> None:
    ask()
    [file] = files_in(tmp_path / "cache")
    target = tmp_path / "mine"
    file.rename(target)
    content = target.read_text()
    file.symlink_to(target)
    ask()
    assert measurer.num_calls == 2
    assert target.read_text() == content
    assert not file.is_symlink()


def test_the_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()  # of `cache`
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert profiles.cache_directory() == str(tmp_path / "lohan" / "hardware")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for not_allowed in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", not_allowed)
        assert profiles.cache_directory() == str(tmp_path / "home" / ".cache" / "lohan" / "hardware")


def test_one_of_many_threads_measures(config: OffloadConfig, measurer: Measurer) -> None:
    num_threads = 4
    together = threading.Barrier(num_threads)
    is_measuring = threading.Lock()

    def measure(*args: Any, **options: Any) -> HardwareProfile:
        assert is_measuring.acquire(blocking=False), "two threads measure at the same time"
        try:
            return measurer(*args, **options)
        finally:
            is_measuring.release()

    def ask(number: int) -> HardwareProfile:
        together.wait()
        dtype = (torch.float32, torch.bfloat16)[number % 2]
        return cached_hardware(config, CpuDevice(), matrix_shapes=SHAPES, dtype=dtype, measure=measure)

    with ThreadPoolExecutor(num_threads) as threads:
        measured = list(threads.map(ask, range(num_threads)))
    assert measurer.num_calls == 2
    assert measured[0].h2d_bytes_per_s == measured[2].h2d_bytes_per_s != measured[1].h2d_bytes_per_s


HOLDER = """
import fcntl, os, sys
fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)
fcntl.flock(fd, fcntl.LOCK_EX)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_process_waits_for_one_that_measures(ask: Ask, measurer: Measurer, tmp_path: Path) -> None:
    (tmp_path / "cache").mkdir()
    command = [sys.executable, "-c", HOLDER, os.fspath(tmp_path / "cache" / "lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdin is not None and holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        with ThreadPoolExecutor(1) as threads:
            asked = threads.submit(ask)
            assert measurer.num_calls == 0
            holder.kill()  # the kernel releases its lock
            asked.result()
    assert measurer.num_calls == 1

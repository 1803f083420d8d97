"""Drives are measured with bounded scratch files that vanish."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path

import pytest
from storage_doubles import CountingBackend, FaultyBackend

from hf_lohan.device import CpuDevice
from hf_lohan.files import CapacityError, FileBackend, IoEngine, StorageError, StorePath
from hf_lohan.hardware import ssd_rates
from hf_lohan.hardware.ssd_rates import measure_ssds

MIB = 1 << 20


class Tick:
    """A clock that advances by `step_s` on each reading."""

    def __init__(self, step_s: float) -> None:
        self.now_s = 0.0
        self.step_s = step_s

    def __call__(self) -> float:
        self.now_s += self.step_s
        return self.now_s


def measure(paths: list[StorePath], backend: FileBackend | None = None, *, step_s: float = 1e-9, size: int = MIB):
    io = partial(IoEngine, 2, 65536, backend=backend)
    return measure_ssds(paths, CpuDevice(), io, scratch_bytes=size, buffer_bytes=MIB, budget_s=1.0, clock=Tick(step_s))


def test_each_measurement_passes_over_the_file_at_most_twice(tmp_path: Path) -> None:
    backend = CountingBackend()
    alone, together = measure([StorePath(str(tmp_path), 1 << 40)], backend)
    assert [together] == alone
    num_chunks = 8  # of 128 KiB, the largest number of granules within a sixth of a MiB
    assert sum(backend.write_sizes_bytes) == (1 + 2 + 1) * num_chunks * 131072
    assert sum(backend.read_sizes_bytes) == (2 + 1) * num_chunks * 131072
    assert list(tmp_path.iterdir()) == []


def test_rates_are_bytes_over_the_clock(tmp_path: Path) -> None:
    [rates], _ = measure([StorePath(str(tmp_path), 1 << 40)], step_s=1e-6)
    readings = 16 + 3  # before each chunk, at the start, after the last chunk, and at the end
    assert rates.write_bytes_per_s == pytest.approx(16 * 131072 / ((readings - 1) * 1e-6))
    assert rates.read_bytes_per_s == pytest.approx(rates.write_bytes_per_s)
    assert rates.mixed_bytes_per_s == pytest.approx(rates.write_bytes_per_s)


def test_a_slow_drive_is_measured_within_the_budget(tmp_path: Path) -> None:
    backend = CountingBackend()
    measure([StorePath(str(tmp_path), 1 << 40)], backend, step_s=10.0)
    assert sum(backend.write_sizes_bytes) == (ssd_rates.NUM_BUFFERS + 2 + 1 + 1) * 131072
    assert sum(backend.read_sizes_bytes) == (1 + 1) * 131072


def test_paths_together_are_striped_by_capacity(tmp_path: Path) -> None:
    paths = [StorePath(str(tmp_path / "a"), 3 << 30), StorePath(str(tmp_path / "b"), 1 << 30)]
    opened: list[str] = []

    class Backend(CountingBackend):
        def allocate(self, fd: int, num_bytes: int) -> None:
            opened.append(f"{num_bytes}")
            super().allocate(fd, num_bytes)

    alone, together = measure(paths, Backend(), size=2 * MIB)
    assert len(alone) == 2
    assert together.read_bytes_per_s > 0
    sizes = [int(size) for size in opened]
    assert sizes[:2] == [2 * MIB, 2 * MIB]
    assert sizes[2] <= 2 * MIB
    assert sizes[3] == pytest.approx(sizes[2] / 3, abs=4096 * 2)
    assert list(tmp_path.iterdir()) == [], "files or new directories were left"


def test_files_have_no_name_while_they_are_used(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    class Backend(CountingBackend):
        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            seen.append(os.listdir(tmp_path))
            return super().write(fd, offset, views)

    measure([StorePath(str(tmp_path), 1 << 40)], Backend())
    assert seen
    assert not any(seen)


@pytest.mark.parametrize("call", ["open", "allocate", "sync", "read", "write"])
def test_a_failing_drive_raises_and_leaves_no_files(tmp_path: Path, call: str) -> None:
    with pytest.raises(StorageError, match="Input/output error"):
        measure([StorePath(str(tmp_path), 1 << 40)], FaultyBackend(call, 1, errno.EIO))
    assert list(tmp_path.iterdir()) == []


def test_a_path_that_is_not_writable() -> None:
    with pytest.raises((StorageError, CapacityError), match="/proc"):
        measure([StorePath("/proc/nowhere", 1 << 40)])


def test_the_capacity_bounds_the_file(tmp_path: Path) -> None:
    backend = CountingBackend()
    measure([StorePath(str(tmp_path), 450_000)], backend, size=MIB)
    assert sum(backend.write_sizes_bytes) == (1 + 2 + 1) * 393216
    with pytest.raises(CapacityError, match=r"needs 393,216 bytes .* but its capacity is 300,000"):
        measure([StorePath(str(tmp_path), 300_000)])


def test_free_space_bounds_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ssd_rates, "free_bytes", lambda path: 4 * 524288)
    backend = CountingBackend()
    measure([StorePath(str(tmp_path), 1 << 40)], backend, size=MIB)
    assert sum(backend.write_sizes_bytes) == (1 + 2 + 1) * 524288
    monkeypatch.setattr(ssd_rates, "free_bytes", lambda path: 4 * 390000)
    with pytest.raises(CapacityError, match="free space"):
        measure([StorePath(str(tmp_path), 1 << 40)])

"""Anonymous memory of this process and its peak; the page cache does not count."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from hf_lohan.hardware import AnonymousMemoryPeak, anonymous_memory_bytes, machine

MIB = 1 << 20


def touched(num_bytes: int) -> mmap.mmap:
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for start in range(0, num_bytes, mmap.PAGESIZE):
        memory[start] = 1
    return memory


def test_allocated_memory_counts() -> None:
    before = anonymous_memory_bytes()
    memory = touched(64 * MIB)
    assert 60 * MIB < anonymous_memory_bytes() - before < 80 * MIB
    memory.close()


def test_a_mapped_file_does_not_count(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 32 * MIB)
    before = anonymous_memory_bytes()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[start] for start in range(0, len(mapped), mmap.PAGESIZE)) > 0
        assert anonymous_memory_bytes() - before < 16 * MIB


def test_the_peak_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [10, 70, 30]
    monkeypatch.setattr(machine, "anonymous_memory_bytes", lambda: values.pop(0))
    peak = AnonymousMemoryPeak()
    for _ in range(3):
        peak.sample()
    assert peak.peak_bytes == 70


def test_taking_the_recent_peak_resets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    values = [70, 30, 20, 10]
    monkeypatch.setattr(machine, "anonymous_memory_bytes", lambda: values.pop(0))
    peak = AnonymousMemoryPeak()
    peak.sample()
    assert [peak.take_recent_peak() for _ in range(3)] == [70, 20, 10]
    assert peak.peak_bytes == 70


def test_a_run_shorter_than_the_interval_is_sampled() -> None:
    peak = AnonymousMemoryPeak()
    peak.start()
    peak.start()  # no effect
    memory = touched(16 * MIB)
    peak.stop()
    peak.stop()
    assert peak.peak_bytes > 16 * MIB
    memory.close()
    peak_bytes = peak.peak_bytes
    peak.start()
    peak.stop()
    assert peak.peak_bytes >= peak_bytes

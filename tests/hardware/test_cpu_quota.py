"""Limits on CPU time of control groups and their parents, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_lohan.device import host_memory
from hf_lohan.hardware.machine import cpu_quota

V2 = "0::/user.slice/job\n"
V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {}, None),
        # within a container, the process's own group is the root
        ("", {"cpu.max": "150000 100000"}, 1.5),
        (V2, {"user.slice/cpu.max": "150000 100000"}, 1.5),
        (V2, {"user.slice/cpu.max": "max 100000"}, None),
        (V1, {"cpu/docker/abc/cpu.cfs_quota_us": "200000", "cpu/docker/abc/cpu.cfs_period_us": "100000"}, 2.0),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
    ],
)
def test_quotas(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, membership: str, files: dict[str, str], expected: float | None
) -> None:
    (tmp_path / "own").write_text(membership)
    monkeypatch.setattr(host_memory, "_CGROUPS", tmp_path)
    monkeypatch.setattr(host_memory, "_OWN_CGROUPS", tmp_path / "own")
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert cpu_quota() == expected


def test_the_quota_of_this_process() -> None:
    quota = cpu_quota()
    assert quota is None or quota > 0

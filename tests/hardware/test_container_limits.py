"""Limits of control groups and their parents, of both versions."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_lohan.hardware.machine import ContainerLimits, container_limits

V2 = "0::/user.slice/job\n"
V1 = "4:memory:/docker/abc\n3:cpu,cpuacct:/docker/abc\n0::/\n"
GIB = 1 << 30


@pytest.mark.parametrize(
    ("membership", "files", "expected"),
    [
        (V2, {}, ContainerLimits(None, None)),
        # within a container, the process's own group is the root
        ("", {"memory.max": "1073741824"}, ContainerLimits(GIB, None)),
        (
            V2,
            {"user.slice/job/memory.max": "max", "user.slice/memory.max": f"{4 * GIB}"},
            ContainerLimits(4 * GIB, None),
        ),
        (V2, {"user.slice/job/memory.max": f"{GIB}", "memory.max": f"{2 * GIB}"}, ContainerLimits(GIB, None)),
        (V2, {"user.slice/cpu.max": "150000 100000"}, ContainerLimits(None, 1.5)),
        (V2, {"user.slice/cpu.max": "max 100000"}, ContainerLimits(None, None)),
        (V1, {"memory/docker/abc/memory.limit_in_bytes": f"{2 * GIB}"}, ContainerLimits(2 * GIB, None)),
        (V1, {"memory/memory.limit_in_bytes": "9223372036854771712"}, ContainerLimits(None, None)),
        (
            V1,
            {"cpu/docker/abc/cpu.cfs_quota_us": "200000", "cpu/docker/abc/cpu.cfs_period_us": "100000"},
            ContainerLimits(None, 2.0),
        ),
        (V1, {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, ContainerLimits(None, None)),
    ],
)
def test_limits(tmp_path: Path, membership: str, files: dict[str, str], expected: ContainerLimits) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{content}\n")
    assert container_limits(str(tmp_path), membership) == expected


def test_limits_of_this_process() -> None:
    limits = container_limits()
    assert limits.memory_bytes is None or limits.memory_bytes > 0
    assert limits.num_cpus is None or limits.num_cpus > 0

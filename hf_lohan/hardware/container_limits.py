"""What a container or a slice lets this process have of the machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_ROOT = "/sys/fs/cgroup"
_NO_LIMIT_BYTES = 1 << 60
"""cgroup v1 writes a number beyond all memory where there is no limit."""


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """None: not limited."""

    memory_bytes: int | None
    num_cpus: float | None
    """CPU time a second, which is not seen in the number of CPUs."""


def container_limits(root: str = _ROOT, membership: str | None = None) -> ContainerLimits:
    """The lowest limits of this process's control groups and of those above them, of either version.

    `root` is where they are mounted and `membership` the text of /proc/self/cgroup.
    """
    if membership is None:
        try:
            membership = Path("/proc/self/cgroup").read_text()
        except OSError:
            membership = ""
    paths = {"": "/"}
    for line in membership.splitlines():
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    unified = paths[""]
    limits = [_bytes(folder, "memory.max") for folder in _upwards(root, unified)]
    limits += [
        _bytes(folder, "memory.limit_in_bytes") for folder in _upwards(f"{root}/memory", paths.get("memory", "/"))
    ]
    quotas = [_quota(folder) for folder in _upwards(root, unified)]
    quotas += [_quota_v1(folder) for folder in _upwards(f"{root}/cpu", paths.get("cpu", "/"))]
    return ContainerLimits(
        min((limit for limit in limits if limit is not None), default=None),
        min((quota for quota in quotas if quota is not None), default=None),
    )


def _upwards(root: str, path: str) -> Iterator[str]:
    """The group's folder and all above it; in a container the path may be one that only the host has."""
    while True:
        yield os.path.join(root, path.strip("/"))
        if path.strip("/") == "" or path == os.path.dirname(path):
            return
        path = os.path.dirname(path)


def _words(folder: str, name: str) -> list[str]:
    try:
        return Path(folder, name).read_text().split()
    except OSError:
        return []


def _bytes(folder: str, name: str) -> int | None:
    words = _words(folder, name)
    limit = int(words[0]) if words and words[0].isdigit() else _NO_LIMIT_BYTES
    return limit if limit < _NO_LIMIT_BYTES else None


def _quota(folder: str) -> float | None:
    words = _words(folder, "cpu.max")
    return int(words[0]) / int(words[1]) if len(words) == 2 and words[0].isdigit() else None


def _quota_v1(folder: str) -> float | None:
    quota, period = _words(folder, "cpu.cfs_quota_us"), _words(folder, "cpu.cfs_period_us")
    return int(quota[0]) / int(period[0]) if quota and period and int(quota[0]) > 0 else None

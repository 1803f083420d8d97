"""How much of its life a drive has used up, where it tells: NVMe and SATA through smartctl or nvme, eMMC from sysfs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_TIMEOUT_S = 5.0


class WearUnknownError(Exception):
    """The wear of a drive cannot be read; the message says why."""


def drive_wear_percent(drive: str | None) -> int:
    """Per cent of the rated writes that `drive`, a name in /sys/block, has had; may be beyond 100.

    Raises WearUnknownError with the reason: none of this needs root, but most drives answer to root only.
    """
    if drive is None:
        raise WearUnknownError("it is not on a single drive")
    life_time = _read(f"/sys/block/{drive}/device/life_time")  # eMMC: tenths of its life, for two kinds of cells
    if life_time:
        return 10 * max(int(word, 16) for word in life_time.split())
    device = f"/dev/{drive}"
    commands = {
        "smartctl": ["smartctl", "--json", "--all", device],
        "nvme": ["nvme", "smart-log", "--output-format=json", device],
    }
    reason = "smartctl (smartmontools) is not installed"
    for program, command in commands.items():
        if shutil.which(program) is None:
            continue
        wear = wear_in(_json_of(command))
        if wear is not None:
            return wear
        reason = f"{program} reads none from {device}; it may need root, and virtual drives have none"
    raise WearUnknownError(reason)


def wear_in(report: Mapping[str, Any]) -> int | None:
    """The wear that a report of smartctl or nvme tells, in per cent; None if it tells none."""
    nvme = report.get("nvme_smart_health_information_log")
    endurance = report.get("endurance_used")
    candidates = (
        nvme.get("percentage_used") if isinstance(nvme, Mapping) else None,
        endurance.get("current_percent") if isinstance(endurance, Mapping) else None,
        report.get("percent_used"),
        report.get("percentage_used"),
    )
    return next((value for value in candidates if isinstance(value, int)), None)


def _json_of(command: list[str]) -> Mapping[str, Any]:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
        report = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return {}
    return report if isinstance(report, Mapping) else {}


def _read(file: str) -> str:
    try:
        return Path(file).read_text()
    except OSError:
        return ""

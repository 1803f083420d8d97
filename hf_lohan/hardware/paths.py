"""Facts about an SSD path: its file system, free space, O_DIRECT and reflink support, and its drive's wear."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from hf_lohan.device import mapped_empty
from hf_lohan.files import SECTOR_BYTES, StorageError
from hf_lohan.files.data_file import sector_view
from hf_lohan.files.directories import free_bytes
from hf_lohan.files.reflink import clone_range

_TIMEOUT_S = 5.0
_TRIAL_BYTES = 4 * SECTOR_BYTES
_LEAST_WEAR_PERCENT = 5
_DATA_UNIT_BYTES = 512_000
"""NVMe counts written bytes in these units."""


def text_of(file: str | Path) -> str:
    """Return the text of a file of the kernel, or "" if the file cannot be read."""
    try:
        return Path(file).read_text()
    except OSError:
        return ""


def existing_directory(path: str) -> str:
    """Return the path itself or its nearest parent that is a directory."""
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    return path


class Mount(NamedTuple):
    file_system: str
    """Such as "ext4" or "nfs4"; "" if unknown."""
    source: str
    """Such as "/dev/nvme0n1p2" or "server:/export"."""


def mount_of(directory: str) -> Mount:
    """Return the nearest mount above a directory. Of two mounts at the same point, the later one is returned."""
    real, nearest, found = os.path.realpath(directory), "", Mount("", "")
    with suppress(OSError):
        for mount in psutil.disk_partitions(all=True):
            is_above = real == mount.mountpoint or real.startswith(f"{mount.mountpoint.rstrip('/')}/")
            if is_above and len(mount.mountpoint) >= len(nearest):
                nearest, found = mount.mountpoint, Mount(mount.fstype, mount.device)
    return found


def drive_of(directory: str) -> str | None:
    """Return the name of a directory's drive in /sys/block, such as "nvme0n1". None if it is not on a single drive."""
    status = os.stat(directory)
    numbers = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    if os.major(status.st_dev) == 0:  # Btrfs and others use numbers that are not the drive's
        try:
            source = os.stat(mount_of(directory).source).st_rdev
        except OSError:
            return None
        numbers = f"{os.major(source)}:{os.minor(source)}"
    node = os.path.realpath(f"/sys/dev/block/{numbers}")
    if os.path.exists(os.path.join(node, "partition")):
        node = os.path.dirname(node)
    return os.path.basename(node) if os.path.isdir(node) and numbers != "0:0" else None


class WearUnknownError(Exception):
    """The wear of a drive cannot be read. The message says why."""


def drive_wear_percent(drive: str | None) -> int:
    """Return the wear of `drive`, a name in /sys/block, as a percentage of its rated writes. It may exceed 100.

    Raises WearUnknownError with the reason. Most drives report their wear only to root.
    """
    if drive is None:
        raise WearUnknownError("the path is not on a single drive")
    life_time = text_of(f"/sys/block/{drive}/device/life_time")  # eMMC reports tenths of the life of two kinds of cells
    if life_time:
        return 10 * max(int(word, 16) for word in life_time.split())
    reason = "smartctl (smartmontools) is not installed"
    for program, report in _smart_reports(drive):
        wear = wear_in(report)
        if wear is not None:
            return wear
        reason = f"{program} reports no wear of /dev/{drive}; it may need root, and virtual drives have no wear"
    raise WearUnknownError(reason)


def drive_endurance_bytes(path: str, others: Sequence[str] = ()) -> int | None:
    """Return the bytes that the NVMe drive of a path may write in its life, from its written bytes and its wear. None
    if these cannot be read, or if the wear is too small, because it is in whole percent. If ``others`` has paths on the
    same drive, each path gets an equal part."""
    drive = drive_of(existing_directory(path))
    num_paths = 1 + sum(drive_of(existing_directory(other)) == drive for other in others)
    for _, report in _smart_reports(drive) if drive is not None else ():
        wear, log = wear_in(report), report.get("nvme_smart_health_information_log", report)
        units = log.get("data_units_written") if isinstance(log, Mapping) else None
        if wear is not None and wear >= _LEAST_WEAR_PERCENT and isinstance(units, int):
            return units * _DATA_UNIT_BYTES * 100 // (wear * num_paths)
    return None


def _smart_reports(drive: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield the reports of the installed programs. The report is {} if a program cannot read the drive."""
    device = f"/dev/{drive}"
    commands = {
        "smartctl": ["smartctl", "--json", "--all", device],
        "nvme": ["nvme", "smart-log", "--output-format=json", device],
    }
    return ((program, _json_of(command)) for program, command in commands.items() if shutil.which(program) is not None)


def wear_in(report: Mapping[str, Any]) -> int | None:
    """Return the wear in percent from a report of smartctl or nvme, or None if the report has no wear."""
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


@dataclass(frozen=True, kw_only=True, slots=True)
class PathFacts:
    path: str
    file_system: str
    """The kernel's name for the file system; "" if unknown."""
    problem: str
    """Why the path cannot be written to; "" if it can."""
    is_direct: bool
    can_reflink: bool
    """Whether files can share blocks, so that checkpoints need no copies of optimizer states."""
    free_bytes: int
    capacity: int | Literal["auto"]
    wear_percent: int | None
    wear_problem: str
    """Why the wear is unknown; "" if it is known."""


def examine_path(path: str, capacity: int | Literal["auto"]) -> PathFacts:
    """Collect the facts of a path. If it does not exist, use the nearest existing directory above. Leaves no files."""
    directory = existing_directory(path)
    problem, is_direct, can_reflink = "", False, False
    try:
        is_direct, can_reflink = _try_files(directory)
    except OSError as error:
        problem = error.strerror or str(error)
    wear_percent, wear_problem = None, ""
    try:
        wear_percent = drive_wear_percent(drive_of(directory))
    except WearUnknownError as error:
        wear_problem = str(error)
    return PathFacts(
        path=path,
        file_system=mount_of(directory).file_system,
        problem=problem,
        is_direct=is_direct,
        can_reflink=can_reflink,
        free_bytes=free_bytes(directory),
        capacity=capacity,
        wear_percent=wear_percent,
        wear_problem=wear_problem,
    )


def _try_files(directory: str) -> tuple[bool, bool]:
    """Return whether O_DIRECT works in the directory, and whether reflinks work. Raises OSError if no file can be
    written."""
    with tempfile.TemporaryDirectory(prefix=".lohan-tried-", dir=directory) as folder:
        source, target = os.path.join(folder, "a"), os.path.join(folder, "b")
        content = sector_view(mapped_empty(_TRIAL_BYTES).fill_(1))
        with open(source, "wb") as stream:
            stream.write(content)
        return _is_direct(source, content), _can_reflink(source, target)


def _is_direct(file: str, content: memoryview) -> bool:
    try:
        fd = os.open(file, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        os.pwritev(fd, [content], 0)
        return os.preadv(fd, [content], 0) == content.nbytes
    except OSError:
        return False
    finally:
        os.close(fd)


def _can_reflink(source: str, target: str) -> bool:
    with open(source, "rb") as from_stream, open(target, "wb") as to_stream:
        try:
            return clone_range(from_stream.fileno(), 0, _TRIAL_BYTES, to_stream.fileno(), 0)
        except StorageError:
            return False

"""What file system a directory is on, and on which drive."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_MOUNT_INFO = "/proc/self/mountinfo"
_ESCAPED = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    mount_point: str
    file_system: str
    """"ext4", "nfs4", ...; "" if the kernel does not tell."""
    source: str
    """"/dev/nvme0n1p2", "server:/export", ..."""


def mount_of(directory: str, mount_info: str | None = None) -> Mount:
    """The mount that a directory lies in: of those above it the nearest, and of two in one place the later one."""
    try:
        text = Path(_MOUNT_INFO).read_text() if mount_info is None else mount_info
    except OSError:
        return Mount("/", "", "")
    real = os.path.realpath(directory)
    found = Mount("/", "", "")
    for line in text.splitlines():
        mount = _parsed(line)
        is_above = real == mount.mount_point or real.startswith(f"{mount.mount_point.rstrip('/')}/")
        if is_above and len(mount.mount_point) >= len(found.mount_point):
            found = mount
    return found


def drive_of(directory: str) -> str | None:
    """The name in /sys/block of the drive that a directory lies on ("nvme0n1"); None if it lies on no single one."""
    status = os.stat(directory)
    numbers = f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}"
    if os.major(status.st_dev) == 0:  # Btrfs and others give numbers of their own
        try:
            source = os.stat(mount_of(directory).source).st_rdev
        except OSError:
            return None
        numbers = f"{os.major(source)}:{os.minor(source)}"
    node = os.path.realpath(f"/sys/dev/block/{numbers}")
    if os.path.exists(os.path.join(node, "partition")):
        node = os.path.dirname(node)
    return os.path.basename(node) if os.path.isdir(node) and numbers != "0:0" else None


def _parsed(line: str) -> Mount:
    before, _, after = line.partition(" - ")
    fields, (file_system, source) = before.split(), (*after.split(), "", "")[:2]
    return Mount(_unescaped(fields[4]) if len(fields) > 4 else "", file_system, _unescaped(source))


def _unescaped(field: str) -> str:
    return _ESCAPED.sub(lambda match: chr(int(match[1], 8)), field)

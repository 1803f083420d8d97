"""An SSD path as it is: its file system, what that can do, its room and its drive's wear."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass
from typing import Literal

from hf_lohan.device import mapped_empty
from hf_lohan.files import SECTOR_BYTES, StorageError
from hf_lohan.files.buffers import sector_view
from hf_lohan.files.directories import free_bytes
from hf_lohan.files.reflink import clone_range
from hf_lohan.hardware.directories import existing_directory
from hf_lohan.hardware.drive_wear import WearUnknownError, drive_wear_percent
from hf_lohan.hardware.mounts import drive_of, mount_of

_TRIAL_BYTES = 4 * SECTOR_BYTES


@dataclass(frozen=True, kw_only=True, slots=True)
class PathFacts:
    """One path of a store."""

    path: str
    file_system: str
    """As the kernel calls it; "" if it does not tell."""
    problem: str
    """Why it cannot be written; "" if it can."""
    is_direct: bool
    """O_DIRECT reads and writes work."""
    can_reflink: bool
    """Files can share blocks, so that a checkpoint of the optimizer's states is made in no time."""
    free_bytes: int
    capacity: int | Literal["auto"]
    """What the config allows."""
    wear_percent: int | None
    wear_problem: str
    """Why the wear is not known; "" if it is."""


def examine_path(path: str, capacity: int | Literal["auto"]) -> PathFacts:
    """The facts of a path, or of the nearest directory above one that is not there yet. Leaves nothing behind."""
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
    """Whether O_DIRECT and reflinks work there. Raises OSError where no file can be written."""
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

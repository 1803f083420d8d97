"""The directories of a store: can they be written, how much fits, and what makes a change in them last."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hf_lohan.files.errors import INODES, NO_ROOM, CapacityError, Shortfall, StorageError

SECTOR_BYTES = 4096
"""Alignment of every address, offset and length that meets a data file: no device in use asks for more."""
_ROOM = "free space (or quota)"
_ADVICE = "choose a directory that this user can write, or fix its permissions"


@dataclass(frozen=True)
class StorePath:
    """A directory of a store and how much it may hold; None: all the free space of its file system."""

    path: str
    capacity_bytes: int | None = None


def validate_directories(paths: Sequence[StorePath]) -> None:
    """Refuse paths that cannot hold a store, before anything is written.

    Raises ValueError for no path, one given twice or a negative capacity, `StorageError` for an unwritable.
    """
    if not paths:
        raise ValueError("a store needs at least one ssd path: give one directory")
    seen: set[str] = set()
    for path in paths:
        if path.capacity_bytes is not None and path.capacity_bytes < 0:
            raise ValueError(f"capacity of {path.path} is {path.capacity_bytes} bytes: give 0 or more, or None")
        real = os.path.realpath(path.path)
        if real in seen:
            raise ValueError(f"ssd path {path.path} is given twice (it is {real}): give every directory once")
        seen.add(real)
        _require_writable(path.path)


def make_directory(path: str) -> None:
    """Make sure the directory exists; a new one is for this user only. Raises `StorageError`."""
    try:
        if not os.path.isdir(path):
            made, nearest = os.path.abspath(path), _nearest_existing(path)
            make_folders(path, mode=0o700)
            while made != nearest:
                made = os.path.dirname(made)
                sync_directory(made)
    except OSError as error:
        raise _cannot_make(path, error) from error


def make_folders(path: str | Path, mode: int = 0o755) -> None:
    """`os.makedirs(exist_ok=True)`, but nobody else may write in a new folder above it either, whatever the umask."""
    if not os.path.isdir(parent := os.path.dirname(os.path.abspath(path))):
        make_folders(parent)
    try:
        os.mkdir(path, mode)
    except FileExistsError:  # another thread or process may have made it
        if not os.path.isdir(path):
            raise


def keep_from_others() -> None:
    """From here on nobody else may write what this process makes, other libraries' files included: who can change a
    checkpoint decides what the next run computes."""
    os.umask(os.umask(0o022) | 0o022)


def sync_directory(path: str) -> None:
    """Make creations, renames and removals in a directory survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: str) -> int:
    """What an ordinary user may still write to the file system of ``path``, which need not exist yet."""
    status = os.statvfs(_nearest_existing(path))
    return status.f_bavail * status.f_frsize


def no_room(path: str, needed_bytes: int) -> Shortfall:
    """What is missing where the system refused ``needed_bytes``: bytes, or inodes. 0 are free if the file system does
    not even say that."""
    with suppress(OSError):
        status = os.statvfs(_nearest_existing(path))
        is_out_of_inodes = status.f_files > 0 and status.f_favail == 0
        return Shortfall(path, needed_bytes, free_bytes(path), INODES if is_out_of_inodes else _ROOM)
    return Shortfall(path, needed_bytes, 0, _ROOM)


def occupied_bytes(path: str, file_names: Sequence[str]) -> int:
    """What those of our files that exist in a directory take from its file system."""
    files = (os.path.join(path, name) for name in file_names)
    return sum(os.lstat(file).st_blocks * 512 for file in files if os.path.lexists(file))


def resolve_capacities(paths: Sequence[StorePath], file_names: Sequence[str]) -> tuple[StorePath, ...]:
    """The paths with each ``None`` replaced by the free bytes plus those our ``file_names`` already take."""

    def capacity_bytes(path: StorePath) -> int:
        if path.capacity_bytes is not None:
            return path.capacity_bytes
        return free_bytes(path.path) + occupied_bytes(path.path, file_names)

    return tuple(replace(path, capacity_bytes=capacity_bytes(path)) for path in paths)


def check_free_space(paths: Sequence[StorePath], needed_bytes: Sequence[int], file_names: Sequence[str]) -> None:
    """Raise `CapacityError` if a file system lacks room; paths that share one share its room.

    ``needed_bytes`` are per path and include the ``file_names`` that are already there.
    """
    by_device: dict[int, list[tuple[str, int]]] = {}
    for path, needed in zip(paths, needed_bytes, strict=True):
        device = os.stat(_nearest_existing(path.path)).st_dev
        by_device.setdefault(device, []).append((path.path, needed))
    shortfalls = []
    for members in by_device.values():
        needed = sum(member_bytes for _, member_bytes in members)
        available = free_bytes(members[0][0]) + sum(occupied_bytes(path, file_names) for path, _ in members)
        if needed > available:
            names = " and ".join(path for path, _ in members)
            shortfalls.append(Shortfall(names, needed, available, "free space"))
    if shortfalls:
        raise CapacityError(shortfalls)


def _nearest_existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path):
        path = os.path.dirname(path)
    return path


def _require_writable(path: str) -> None:
    nearest = _nearest_existing(path)
    if not os.path.isdir(nearest):
        raise _unwritable(path, errno.ENOTDIR)
    if not os.access(nearest, os.W_OK | os.X_OK):
        read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
        raise _unwritable(path, errno.EROFS if read_only else errno.EACCES)
    if nearest != os.path.abspath(path):
        _try_to_make(path, nearest)


def _try_to_make(path: str, nearest: str) -> None:
    """Make the missing directories and take them away again: permissions do not tell everything (/proc, /sys). That is
    tried in a new folder, for other ranks may make theirs, or try to, under the same missing ones."""
    try:
        tried = tempfile.mkdtemp(dir=nearest, prefix="lohan-")
    except OSError as error:
        raise _cannot_make(path, error) from error
    try:
        make_folders(os.path.join(tried, os.path.relpath(path, nearest)), mode=0o700)
    except OSError as error:  # said before the folder goes, which may have the last inode
        raise _cannot_make(path, error) from error
    finally:
        shutil.rmtree(tried, ignore_errors=True)


def _cannot_make(path: str, error: OSError) -> Exception:
    if error.errno in NO_ROOM:
        return CapacityError([no_room(path, SECTOR_BYTES)])
    return _unwritable(path, error.errno)


def _unwritable(path: str, code: int | None) -> StorageError:
    return StorageError("cannot use the ssd path", path=path, errno=code, advice=_ADVICE)

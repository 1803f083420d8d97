"""The directories of a store: checks of permissions and free space, and durable changes."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hf_lohan.files.errors import INODES, NO_ROOM, CapacityError, DiskFullError, Shortfall, StorageError

SECTOR_BYTES = 4096
"""Alignment of every address, offset and length of data file I/O, which is enough for all common devices."""
_ROOM = "free space (or quota)"
_DISK_FULL_TEXTS = tuple(map(os.strerror, NO_ROOM))
"""Texts in errors of the safetensors library about a full disk. None of these errors is an OSError."""
_TORCH_WRITE_TEXTS = ("inline_container", "iostream error", "PytorchStreamWriter")
"""Texts in errors of `torch.save` after a failed write."""
_FULL_BELOW_BYTES = 1 << 20
_ADVICE = "choose a directory that this user can write, or fix its permissions"


@dataclass(frozen=True)
class StorePath:
    """A directory of a store and its capacity. A capacity of None is all free space of the file system."""

    path: str
    capacity_bytes: int | None = None


def validate_directories(paths: Sequence[StorePath], *, is_read_only: bool = False) -> None:
    """Check the paths before anything is written. Raises ValueError for no path, a repeated path or a negative
    capacity, and, unless ``is_read_only``, `StorageError` for an unwritable path."""
    if not paths:
        raise ValueError("there is no ssd path; give at least one directory")
    seen: set[str] = set()
    for path in paths:
        if path.capacity_bytes is not None and path.capacity_bytes < 0:
            raise ValueError(f"the capacity of {path.path} is {path.capacity_bytes} bytes; give 0 or more, or None")
        real = os.path.realpath(path.path)
        if real in seen:
            raise ValueError(f"the ssd path {path.path} occurs twice (as {real}); give every directory once")
        seen.add(real)
        if not is_read_only:
            _require_writable(path.path)


def make_directory(path: str) -> None:
    """Create the directory unless it exists. Only this user can access it. Raises `StorageError`."""
    try:
        if not os.path.isdir(path):
            folder, nearest = os.path.abspath(path), _nearest_existing(path)
            make_folders(path, mode=0o700)
            while folder != nearest:
                folder = os.path.dirname(folder)
                sync_directory(folder)
    except OSError as error:
        raise _cannot_make(path, error) from error


def make_folders(path: str | Path, mode: int = 0o755) -> None:
    """Create a folder and its parents. No other user may write to them, even if the umask allows it."""
    if not os.path.isdir(parent := os.path.dirname(os.path.abspath(path))):
        make_folders(parent)
    try:
        os.mkdir(path, mode)
    except FileExistsError:  # another thread or process may have created it
        if not os.path.isdir(path):
            raise


def keep_from_others() -> None:
    """Prevent other users from writing to files that this process creates, even through other libraries. A changed
    checkpoint would change the results of the next run."""
    os.umask(os.umask(0o022) | 0o022)


def sync_directory(path: str) -> None:
    """Sync a directory, so that creations, renames and removals in it survive a power cut."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def free_bytes(path: str) -> int:
    """Return the bytes that an ordinary user can write to the file system of ``path``, which need not exist yet."""
    status = os.statvfs(_nearest_existing(path))
    return status.f_bavail * status.f_frsize


def no_room(path: str, needed_bytes: int) -> Shortfall:
    """Return the shortfall, of bytes or inodes, after the system refused ``needed_bytes``. It has 0 free bytes if the
    file system does not report them."""
    with suppress(OSError):
        status = os.statvfs(_nearest_existing(path))
        is_out_of_inodes = status.f_files > 0 and status.f_favail == 0
        return Shortfall(path, needed_bytes, free_bytes(path), INODES if is_out_of_inodes else _ROOM)
    return Shortfall(path, needed_bytes, 0, _ROOM)


def is_disk_full(error: BaseException | None, left_bytes: int) -> bool:
    """Return whether a full disk is a cause of the error of any library. ``left_bytes``: the bytes that are free."""
    texts = _DISK_FULL_TEXTS + (_TORCH_WRITE_TEXTS if left_bytes < _FULL_BELOW_BYTES else ())
    while error is not None:
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            return True
        if any(text in str(error) for text in texts):
            return True
        error = error.__cause__ or error.__context__
    return False


@contextmanager
def disk_full_named(problem: str, path: str | Path, advice: str) -> Iterator[None]:
    """In this context, replace errors of a full disk, which name no file, with a `DiskFullError` that names
    ``path``."""
    try:
        yield
    except (StorageError, CapacityError):
        raise
    except Exception as error:
        left_bytes = no_room(str(path), 0).available_bytes
        if not is_disk_full(error, left_bytes):
            raise
        raise DiskFullError(
            problem, path=str(path), errno=errno.ENOSPC, advice=f"{left_bytes:,} bytes are free; {advice}"
        ) from error


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Yield a new folder that is removed at the end of the context. A full disk raises `DiskFullError`."""
    advice = "free space there, or set TMPDIR to a folder on another drive"
    with (
        disk_full_named("cannot write to the folder of temporary files", tempfile.gettempdir(), advice),
        tempfile.TemporaryDirectory(prefix="lohan-") as folder,
    ):
        yield folder


def occupied_bytes(path: str, file_names: Sequence[str]) -> int:
    """Return the bytes that the existing files of these names take in a directory."""
    files = (os.path.join(path, name) for name in file_names)
    return sum(os.lstat(file).st_blocks * 512 for file in files if os.path.lexists(file))


def resolve_capacities(paths: Sequence[StorePath], file_names: Sequence[str]) -> tuple[StorePath, ...]:
    """Replace each ``None`` capacity with the free bytes plus the bytes that the files ``file_names`` already take."""

    def capacity_bytes(path: StorePath) -> int:
        if path.capacity_bytes is not None:
            return path.capacity_bytes
        return free_bytes(path.path) + occupied_bytes(path.path, file_names)

    return tuple(replace(path, capacity_bytes=capacity_bytes(path)) for path in paths)


def check_free_space(paths: Sequence[StorePath], needed_bytes: Sequence[int], file_names: Sequence[str]) -> None:
    """Raise `CapacityError` if a file system lacks space. Paths on one file system share its space. ``needed_bytes``
    has the bytes of each path, including the bytes of existing files ``file_names``."""
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
        advice = f"{nearest} is a file; choose a directory, or move the file"
        raise _unwritable(path, errno.ENOTDIR, advice)
    below = os.path.join(nearest, os.path.relpath(path, nearest).partition(os.sep)[0])
    if os.path.islink(below) and not os.path.exists(below):
        target = f"{below} is a link to {os.readlink(below)}, which does not exist"
        raise _unwritable(path, errno.ENOENT, f"{target}; create or mount it, or choose another directory")
    if not os.access(nearest, os.W_OK | os.X_OK):
        read_only = os.statvfs(nearest).f_flag & os.ST_RDONLY
        raise _unwritable(path, errno.EROFS if read_only else errno.EACCES)
    if nearest != os.path.abspath(path):
        _try_to_make(path, nearest)


def _try_to_make(path: str, nearest: str) -> None:
    """Create the missing directories in a new folder and remove them again, because permissions do not say whether this
    works (/proc, /sys). The folder is new, because other ranks may do this at the same time."""
    try:
        tried = tempfile.mkdtemp(dir=nearest, prefix="lohan-")
    except OSError as error:
        raise _cannot_make(path, error) from error
    try:
        make_folders(os.path.join(tried, os.path.relpath(path, nearest)), mode=0o700)
    except OSError as error:  # ``tried`` still exists here, and may have the last inode
        raise _cannot_make(path, error) from error
    finally:
        shutil.rmtree(tried, ignore_errors=True)


def _cannot_make(path: str, error: OSError) -> Exception:
    if error.errno in NO_ROOM:
        return CapacityError([no_room(path, SECTOR_BYTES)])
    return _unwritable(path, error.errno)


def _unwritable(path: str, code: int | None, advice: str = _ADVICE) -> StorageError:
    return StorageError("cannot use the ssd path", path=path, errno=code, advice=advice)

"""A real file system of a few MiB that tests can fill to the last block or make read-only."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

BALLAST_NAME = "ballast"
MIB = 1 << 20


@contextlib.contextmanager
def small_file_system(folder: Path, num_bytes: int, at: Path | None = None) -> Iterator[Path]:
    """Mount a file system at `at`, by default `folder / "disk"`: ext4 in a file or, if that fails, tmpfs. Skip the test
    if neither can be mounted."""
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip("mounting a small file system needs root")
    disk = at or folder / "disk"
    disk.mkdir(parents=True)
    reason = _mount_ext4(folder / "disk.ext4", disk, num_bytes)
    if reason is not None:
        reason = _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "none", str(disk))
    if reason is not None:
        pytest.skip(f"this environment cannot mount: {reason}")
    try:
        yield disk
    finally:
        if _run("umount", str(disk)) is not None:
            _run("umount", "--lazy", str(disk))  # a process of a failed test may still use it


def _mount_ext4(image: Path, disk: Path, num_bytes: int) -> str | None:
    if shutil.which("mkfs.ext4") is None:
        return "no mkfs.ext4"
    with image.open("wb") as file:
        file.truncate(num_bytes)
    # Reserve no blocks for root: the tests run as root, and free bytes must equal those of statvfs.
    return _run("mkfs.ext4", "-q", "-m", "0", str(image)) or _run("mount", "-o", "loop", str(image), str(disk))


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)


def make_writable(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)


def _run(*command: str) -> str | None:
    """Run a command. Return None, or why it failed."""
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    return result.stderr.strip() or f"{command[0]} failed" if result.returncode else None


def fill(path: str) -> None:
    """Fill the file system of `path` to the last block. The path need not exist."""
    ballast = mount_point(Path(path)) / BALLAST_NAME
    descriptor = os.open(ballast, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    try:
        piece_bytes = MIB
        while piece_bytes >= 512:
            try:
                os.write(descriptor, bytes(piece_bytes))
                os.fsync(descriptor)
            except OSError:
                piece_bytes //= 2
    finally:
        os.close(descriptor)


def take_ballast_away(disk: Path) -> bool:
    """Delete the ballast. Return whether it existed."""
    ballast = disk / BALLAST_NAME
    if not ballast.exists():
        return False
    ballast.unlink()
    descriptor = os.open(disk, os.O_RDONLY)
    os.fsync(descriptor)  # ext4 frees the blocks once its journal holds the removal
    os.close(descriptor)
    return True


def mount_point(path: Path) -> Path:
    path = path.absolute()
    while not os.path.ismount(path):
        path = path.parent
    assert path != Path("/"), "refusing to fill the machine's own disk"
    return path

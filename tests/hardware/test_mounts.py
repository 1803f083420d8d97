"""File system and drive of a directory, from the kernel's files."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hf_lohan.hardware.paths import drive_of, existing_directory, mount_of

MOUNTS = [
    ("/proc", "proc", "proc"),
    ("/", "ext4", "/dev/vda1"),
    ("/data", "xfs", "/dev/nvme0n1p2"),
    ("/data/with space", "btrfs", "/dev/sdb"),
    ("/data/covered", "tmpfs", "tmpfs"),
    ("/data/covered", "nfs4", "server:/export"),
]


@pytest.mark.parametrize(
    ("directory", "file_system", "source"),
    [
        ("/", "ext4", "/dev/vda1"),
        ("/database", "ext4", "/dev/vda1"),
        ("/data", "xfs", "/dev/nvme0n1p2"),
        ("/data/store/deep", "xfs", "/dev/nvme0n1p2"),
        ("/data/with space/store", "btrfs", "/dev/sdb"),
        ("/data/covered", "nfs4", "server:/export"),
    ],
)
def test_the_nearest_mount_above(
    monkeypatch: pytest.MonkeyPatch, directory: str, file_system: str, source: str
) -> None:
    mounts = [SimpleNamespace(mountpoint=point, fstype=kind, device=device) for point, kind, device in MOUNTS]
    monkeypatch.setattr(psutil, "disk_partitions", lambda *, all: mounts)
    assert mount_of(directory) == (file_system, source)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert mount_of(str(tmp_path / "link")).file_system == "proc"


def test_the_file_system_is_unknown_without_mounts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "disk_partitions", lambda *, all: [])
    assert mount_of("/data").file_system == ""


def test_a_file_system_without_a_drive() -> None:
    assert drive_of("/proc") is None


def test_the_nearest_existing_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert existing_directory(str(tmp_path)) == str(tmp_path)
    assert existing_directory(str(tmp_path / "not" / "there")) == str(tmp_path)
    assert existing_directory(str(tmp_path / "file" / "below")) == str(tmp_path)

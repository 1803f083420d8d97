"""File system and drive of a directory, from the kernel's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_lohan.hardware.paths import drive_of, existing_directory, mount_of

MOUNT_INFO = r"""
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 254:0 / / rw,relatime shared:1 master:2 - ext4 /dev/vda1 rw,discard
30 27 259:2 / /data rw - xfs /dev/nvme0n1p2 rw
31 27 0:40 /a /data/with\040space rw - btrfs /dev/sdb rw
32 27 0:41 / /data/covered rw - tmpfs tmpfs rw
33 27 0:42 / /data/covered rw - nfs4 server:/export rw
broken line
"""


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
def test_the_nearest_mount_above(directory: str, file_system: str, source: str) -> None:
    mount = mount_of(directory, MOUNT_INFO)
    assert (mount.file_system, mount.source) == (file_system, source)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/proc")
    assert mount_of(str(tmp_path / "link")).file_system == "proc"


def test_the_file_system_is_unknown_without_mounts() -> None:
    assert mount_of("/data", "").file_system == ""


def test_a_file_system_without_a_drive() -> None:
    assert drive_of("/proc") is None


def test_the_nearest_existing_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert existing_directory(str(tmp_path)) == str(tmp_path)
    assert existing_directory(str(tmp_path / "not" / "there")) == str(tmp_path)
    assert existing_directory(str(tmp_path / "file" / "below")) == str(tmp_path)

"""Cloning shares blocks if the file system supports it, returns False if not, and raises for other failures."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from hf_lohan.files import Extent, StorageError
from hf_lohan.files.reflink import RecordCloner, clone_range

BLOCK = 4096


@pytest.fixture(params=["xfs", "btrfs"])
def reflink_disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A small file system that supports cloning."""
    if os.geteuid() != 0 or shutil.which(f"mkfs.{request.param}") is None:
        pytest.skip(f"making a small file system needs root and mkfs.{request.param}")
    image, disk = tmp_path / "image", tmp_path / "disk"
    disk.mkdir()
    image.touch()
    os.truncate(image, 400 << 20)  # sparse, so it takes almost no space
    for command in ([f"mkfs.{request.param}", "-q", str(image)], ["mount", "-o", "loop", str(image), str(disk)]):
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this environment cannot mount {request.param}: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture
def fds(tmp_path: Path) -> Iterator[tuple[int, int]]:
    """A source of four blocks and an empty target."""
    (tmp_path / "source").write_bytes(os.urandom(4 * BLOCK))
    with open(tmp_path / "source", "rb") as source, open(tmp_path / "target", "w+b") as target:
        yield source.fileno(), target.fileno()


def refuse(monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    def ioctl(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "ioctl", ioctl)


def test_a_real_clone_has_the_bytes_and_takes_no_space(reflink_disk: Path) -> None:
    num_bytes = 32 << 20
    data = os.urandom(num_bytes)
    (reflink_disk / "source").write_bytes(data)
    os.sync()
    used_bytes = shutil.disk_usage(reflink_disk).used
    with open(reflink_disk / "source", "rb") as source, open(reflink_disk / "target", "wb") as target:
        target.write(b"header".ljust(BLOCK))
        target.flush()
        assert clone_range(source.fileno(), BLOCK, num_bytes - BLOCK, target.fileno(), BLOCK)
        os.fsync(target.fileno())
    assert (reflink_disk / "target").read_bytes() == b"header".ljust(BLOCK) + data[BLOCK:]
    assert shutil.disk_usage(reflink_disk).used - used_bytes < num_bytes // 4


def test_a_clone_keeps_its_bytes_when_the_source_is_overwritten(reflink_disk: Path) -> None:
    """The store's next step overwrites the source."""
    with open(reflink_disk / "source", "w+b") as source, open(reflink_disk / "target", "w+b") as target:
        source.write(b"a" * 2 * BLOCK)
        source.flush()
        assert clone_range(source.fileno(), 0, 2 * BLOCK, target.fileno(), 0)
        os.pwrite(source.fileno(), b"b" * BLOCK, 0)
        assert os.pread(target.fileno(), 2 * BLOCK, 0) == b"a" * 2 * BLOCK


def test_real_extents_are_cloned_into_a_record(reflink_disk: Path) -> None:
    for name in ("first", "second"):
        (reflink_disk / name).write_bytes(name.ljust(3 * BLOCK, name[0]).encode())
    sources = [
        (str(reflink_disk / "second"), Extent(0, BLOCK, 2 * BLOCK, BLOCK)),
        (str(reflink_disk / "first"), Extent(0, BLOCK, 0, 2 * BLOCK)),
    ]
    cloner = RecordCloner()
    with open(reflink_disk / "target", "w+b") as target:
        assert cloner.clone(sources, target.fileno(), BLOCK)
        assert os.pread(target.fileno(), 9 * BLOCK, 0) == bytes(BLOCK) + b"f" * 2 * BLOCK + b"s" * BLOCK
    cloner.close()


def test_cloning_to_another_file_system_returns_false(reflink_disk: Path, fds: tuple[int, int]) -> None:
    with open(reflink_disk / "target", "w+b") as target:
        assert not clone_range(fds[0], 0, BLOCK, target.fileno(), 0)


REASONS_TO_COPY = [errno.EOPNOTSUPP, errno.EXDEV, errno.EINVAL, errno.ENOTTY, errno.EPERM, errno.ENOSYS, errno.EACCES]


@pytest.mark.parametrize("code", REASONS_TO_COPY, ids=errno.errorcode.__getitem__)
def test_cloning_without_support_returns_false(
    code: int, fds: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, code)
    assert not clone_range(fds[0], 0, BLOCK, fds[1], 0)


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS], ids=errno.errorcode.__getitem__)
def test_other_failures_name_the_file_and_the_offset(
    code: int, fds: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, code)
    with pytest.raises(StorageError, match=f"cannot clone 8192 bytes into {tmp_path}/target at byte 4096 ") as caught:
        clone_range(fds[0], 0, 2 * BLOCK, fds[1], BLOCK)
    assert (caught.value.errno, caught.value.offset) == (code, BLOCK)


def test_cloning_no_bytes_does_not_clone_the_rest_of_the_file(fds: tuple[int, int]) -> None:
    """For the kernel, a length of 0 means up to the end."""
    assert clone_range(fds[0], 0, 0, fds[1], 0)
    assert os.fstat(fds[1]).st_size == 0


def test_a_refused_cloner_does_not_try_again(
    fds: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []

    def ioctl(*_: object) -> int:
        calls.append(1)
        raise OSError(errno.EXDEV, "two file systems")

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    cloner = RecordCloner()
    sources = [
        (str(tmp_path / "source"), Extent(0, 0, 0, BLOCK)),
        (str(tmp_path / "source"), Extent(0, BLOCK, BLOCK, BLOCK)),
    ]
    assert not cloner.clone(sources, fds[1], 0)
    assert not cloner.clone(sources, fds[1], 0)
    assert len(calls) == 1
    cloner.close()


def test_a_cloner_opens_each_source_once_and_closes_it(
    fds: tuple[int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sources = [(str(tmp_path / "source"), Extent(0, n * BLOCK, n * BLOCK, BLOCK)) for n in range(4)]
    monkeypatch.setattr(fcntl, "ioctl", lambda *_: 0)
    cloner = RecordCloner()
    assert cloner.clone(sources, fds[1], 0)
    assert _num_open(tmp_path / "source") == 2  # one of them belongs to the fixture
    cloner.close()
    assert _num_open(tmp_path / "source") == 1


def _num_open(path: Path) -> int:
    """Count this process's open file descriptors of a file. Other descriptors may close meanwhile."""
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found += os.path.realpath(f"/proc/self/fd/{descriptor}") == os.path.realpath(path)
    return found

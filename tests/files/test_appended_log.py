from __future__ import annotations

import errno
import stat
from pathlib import Path

import pytest
from recorded_disk import RecordedDisk

from hf_lohan.files import CapacityError, StorageError
from hf_lohan.files.durable_file import AppendedLog


def test_lines_follow_the_committed_ones(tmp_path: Path) -> None:
    log = AppendedLog(str(tmp_path / "log"))
    assert log.append(0, b"") == 0 and not (tmp_path / "log").exists() and log.read(0, 0) == b""
    with RecordedDisk(tmp_path) as disk:
        assert log.append(0, b"one\n") == 4
    assert [call.name for call in disk.calls] == ["create", "resize", "write", "sync", "sync"]
    assert disk.calls[-1].folder == "."  # the directory is synced too, so that the new name persists
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600
    assert log.append(4, b"uncommitted, and long\n") == 26
    assert log.append(4, b"two\n") == 8
    assert log.read(0, 8) == b"one\ntwo\n" == (tmp_path / "log").read_bytes() and log.read(4, 8) == b"two\n"


def test_lost_lines_are_an_error(tmp_path: Path) -> None:
    log = AppendedLog(str(tmp_path / "log"))
    with pytest.raises(StorageError, match=r"cannot find .*/log: the store is damaged"):
        log.read(0, 4)
    log.append(0, b"one\n")
    with pytest.raises(StorageError, match=r"fewer than 5 bytes are in .*/log: the store is damaged"):
        log.read(2, 5)
    with pytest.raises(StorageError, match=r"fewer than 5 bytes are in .*/log"):
        log.append(5, b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\n"


def test_links_are_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    (tmp_path / "log").symlink_to(precious)
    log = AppendedLog(str(tmp_path / "log"))
    with pytest.raises(StorageError, match="symbolic links"):
        log.append(0, b"one\n")
    with pytest.raises(StorageError, match="symbolic links"):
        log.read(0, 3)
    assert precious.read_bytes() == b"precious"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("call", [1, 2, 3, 4])  # open, truncate, write, sync
def test_a_failure_keeps_the_committed_lines(tmp_path: Path, call: int, code: int) -> None:
    log = AppendedLog(str(tmp_path / "log"))
    log.append(0, b"one\n")
    log.append(4, b"lost\n")
    with RecordedDisk(tmp_path) as disk:
        disk.fail(call, code)
        with pytest.raises((CapacityError, StorageError)) as caught:
            log.append(4, b"three\n")
    assert isinstance(caught.value, CapacityError if code == errno.ENOSPC else StorageError)
    if code == errno.ENOSPC:
        assert "/log needs 6 bytes" in str(caught.value)
    assert log.read(0, 4) == b"one\n"
    assert log.append(4, b"three\n") == 10 and log.read(0, 10) == b"one\nthree\n"

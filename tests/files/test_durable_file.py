from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest
from recorded_disk import RecordedDisk

from hf_lohan.files import CapacityError, StorageError, replace_durably
from hf_lohan.files.durable_file import read_whole, remove_durably

CALLS = ("open", "write", "fsync", "rename", "open directory", "fsync directory")


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_the_file_is_private_and_synced_before_and_after_its_renaming(tmp_path: Path) -> None:
    file = tmp_path / "state"
    with RecordedDisk(tmp_path) as disk:
        replace_durably(str(file), b"one")
        replace_durably(str(file), b"two")
    assert file.read_bytes() == b"two" == read_whole(str(file))
    assert names(tmp_path) == ["state"] and stat.S_IMODE(file.stat().st_mode) == 0o600
    assert [call.name for call in disk.calls] == ["create", "write", "sync", "rename", "sync"] * 2
    assert [call.folder for call in disk.calls if call.name == "sync"] == ["", ".", "", "."]


def test_leftovers_and_links_are_replaced(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.write_bytes(b"precious")
    for name in ("state", "state.new"):
        (tmp_path / name).symlink_to(precious)
    with pytest.raises(OSError, match="symbolic links"):
        read_whole(str(tmp_path / "state"))
    replace_durably(str(tmp_path / "state"), b"mine")
    assert precious.read_bytes() == b"precious"
    assert not (tmp_path / "state").is_symlink() and (tmp_path / "state").read_bytes() == b"mine"
    (tmp_path / "state.new").write_bytes(b"left by a run that was killed, and longer")
    replace_durably(str(tmp_path / "state"), b"short")
    assert (tmp_path / "state").read_bytes() == b"short"


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
@pytest.mark.parametrize("call", range(1, len(CALLS) + 1))
def test_a_failure_leaves_the_old_file(tmp_path: Path, call: int, code: int) -> None:
    file = tmp_path / "state"
    replace_durably(str(file), b"old")
    with RecordedDisk(tmp_path) as disk:
        disk.fail(call, code)
        if code == errno.EIO:
            with pytest.raises(StorageError, match=r"cannot write .*/state \(Input/output error\): check") as caught:
                replace_durably(str(file), b"new!")
            assert caught.value.errno == errno.EIO and caught.value.path == str(file)
        else:
            with pytest.raises(CapacityError, match=r"/state needs 4 bytes but its free space .* is [\d,]+ bytes"):
                replace_durably(str(file), b"new!")
    is_renamed = call > CALLS.index("rename") + 1  # only the directory is not synced
    assert file.read_bytes() == (b"new!" if is_renamed else b"old") and names(tmp_path) == ["state"]
    replace_durably(str(file), b"again")
    assert file.read_bytes() == b"again"


def test_a_removal_is_synced_and_a_second_one_does_nothing(tmp_path: Path) -> None:
    file = tmp_path / "state"
    file.touch()
    with RecordedDisk(tmp_path) as disk:
        remove_durably(str(file))
        remove_durably(str(file))
        assert [call.name for call in disk.calls] == ["unlink", "sync"] and not file.exists()
        file.touch()
        disk.fail(1, errno.EIO)
        with pytest.raises(StorageError, match=r"cannot remove .*/state \(Input/output error\)"):
            remove_durably(str(file))


def test_a_short_write_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, content, offset: real(fd, content[:3], offset))
    replace_durably(str(tmp_path / "state"), b"in several calls")
    assert (tmp_path / "state").read_bytes() == b"in several calls"

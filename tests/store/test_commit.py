from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from hf_lohan.files import StorageError
from hf_lohan.store import Commit
from hf_lohan.store.commits import COMMIT_NAME, read_commit, write_commit

COMMIT = Commit(
    store_id="abc",
    number=7,
    home=np.array([0, 1, 2, 0, 1], np.uint8),
    checksum=np.array([1, 2**64 - 1, 0, 12345678901234567890, 5], np.uint64),
    facts={"step": 7, "name": "ünï", "nested": {"list": [1.5, None, True]}},
    journal={"rng_state.pth": bytes(range(256)), "empty": b"", "home": b"no tensor of the commit"},
    log_start_byte=3,
    log_stop_byte=9,
    log_crc32=4000000000,
    is_torn=True,
)


def fields(commit: Commit) -> dict[str, object]:
    arrays = {name: getattr(commit, name).tolist() for name in ("home", "checksum")}
    return asdict(commit) | arrays


def test_a_written_commit_is_read(tmp_path: Path) -> None:
    assert read_commit(str(tmp_path)) is None
    write_commit(COMMIT, str(tmp_path))
    found = read_commit(str(tmp_path))
    assert found is not None and fields(found) == fields(COMMIT)
    assert (found.home.dtype, found.checksum.dtype) == (np.uint8, np.uint64)
    write_commit(replace(COMMIT, number=8, journal={}, home=np.zeros(0, np.uint8)), str(tmp_path))
    found = read_commit(str(tmp_path))
    assert found is not None and (found.number, found.journal, found.home.size) == (8, {}, 0)
    assert [entry.name for entry in tmp_path.iterdir()] == [COMMIT_NAME]


def test_facts_that_json_cannot_hold_leave_the_last_commit(tmp_path: Path) -> None:
    write_commit(COMMIT, str(tmp_path))
    with pytest.raises(TypeError, match="not JSON serializable"):
        write_commit(replace(COMMIT, number=8, facts={"path": tmp_path}), str(tmp_path))
    found = read_commit(str(tmp_path))
    assert found is not None and found.number == 7


def test_a_truncated_commit_is_refused(tmp_path: Path) -> None:
    write_commit(COMMIT, str(tmp_path))
    file = tmp_path / COMMIT_NAME
    sound = file.read_bytes()
    for num_bytes in range(len(sound)):
        file.write_bytes(sound[:num_bytes])
        with pytest.raises(StorageError, match=f"no valid commit in .*{COMMIT_NAME}: check the drive"):
            read_commit(str(tmp_path))
    file.write_bytes(sound + b"\0")
    with pytest.raises(StorageError, match="no valid commit"):
        read_commit(str(tmp_path))


def test_other_files_are_refused_as_commits(tmp_path: Path) -> None:
    file = tmp_path / COMMIT_NAME
    header = json.dumps({"home": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]}}).encode()
    for content in (b"", b"{}", bytes(100), len(header).to_bytes(8, "little") + header + b"\0"):
        file.write_bytes(content)
        with pytest.raises(StorageError, match="no valid commit in"):
            read_commit(str(tmp_path))
    file.unlink()
    file.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=rf"cannot read .*{COMMIT_NAME} .*symbolic links"):
        read_commit(str(tmp_path))
    file.unlink()
    file.mkdir()
    with pytest.raises(StorageError, match=rf"expected a regular file at .*{COMMIT_NAME}"):
        read_commit(str(tmp_path))

from __future__ import annotations

import errno
import logging
import os
import stat
from pathlib import Path

import pytest
import torch
from storage_doubles import FaultyBackend, NoDirectBackend, ShortBackend

from hf_lohan.device import mapped_empty
from hf_lohan.files import DataFile, FileBackend, StorageError
from hf_lohan.files.data_file import sector_view

NUM_BYTES = 65536


def round_trip(file: DataFile) -> None:
    file.allocate(NUM_BYTES)
    source, out = mapped_empty(NUM_BYTES).random_(0, 256), mapped_empty(NUM_BYTES)
    file.write(0, [sector_view(source)])
    file.read(0, [sector_view(half) for half in out.chunk(2)])
    file.sync()
    file.close()
    assert torch.equal(out, source)
    assert Path(file.path).read_bytes() == source.numpy().tobytes()


@pytest.mark.parametrize("max_bytes", [4096, 5000, 12288, 20000])
def test_short_calls_are_continued(tmp_path: Path, max_bytes: int) -> None:
    backend = ShortBackend(max_bytes)
    round_trip(DataFile(str(tmp_path / "f"), backend, create=True))
    assert backend.calls["write"] >= NUM_BYTES // max_bytes


def test_a_direct_call_that_ends_inside_a_sector_continues_at_its_start(tmp_path: Path) -> None:
    class Reports(FileBackend):
        """Moves all bytes but reports fewer, like a direct call that the kernel cuts short."""

        def write(self, fd, offset, views):  # type: ignore[no-untyped-def]
            assert offset % 4096 == 0
            return min(super().write(fd, offset, views), 10000)

        def read(self, fd, offset, views):  # type: ignore[no-untyped-def]
            assert offset % 4096 == 0
            return min(super().read(fd, offset, views), 10000)

    file = DataFile(str(tmp_path / "f"), Reports(), create=True)
    if not file.is_direct:
        pytest.skip("the file system of the temporary directory has no O_DIRECT")
    round_trip(file)


def test_calls_of_less_than_a_sector_are_continued(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    round_trip(DataFile(str(tmp_path / "f"), ShortBackend(1000), create=True))
    assert len(caplog.records) <= 1


@pytest.mark.parametrize("refuses_at_open", [True, False])
def test_the_fallback_to_buffered_io_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, refuses_at_open: bool
) -> None:
    caplog.set_level(logging.INFO)
    file = DataFile(str(tmp_path / "f"), NoDirectBackend(refuses_at_open=refuses_at_open), create=True)
    round_trip(file)
    assert not file.is_direct
    (record,) = caplog.records
    assert file.path in record.message and "O_DIRECT" in record.message


def test_einval_without_o_direct_is_an_error(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "f"), FaultyBackend("read", 1, errno.EINVAL, sticky=True), create=True)
    file.allocate(NUM_BYTES)
    with pytest.raises(StorageError, match="Invalid argument"):
        file.read(0, [sector_view(mapped_empty(4096))])
    file.close()


def test_the_end_of_the_file_is_an_error_with_counts(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "f"), FileBackend(), create=True)
    file.allocate(8192)
    with pytest.raises(StorageError, match=r"ended after 8192 of 16384 bytes .* at byte 8192") as caught:
        file.read(0, [sector_view(mapped_empty(16384))])
    assert (caught.value.path, caught.value.offset) == (file.path, 8192)
    file.close()


def test_a_write_that_moves_nothing_raises(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "f"), ShortBackend(0), create=True)
    with pytest.raises(StorageError, match="ended after 0 of 4096 bytes"):
        file.write(0, [sector_view(mapped_empty(4096))])
    file.close()


@pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.ENOSYS])
def test_zeros_are_written_if_space_cannot_be_preallocated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    num_bytes = (4 << 20) + 8192
    file = DataFile(str(tmp_path / "f"), FaultyBackend("allocate", 1, code), create=True)
    file.allocate(num_bytes)
    file.close()
    status = os.stat(file.path)
    assert status.st_size == num_bytes and status.st_blocks * 512 >= num_bytes
    assert not any(Path(file.path).read_bytes())
    assert "cannot preallocate" in caplog.text


def test_sync_errors_are_named(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "f"), FaultyBackend("sync", 1, errno.EIO), create=True)
    with pytest.raises(StorageError, match=r"cannot sync .*/f \(Input/output error\)"):
        file.sync()
    file.close()


def test_files_are_private_and_links_are_not_followed(tmp_path: Path) -> None:
    file = DataFile(str(tmp_path / "f"), FileBackend(), create=True)
    file.close()
    assert stat.S_IMODE(os.stat(file.path).st_mode) == 0o600
    with pytest.raises(StorageError, match="File exists"):
        DataFile(file.path, FileBackend(), create=True)
    (tmp_path / "link").symlink_to(file.path)
    with pytest.raises(StorageError, match="symbolic links"):
        DataFile(str(tmp_path / "link"), FileBackend(), create=False)


@pytest.mark.parametrize("is_direct", [True, False])
def test_a_sync_after_a_failed_one_succeeds_only_with_direct_io(tmp_path: Path, is_direct: bool) -> None:
    """The page cache forgets data that it could not write."""
    backend = FaultyBackend("sync", 1, errno.EIO)
    file = DataFile(str(tmp_path / "f"), backend, create=True)
    file.is_direct = is_direct
    with pytest.raises(StorageError, match="cannot sync"):
        file.sync()
    if not is_direct:
        with pytest.raises(StorageError, match="cannot sync"):
            file.sync()
        file.forget_failure()
    file.sync()
    file.close()

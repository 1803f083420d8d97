"""States cloned from the store equal copied states, and a full disk is reported before any write."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from trained_states import FORMATS, Offload, train

from hf_lohan.checkpoint import optimizer_states
from hf_lohan.checkpoint.optimizer_states import save_optimizer_states
from hf_lohan.engine import OffloadEngine, ParameterAccess
from hf_lohan.files import Extent, StorageError
from hf_lohan.model import Block
from hf_lohan.testing.models import tiny_model


def clone_by_copying(num_allowed: int, refusal: int = errno.EOPNOTSUPP) -> Callable[[int, int, bytes], int]:
    """Return a replacement for the clone ioctl that copies bytes. It fails with `refusal` after `num_allowed` calls."""
    requested: list[int] = []

    def ioctl(target_fd: int, request: int, argument: bytes) -> int:
        source_fd, source_offset, num_bytes, target_offset = struct.unpack("=qQQQ", argument)
        assert request == 0x4020940D
        assert source_offset % 4096 == num_bytes % 4096 == target_offset % 4096 == 0
        requested.append(num_bytes)
        if len(requested) > num_allowed:
            raise OSError(refusal, os.strerror(refusal))
        os.pwrite(target_fd, os.pread(source_fd, num_bytes, source_offset), target_offset)
        return 0

    return ioctl


def records_in_files(engine: OffloadEngine, folder: Path) -> dict[tuple[str, str], list[tuple[str, Extent]]]:
    """Write each record to two files, as a store of two paths may, and return its extents in reverse order."""
    folder.mkdir()
    extents = {}
    for block in engine.layout.blocks:
        for kind in engine.layout.master.state_kinds:
            numel = engine.layout.master.numel(kind, block.state_numel)
            record = torch.zeros(numel, dtype=block.master.state_dtype(kind))
            for part in block.trainable_slices:
                start, stop = block.master.elements(kind, part.start, part.stop)
                record[start:stop] = engine.parameters.read_flat(part.name, kind)
            data = record.view(torch.uint8).numpy().tobytes()
            cut = len(data) // 8192 * 4096
            first, second = (folder / f"{block.name}.{kind}.{number}" for number in range(2))
            first.write_bytes(bytes(8192) + data[:cut])
            second.write_bytes(data[cut:])
            places = [(str(second), Extent(1, 0, cut, len(data) - cut)), (str(first), Extent(0, 8192, 0, cut))]
            extents[block.name, kind] = [place for place in places if place[1].num_bytes]
    return extents


@pytest.mark.covering(1)
@FORMATS
@pytest.mark.parametrize("num_allowed", [0, 1, 10_000], ids=["refused", "refused_half_way", "cloned"])
def test_cloned_records_equal_copied_ones(
    num_allowed: int,
    dtype: torch.dtype,
    state_dtype: str,
    offload: Offload,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = offload(tiny_model("llama"), dtype=dtype, optimizer_state_dtype=state_dtype)
    train(engine, range(2))
    store = engine.tiers.store
    monkeypatch.setattr(store, "extents", lambda *_: None)
    save_optimizer_states(engine, tmp_path / "copied")
    extents = records_in_files(engine, tmp_path / "records")
    monkeypatch.setattr(store, "extents", lambda block, kind: extents[block, kind])
    monkeypatch.setattr(fcntl, "ioctl", clone_by_copying(num_allowed))
    copied: list[str] = []
    read_own = ParameterAccess.read_own

    def counted(access: ParameterAccess, block: Block, kind: str, first: int, last: int) -> Any:
        copied.append(f"{block.name}.{kind}.{first}")
        return read_own(access, block, kind, first, last)

    monkeypatch.setattr(ParameterAccess, "read_own", counted)
    save_optimizer_states(engine, tmp_path / "cloned")
    num_states = sum(len(engine.parameters.state_kinds(part.name)) for part in engine.parameter_slices)
    assert len(copied) == (0 if num_allowed == 10_000 else num_states)
    first, second = (
        {path.name: path.read_bytes() for path in (tmp_path / name / "lohan").iterdir()}
        for name in ("copied", "cloned")
    )
    assert first == second


def test_a_clone_with_an_io_error_raises(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offload(tiny_model("llama"))
    extents = records_in_files(engine, tmp_path / "records")
    monkeypatch.setattr(engine.tiers.store, "extents", lambda block, kind: extents[block, kind])
    monkeypatch.setattr(fcntl, "ioctl", clone_by_copying(0, errno.EIO))
    with pytest.raises(StorageError, match=r"cannot clone \d+ bytes into .*optimizer-00000"):
        save_optimizer_states(engine, tmp_path)


def test_a_full_disk_is_refused_before_any_write(
    offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clones need free space too: the store's next version takes it in the middle of a step."""
    engine = offload(tiny_model("llama"))
    needed_bytes = sum(8 * block.state_numel for block in engine.layout.blocks)
    usage = shutil.disk_usage(tmp_path)._replace(free=needed_bytes - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(StorageError, match=f"they need {needed_bytes:,} bytes and {needed_bytes - 1:,} are free"):
        save_optimizer_states(engine, tmp_path)
    assert not list((tmp_path / "lohan").iterdir())
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=needed_bytes))
    save_optimizer_states(engine, tmp_path)


def test_a_failed_write_returns_the_buffers(offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = offload(tiny_model("llama"))

    def fail(path: Path, tensors: Any) -> None:
        next(iter(tensors[0].pieces)), next(iter(tensors[0].pieces))  # in the middle of a parameter
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(optimizer_states, "write_safetensors", fail)
    before = engine.tiers.states.num_free
    with pytest.raises(OSError, match="broken") as _kept:
        save_optimizer_states(engine, tmp_path)
    assert engine.tiers.states.num_free == before

"""The caller of a read verifies its granules."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from hf_lohan.files import CorruptionError, IoEngine, StorePath
from hf_lohan.store import RecordFiles, RecordRead, RecordSpec, StoreLayout

GRANULE = 2048
RECORD = RecordSpec("block", "exp_avg", "float32", 8192, granule_numel=GRANULE)
Values = Callable[[RecordSpec, int], torch.Tensor]


@pytest.fixture
def files(tmp_path: Path, engine: IoEngine) -> Iterator[RecordFiles]:
    layout = StoreLayout((RECORD,), (StorePath(str(tmp_path), 1),))
    with RecordFiles.create_files(layout, [str(tmp_path)], "r.bin", engine) as files:
        yield files


@pytest.fixture
def damaged(files: RecordFiles, random_values: Values, tmp_path: Path) -> RecordRead:
    """A read of a record with a flipped bit in the third of four granules."""
    files.write("block", "exp_avg", 0, random_values(RECORD, RECORD.numel)).wait()
    with (tmp_path / "r.bin").open("r+b") as stream:
        stream.seek(2 * 4 * GRANULE + 5)
        flipped = stream.read(1)[0] ^ 1
        stream.seek(2 * 4 * GRANULE + 5)
        stream.write(bytes([flipped]))
    return files.read("block", "exp_avg", 0, random_values(RECORD, RECORD.numel))


def test_only_verified_granules_count(damaged: RecordRead) -> None:
    damaged.wait_for_bytes()
    assert damaged.done() and damaged.num_bytes == RECORD.num_bytes and not damaged.is_verified
    damaged.verify(0, 2)
    damaged.verify(3, 4)
    assert not damaged.is_verified
    for _ in range(2):
        with pytest.raises(CorruptionError, match=r"exp_avg of block .* from element 4096 on .*r\.bin at byte 16384"):
            damaged.verify(2, 3)
        with pytest.raises(CorruptionError):
            damaged.wait()
    assert not damaged.is_verified


def test_only_granules_that_were_read_are_verified(damaged: RecordRead) -> None:
    damaged.wait_for_bytes()
    for first, stop in [(-1, 2), (0, 5), (3, 2)]:
        with pytest.raises(AssertionError, match=f"granules {first} to {stop} of 4"):
            damaged.verify(first, stop)


def test_verifying_part_by_part_verifies_all(files: RecordFiles, random_values: Values) -> None:
    values, out = random_values(RECORD, RECORD.numel), random_values(RECORD, RECORD.numel)
    files.write("block", "exp_avg", 0, values, checksums=files.checksums("block", "exp_avg", values)).wait()
    read = files.read("block", "exp_avg", GRANULE, out[: 3 * GRANULE])
    read.wait_for_bytes()
    for granule in (2, 0, 1):
        assert not read.is_verified
        read.verify(granule, granule + 1)
    assert read.is_verified
    assert torch.equal(out[: 3 * GRANULE].view(torch.int32), values[GRANULE:].view(torch.int32))


def test_reads_are_verified_with_the_given_checksums(files: RecordFiles, random_values: Values) -> None:
    values = random_values(RECORD, RECORD.numel)
    wrong = files.checksums("block", "exp_avg", values)
    wrong[1] += 1
    files.write("block", "exp_avg", 0, values, checksums=wrong).wait()
    with pytest.raises(CorruptionError, match="from element 2048 on"):
        files.read("block", "exp_avg", 0, values).wait()
    with pytest.raises(AssertionError, match="each granule needs a checksum"):
        files.write("block", "exp_avg", 0, values, checksums=wrong[1:])


def test_a_read_from_memory_needs_no_verification() -> None:
    read = RecordRead.of_memory()
    read.wait_for_bytes()
    read.verify(5, 7)
    read.wait()
    assert read.done() and read.is_verified and read.num_bytes == 0

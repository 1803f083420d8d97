"""Records with a copy in RAM are read without the SSD and equal the store."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from resident_stores import ALL, MOMENT, WEIGHT, is_all, open_store, values
from storage_doubles import FaultyBackend, FlippingBackend
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import CorruptionError, IoEngine, StorageError, TornStoreError
from hf_lohan.store import GRANULE_NUMEL, Store


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[Store, IoEngine]]:
    with open_store(tmp_path) as both:
        yield both


def test_memory_is_allocated_once_with_the_size_of_the_records(tmp_path: Path) -> None:
    taken: list[int] = []

    def host_empty(num_bytes: int) -> Tensor:
        taken.append(num_bytes)
        return mapped_empty(num_bytes)

    with open_store(tmp_path, resident=()) as (store, _):
        store.ram.allocate_copies([], host_empty)
        assert taken == []
        store.ram.allocate_copies([("layer", "param"), ("layer", "exp_avg")], host_empty)
        assert taken == [WEIGHT.num_bytes + MOMENT.num_bytes]
        for record, value in ((WEIGHT, 2), (MOMENT, 4)):  # the copies do not overlap
            store.write(record.block, record.kind, 0, values(record, fill=value)).wait()
        assert is_all(store, 2) and is_all(store, 4, record=MOMENT)


def test_dropping_drafts_restores_the_commit(opened: tuple[Store, IoEngine]) -> None:
    store, engine = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.write("layer", "exp_avg", 0, values(MOMENT, fill=5)).wait()
    store.commit()
    store.write(*ALL, values(WEIGHT, fill=2)).wait()
    assert is_all(store, 2)
    store.drop_drafts()
    assert is_all(store, 1) and is_all(store, 1)
    assert engine.read_bytes == WEIGHT.num_bytes
    assert is_all(store, 5, record=MOMENT)  # not written since the commit, so its copy is still valid
    assert engine.read_bytes == WEIGHT.num_bytes


def test_a_read_during_a_drop_is_not_kept(opened: tuple[Store, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.commit()
    bounce = values(WEIGHT).view(torch.uint8)
    store.write_unaligned(*ALL, values(WEIGHT, fill=2), bounce)  # has no copy until it is read
    guess = values(WEIGHT)
    reading = store.read(*ALL, guess)
    store.drop_drafts()
    reading.wait()
    assert (guess == 2).all()
    assert is_all(store, 1)


def test_cleared_records_are_zeros_until_a_drop(opened: tuple[Store, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.commit()
    for _ in range(2):
        store.clear_records()
        assert is_all(store, 0) and is_all(store, 0)
        store.drop_drafts()
        assert is_all(store, 1)
    store.clear_records()
    store.write(*ALL, values(WEIGHT, fill=7)).wait()
    assert is_all(store, 7)
    store.drop_drafts()
    assert is_all(store, 1)


def test_a_failed_write_is_not_kept_in_ram(tmp_path: Path) -> None:
    backend = FaultyBackend("write", 1 << 60, errno.EIO)
    with open_store(tmp_path, backend=backend) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        backend.fail_on = backend.calls["write"] + 1
        with pytest.raises(StorageError):
            store.write(*ALL, values(WEIGHT, fill=2)).wait()
        assert is_all(store, 1)
        store.write(*ALL, values(WEIGHT, fill=3)).wait()
        assert is_all(store, 3)
        store.commit()
        assert is_all(store, 3)


def test_a_write_that_cannot_begin_is_not_kept_in_ram(opened: tuple[Store, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    proceed, store._before_write = store._before_write, _refuse
    with pytest.raises(OSError, match="planned"):
        store.write(*ALL, values(WEIGHT, fill=2))
    store._before_write = proceed
    assert is_all(store, 1)


def _refuse(_tears: bool) -> None:
    raise OSError("planned")


def test_a_torn_store_reads_like_its_files(tmp_path: Path) -> None:
    with open_store(tmp_path, num_homes=1) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        store.write("layer", "param", 0, values(WEIGHT, GRANULE_NUMEL, fill=2)).wait()
        with pytest.raises(TornStoreError):
            store.drop_drafts()
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()


def test_damaged_granules_raise_and_are_not_kept(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path, backend=FlippingBackend("read", 1, 77)) as (store, _):
        with pytest.raises(CorruptionError, match="param of layer is damaged"):
            is_all(store, 1)
        assert is_all(store, 1)  # the second read gets the right bytes


def test_only_missing_parts_are_read_from_the_ssd(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path) as (store, engine):
        store.write(*ALL, values(WEIGHT, GRANULE_NUMEL, fill=2)).wait()
        part = values(WEIGHT, GRANULE_NUMEL)
        store.read(*ALL, part).wait()
        assert (part == 2).all() and engine.read_bytes == 0
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()
        assert engine.read_bytes > 0

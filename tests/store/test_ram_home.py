"""Between two commits, the newest version of a record may be only in RAM. It reads like a written one. The next commit
writes it, and `drop_drafts` discards it.
"""

from __future__ import annotations

import errno
import tempfile
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_stores import ALL, CHUNKS, MOMENT, RECORDS, WEIGHT, is_all, open_store, values
from storage_doubles import FaultyBackend
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import StorageError, TornStoreError
from hf_lohan.store import GRANULE_NUMEL, RecordSpec, Store


def test_nothing_is_written_before_the_commit(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, engine):
        store.ram.keep_new(True)
        for fill in (1, 2, 3):
            store.write(*ALL, values(WEIGHT, fill=fill)).wait()
            assert is_all(store, fill)
        assert engine.write_bytes == engine.read_bytes == 0
        store.commit()
        assert engine.write_bytes == WEIGHT.num_bytes
        store.commit()
        assert engine.write_bytes == WEIGHT.num_bytes  # nothing is written twice
        assert is_all(store, 3)
    with open_store(tmp_path, resident=()) as (store, _):
        store.drop_drafts()
        assert is_all(store, 3)


def test_records_without_a_copy_are_written_at_once(tmp_path: Path) -> None:
    with open_store(tmp_path, resident=(MOMENT,)) as (store, engine):
        store.ram.keep_new(True)
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        assert engine.write_bytes == WEIGHT.num_bytes
        assert not store.ram.keeps_write("layer", "param") and store.ram.keeps_write("layer", "exp_avg")


def test_borrowed_memory_is_changed_in_place(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, engine):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        assert store.ram.borrow("layer", "param", 0, WEIGHT.numel) is None  # this record must be written at once
        store.ram.keep_new(True)
        before = engine.write_bytes
        lent = store.ram.borrow("layer", "param", GRANULE_NUMEL, GRANULE_NUMEL)
        assert lent is not None and (lent == 1).all()
        lent += 1
        store.write("layer", "param", GRANULE_NUMEL, lent).wait()
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert (out[GRANULE_NUMEL : 2 * GRANULE_NUMEL] == 2).all() and out.sum() == WEIGHT.numel + GRANULE_NUMEL
        assert engine.write_bytes == before and engine.read_bytes == 0
        store.commit()
        assert engine.write_bytes == before + GRANULE_NUMEL * WEIGHT.itemsize


def test_records_that_are_not_in_ram_cannot_be_borrowed(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path) as (store, _):
        store.ram.keep_new(True)
        assert store.ram.borrow("layer", "param", 0, GRANULE_NUMEL) is None
        assert is_all(store, 1)
        assert store.ram.borrow("layer", "param", 0, GRANULE_NUMEL) is not None


def test_an_unfinished_change_is_not_committed(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        store.ram.keep_new(True)
        store.write(*ALL, values(WEIGHT, fill=2)).wait()
        lent = store.ram.borrow("layer", "param", 0, GRANULE_NUMEL)
        lent[:7] = 5  # the change is not finished
        with pytest.raises(StorageError, match="incomplete in RAM"):
            is_all(store, 2)
        with pytest.raises(StorageError, match="is incomplete from element"):
            store.commit()
        store.drop_drafts()
        assert is_all(store, 1)


def test_a_failed_write_back_can_be_repeated(tmp_path: Path) -> None:
    backend = FaultyBackend("write", 1 << 60, errno.EIO)
    with open_store(tmp_path, backend=backend) as (store, _):
        store.ram.keep_new(True)
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        store.write(*ALL, values(WEIGHT, fill=2)).wait()
        backend.fail_on = backend.calls["write"] + 1
        with pytest.raises(StorageError):
            store.commit()
        assert is_all(store, 2)
        store.commit()
    with open_store(tmp_path, resident=()) as (store, _):
        store.drop_drafts()
        assert is_all(store, 2)


OPERATIONS = (
    *("write", "change", "change", "write_unaligned", "read", "commit", "drop"),
    *("keep", "write_through", "reopen"),
)
Contents = dict[str, Tensor]


@settings(max_examples=80)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 2]),
    st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=30),
    st.sets(st.sampled_from(RECORDS), min_size=1),
)
def test_a_store_reads_like_tensors_in_memory(
    seed: int, num_homes: int, operations: list[str], resident: set[RecordSpec]
) -> None:
    """The reference is a copy of all records in memory, now and at the last commit."""
    random = Random(seed)
    now = {str(record): torch.zeros(record.numel) for record in RECORDS}
    committed: Contents | None = None
    remaining = list(operations)
    with tempfile.TemporaryDirectory() as folder:
        while remaining:
            with open_store(Path(folder), num_homes=num_homes, resident=tuple(resident)) as (store, _):
                if committed is None:
                    store.clear_records()
                    now = {name: torch.zeros_like(value) for name, value in now.items()}
                else:
                    try:
                        store.drop_drafts()
                    except TornStoreError:
                        return  # one home was overwritten, and the store says so
                    now = {name: value.clone() for name, value in committed.items()}
                store.ram.keep_new(random.random() < 0.7)
                while remaining and (operation := remaining.pop(0)) != "reopen":
                    committed = act(store, operation, random, now, committed)
                    if store.versions.is_torn and operation == "drop":
                        return
                assert_reads_as(store, now)


def act(store: Store, operation: str, random: Random, now: Contents, committed: Contents | None) -> Contents | None:
    record, start, stop = random.choice(CHUNKS)
    fill = float(random.randrange(100))
    match operation:
        case "write":
            store.write(record.block, record.kind, start, values(record, stop - start, fill=fill)).wait()
            now[str(record)][start:stop] = fill
        case "change":
            lent = store.ram.borrow(record.block, record.kind, start, stop - start)
            if lent is not None:
                assert torch.equal(lent.float(), now[str(record)][start:stop])
                lent.fill_(fill)
                store.write(record.block, record.kind, start, lent).wait()
                now[str(record)][start:stop] = fill
        case "write_unaligned":
            first = random.randrange(start, stop)
            source = values(record, random.randrange(1, record.numel - first + 1), fill=fill)
            bounce = mapped_empty(2 * record.granule_bytes)
            store.write_unaligned(record.block, record.kind, first, source, bounce)
            now[str(record)][first : first + source.numel()] = fill
        case "read":
            assert_reads_as(store, now)
        case "commit":
            store.commit()
            return {name: value.clone() for name, value in now.items()}
        case "drop":
            if store.versions.is_torn:
                with pytest.raises(TornStoreError):
                    store.drop_drafts()
            elif committed is not None:
                store.drop_drafts()
                now.update({name: value.clone() for name, value in committed.items()})
        case "keep" | "write_through":
            store.ram.keep_new(operation == "keep")
    return committed


def assert_reads_as(store: Store, now: Contents) -> None:
    for record in RECORDS:
        out = values(record)
        store.read(record.block, record.kind, 0, out).wait()
        assert torch.equal(out.float(), now[str(record)]), record

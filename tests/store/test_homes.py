"""Stores with one or two homes: sizes, extents, frozen records and refusals."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from versioned_stores import MODEL, RECORDS, fill, new_store

from hf_lohan.files import ForeignStoreError, IoEngine, StorageError, StorePath
from hf_lohan.store import GRANULE_NUMEL, RecordSpec, Store, last_commit
from hf_lohan.store.commits import read_commit, write_commit
from hf_lohan.testing.stored_state import aligned, content_of


def test_a_store_without_versioned_records_needs_no_second_home(tmp_path: Path, engine: IoEngine) -> None:
    frozen = (RECORDS[3],)
    with new_store(tmp_path, engine, 2, frozen) as store:
        assert store.size_bytes == frozen[0].num_bytes and store.num_homes == 2
        fill(store, frozen, Random(1))
        store.commit()
        before, paths = content_of(store), store.paths
    assert [(Path(path.path) / "records-1.bin").stat().st_size for path in paths] == [0, 0]
    with Store.open(paths, model=MODEL, engine=engine) as store:
        assert content_of(store) == before


def test_two_homes_take_the_versioned_part_twice(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 2) as store:
        twice = sum(record.versioned_numel * record.itemsize for record in RECORDS)
        assert store.size_bytes == sum(record.num_bytes for record in RECORDS) + twice
        on_disk = [file for path in store.paths for file in Path(path.path).glob("records-*.bin")]
        assert sum(file.stat().st_size for file in on_disk) == store.size_bytes


def test_extents_have_the_bytes_that_are_read(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 2) as store:
        assert store.extents("a", "param") is None
        for seed in (1, 2):
            fill(store, RECORDS, Random(seed))
            store.commit()
        store.write("a", "param", 0, aligned(RECORDS[0], GRANULE_NUMEL, Random(3))).wait()  # a draft
        store.sync()
        content = content_of(store)
        for name in (("a", "param"), ("tail", "param"), ("frozen", "param")):
            extents = store.extents(*name)
            assert extents is not None
            parts = []
            for path, extent in extents:
                with open(path, "rb") as file:
                    file.seek(extent.file_offset)
                    parts.append(file.read(extent.num_bytes))
            assert b"".join(parts) == content[name]
        store.clear_records()
        assert store.extents("a", "param") is None


def test_parts_of_two_stores_are_not_mixed(tmp_path: Path, engine: IoEngine) -> None:
    for name in ("one", "two"):
        with new_store(tmp_path / name, engine, 2) as store:
            fill(store, RECORDS, Random(name))
            store.commit()
    mine, theirs = ([StorePath(str(tmp_path / name / part)) for part in "ab"] for name in ("one", "two"))
    with pytest.raises(ForeignStoreError, match="parts of different stores"):
        Store.open([mine[0], theirs[1]], model=MODEL, engine=engine)
    shutil.copy(Path(theirs[0].path) / "commit.safetensors", mine[0].path)
    for look in (lambda: Store.open(mine, model=MODEL, engine=engine), lambda: last_commit([p.path for p in mine])):
        with pytest.raises(ForeignStoreError, match="belongs to another store than the manifest there"):
            look()


def test_a_commit_that_does_not_fit_its_manifest_is_refused(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 1) as store:
        store.commit()
        paths = store.paths
    commit = read_commit(paths[0].path)
    commit.home[0] = 1
    write_commit(commit, paths[0].path)
    with pytest.raises(ForeignStoreError, match=r"does not fit its manifest .*homes that do not exist"):
        Store.open(paths, model=MODEL, engine=engine)


def test_an_unfinished_store_is_created_again_unless_it_has_a_commit(tmp_path: Path, engine: IoEngine) -> None:
    new_store(tmp_path, engine, 2).close()
    paths = [StorePath(str(tmp_path / part), 10**7) for part in "ab"]
    (tmp_path / "b" / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"there is no store in .*/b"):
        Store.open(paths, model=MODEL, engine=engine)
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine) as store:
        fill(store, RECORDS, Random(1))
        store.commit()
    (tmp_path / "b" / "manifest.json").rename(tmp_path / "b" / "away")
    with pytest.raises(StorageError, match=r"there is no store in .*/b"):
        Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine)
    (tmp_path / "b" / "away").rename(tmp_path / "b" / "manifest.json")
    other = StorePath(str(tmp_path / "c"), 10**7)
    with pytest.raises(StorageError, match=r"there is no store in .*/c"):  # path a has the commit
        Store.open_or_create([paths[1], other], RECORDS, model=MODEL, engine=engine)


@pytest.mark.parametrize(("durability", "num_homes"), [("auto", 2), ("step", 2), ("checkpoint", 1)])
def test_durability_decides_the_number_of_homes(
    tmp_path: Path, engine: IoEngine, durability: Any, num_homes: int
) -> None:
    paths = [StorePath(str(tmp_path), 10**7)]
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability=durability) as store:
        assert store.num_homes == num_homes
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine) as store:
        assert store.num_homes == num_homes
    other: Any = "step" if num_homes == 1 else "checkpoint"
    with pytest.raises(ForeignStoreError, match=f"not '{other}'; keep that setting"):
        Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability=other)


def test_auto_chooses_one_home_if_two_and_the_scratch_do_not_fit(tmp_path: Path, engine: IoEngine) -> None:
    once = sum(record.num_bytes for record in RECORDS)
    twice = once + sum(record.versioned_numel * record.itemsize for record in RECORDS)
    scratch = (RecordSpec("a", "gradient", "float32", 2048),)
    for extra_bytes, num_homes in ((-1, 1), (0, 2)):
        paths = [StorePath(str(tmp_path / str(num_homes)), twice + 8192 + extra_bytes)]
        with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, scratch=scratch) as store:
            assert store.num_homes == num_homes
            store.scratch(scratch)

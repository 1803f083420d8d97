"""Foreign, full, used and damaged stores are refused by name and do not change."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from data_files import EngineFactory
from storage_doubles import FaultyBackend
from store_contents import Paths, Records, Values, names, read_all

from hf_lohan.files import CapacityError, ForeignStoreError, IoEngine, StorageError, StoreInUseError, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.store.manifest import read_manifest


def test_the_store_of_another_model_is_refused_and_survives(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine, random_values: Values
) -> None:
    with Store.create(paths, records, model=model, engine=engine) as store:
        store.write("layers.0", "exp_avg", 0, random_values(records[2], 8192)).wait()
        store.commit()
        written = read_all(store)
    other = replace(model, fingerprint="other")
    describes_the_store = r"another model \(LlamaForCausalLM with 12,345 parameters, created 2.*\); give this run"
    with pytest.raises(ForeignStoreError, match=describes_the_store):
        Store.create(paths, records, model=other, engine=engine)
    with pytest.raises(ForeignStoreError, match=describes_the_store):
        Store.open(paths, model=other, engine=engine)
    assert hasattr(transformers, "LlamaForCausalLM") and not hasattr(transformers, "OwnModel")
    for stored, wanted, is_named in (("LlamaForCausalLM", "LlamaModel", True), ("OwnModel", "LlamaModel", False)):
        manifest = replace(read_manifest(paths[0].path), model=replace(model, model_class=stored))  # type: ignore[type-var]
        with pytest.raises(ForeignStoreError, match=r"no longer needed") as caught:
            manifest.refuse_other(replace(other, model_class=wanted), paths[0].path)
        advice = f"; to continue that run, load with model_class=transformers.{stored}"
        assert str(caught.value).endswith(advice) == is_named and ("model_class=" in str(caught.value)) == is_named
    with pytest.raises(
        ForeignStoreError,
        match=r"a holds a store with optimizer_state_dtype: float32, and this run has optimizer_state_dtype: int8",
    ):
        Store.open(paths, model=replace(other, optimizer_state_dtype="int8"), engine=engine)
    with Store.open(paths, model=model, engine=engine) as store:
        assert torch.equal(read_all(store), written)


def test_a_capacity_that_is_too_small_writes_nothing(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    tight = [replace(paths[0], capacity_bytes=30_000), replace(paths[1], capacity_bytes=50_000)]
    numbers = r"/a needs 32,768 bytes .* capacity is 30,000 bytes .*/b needs 57,344 bytes .* is 50,000 bytes"
    with pytest.raises(CapacityError, match=numbers) as caught:
        Store.create(tight, records, model=model, engine=engine)
    assert [shortfall.limit for shortfall in caught.value.shortfalls] == ["capacity", "capacity"]
    assert not any(os.path.exists(path.path) for path in paths)


def test_too_little_free_space_is_refused_before_any_write(
    tmp_path: Path, model: ModelIdentity, engine: IoEngine
) -> None:
    huge = [RecordSpec("layers.0", "param", "float32", 2048 << 36)]
    for capacity_bytes, limit in ((None, "capacity"), (1 << 60, "free space")):
        path = StorePath(str(tmp_path / "store"), capacity_bytes)
        with pytest.raises(CapacityError, match=rf"needs 562,949,953,421,312 bytes .* but its {limit} is [\d,]+ bytes"):
            Store.create([path], huge, model=model, engine=engine)
    assert not list(tmp_path.iterdir())


def test_paths_on_one_disk_share_its_free_space(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 90_111)
    with pytest.raises(CapacityError, match=r"/a and .*/b needs 90,112 bytes .* free space is 90,111 bytes"):
        Store.create(paths, records, model=model, engine=engine)
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 90_112)
    Store.create(paths, records, model=model, engine=engine).close()
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 0)
    unlimited = [StorePath(path.path) for path in paths]
    # the new store reuses the space of the old one
    Store.create(unlimited, records, model=model, engine=engine).close()


@pytest.mark.parametrize("call, number", [("allocate", 1), ("allocate", 2), ("sync", 2), ("open", 2)])
def test_a_creation_that_fails_leaves_no_records_and_no_lock(
    paths: Paths, records: Records, model: ModelIdentity, make_engine: EngineFactory, call: str, number: int
) -> None:
    backend = FaultyBackend(call, number, errno.ENOSPC)
    with pytest.raises((CapacityError, StorageError)) as caught:
        Store.create(paths, records, model=model, engine=make_engine(backend))
    if call == "allocate":
        assert isinstance(caught.value, CapacityError) and "records-0.bin needs" in str(caught.value)
    assert backend.calls["open"] - (call == "open") == backend.calls["close"]
    assert all(names(path) == {"lock"} for path in paths if os.path.isdir(path.path))
    Store.create(paths, records, model=model, engine=make_engine()).close()


def test_unusable_paths_are_named(tmp_path: Path, records: Records, model: ModelIdentity, engine: IoEngine) -> None:
    (tmp_path / "file").touch()
    below_a_file = StorePath(str(tmp_path / "file" / "store"))
    with pytest.raises(StorageError, match=r"cannot use the ssd path .*store \(Not a directory\): .*file is") as caught:
        Store.create([below_a_file], records, model=model, engine=engine)
    assert caught.value.errno == errno.ENOTDIR and "\n" not in str(caught.value)
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    dangling = "dangling is a link to .*gone, which"
    for path, reason in (("file", "is a file; choose"), ("dangling", dangling), ("dangling/store", dangling)):
        with pytest.raises(StorageError, match=rf"cannot use the ssd path .*{path} .*{reason}"):
            Store.create([StorePath(str(tmp_path / path))], records, model=model, engine=engine)
    (tmp_path / "dangling").unlink()
    with pytest.raises(ValueError, match="there is no ssd path"):
        Store.create([], records, model=model, engine=engine)
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(ValueError, match="occurs twice"):
        twice = [StorePath(str(tmp_path)), StorePath(str(tmp_path / "link"))]
        Store.create(twice, records, model=model, engine=engine)
    with pytest.raises(ValueError, match=r"capacity of .* is -1 bytes"):
        Store.create([StorePath(str(tmp_path / "store"), -1)], records, model=model, engine=engine)
    assert {entry.name for entry in tmp_path.iterdir()} == {"file", "link"}


def test_a_directory_without_write_permission_is_named(
    tmp_path: Path, records: Records, model: ModelIdentity, engine: IoEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everywhere
    with pytest.raises(StorageError, match=r"/store \(Permission denied\): choose"):
        Store.create([StorePath(str(tmp_path / "store"))], records, model=model, engine=engine)
    assert not list(tmp_path.iterdir())


def test_a_second_use_is_refused(paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine) -> None:
    with Store.create(paths, records, model=model, engine=engine):
        with pytest.raises(StoreInUseError, match=rf"/a is in use by process {os.getpid()}; end that run"):
            Store.open(paths, model=model, engine=engine)
        with pytest.raises(StoreInUseError):
            Store.create(paths, records, model=model, engine=engine)
    Store.open(paths, model=model, engine=engine).close()


def test_open_names_missing_or_damaged_files(
    tmp_path: Path, paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    with pytest.raises(StorageError, match=r"there is no store in .*/a: give the directory"):
        Store.open(paths, model=model, engine=engine)
    assert not os.path.exists(paths[0].path)
    Store.create(paths, records, model=model, engine=engine).close()
    with pytest.raises(ForeignStoreError, match="part of a store over 2 paths, and 1 of them were passed"):
        Store.open(paths[:1], model=model, engine=engine)
    other = StorePath(str(tmp_path / "other"))
    Store.create([other], records, model=model, engine=engine).close()
    with pytest.raises(ForeignStoreError, match="parts of different stores"):
        Store.open([paths[0], other], model=model, engine=engine)
    with pytest.raises(CapacityError, match=r"/a needs .* capacity is 10 bytes"):
        Store.open([replace(paths[0], capacity_bytes=10), paths[1]], model=model, engine=engine)
    os.truncate(Path(paths[1].path) / "records-0.bin", 4096)
    with pytest.raises(StorageError, match=r"expected \d+ bytes but found 4096 in .*/b/records-0\.bin"):
        Store.open(paths, model=model, engine=engine)
    os.unlink(Path(paths[1].path) / "records-0.bin")
    with pytest.raises(StorageError, match=r"cannot open .*/b/records-0\.bin \(No such file"):
        Store.open(paths, model=model, engine=engine)

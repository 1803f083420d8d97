"""Creating, closing, opening and moving a store."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from data_files import EngineFactory
from storage_doubles import CountingBackend
from store_contents import Paths, Records, Values, data_file_bytes, names, read_all

from hf_lohan.files import IoEngine, StorePath
from hf_lohan.store import ModelIdentity, Store


def test_a_fresh_store_is_zeros_of_the_announced_size(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    with Store.create(paths, records, model=model, engine=engine) as store:
        assert store.size_bytes == data_file_bytes(paths) == sum(record.num_bytes for record in records)
        assert not read_all(store).any()
        assert store.records == records and store.model == model and store.paths == tuple(paths)
        assert store.has("layers.1", "param") and not store.has("layers.2", "param")


def test_a_moved_store_opens_in_its_new_folder(
    tmp_path: Path, paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    Store.create(paths, records, model=model, engine=engine).close()
    moved = [StorePath(str(tmp_path / f"moved{i}")) for i in range(len(paths))]
    for old, new in zip(paths, moved, strict=True):
        os.rename(old.path, new.path)
    with Store.open(moved, model=model, engine=engine) as store:
        assert [path.path for path in store.paths] == [path.path for path in moved]
    assert not any(os.path.exists(path.path) for path in paths)


def test_a_store_of_the_same_model_is_replaced_by_zeros(
    paths: Paths,
    records: Records,
    model: ModelIdentity,
    engine: IoEngine,
    random_values: Values,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with Store.create(paths, records, model=model, engine=engine) as store:
        store.write("layers.0", "exp_avg", 0, random_values(records[2], 8192)).wait()
        store.commit(log_lines=b"line")
    with Store.create(paths, records[:2], model=model, engine=engine) as store:
        assert not read_all(store).any()
        assert store.committed is None and store.log == b"" and "log.jsonl" not in names(paths[0])
        assert data_file_bytes(paths) == store.size_bytes == 32768
    assert "replaces the store of the same model" in caplog.text


def test_creating_a_store_reserves_and_syncs_all_files(
    paths: Paths, records: Records, model: ModelIdentity, make_engine: EngineFactory, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    backend = CountingBackend()
    Store.create(paths, records, model=model, engine=make_engine(backend)).close()
    assert backend.calls["allocate"] == backend.calls["sync"] == backend.calls["open"] == 2
    assert backend.calls["read"] == backend.calls["write"] == 0

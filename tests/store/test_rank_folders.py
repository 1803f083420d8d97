"""Each rank's store has its own folder. Stores of another number of ranks are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_lohan.files import ForeignStoreError, IoEngine, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store, last_commit
from hf_lohan.store.rank_folders import files_of, rank_folder, shared_directory, stores_under

pytestmark = pytest.mark.storm


def make(folder: str, records: list[RecordSpec], model: ModelIdentity, engine: IoEngine) -> None:
    Store.create([StorePath(folder)], records, model=model, engine=engine).close()


def test_stores_are_listed_by_generation_and_number_of_ranks(
    tmp_path: Path, records: list[RecordSpec], model: ModelIdentity, engine: IoEngine
) -> None:
    directory = str(tmp_path)
    for key in ((0, 1, 0), (0, 2, 0), (1, 2, 0), (0, 1, 2), (1, 2, 12)):
        assert shared_directory(rank_folder(directory, *key)) == directory
        make(rank_folder(directory, *key), records, model, engine)
    assert stores_under(directory) == {(0, 1): [0], (0, 2): [0, 1], (2, 1): [0], (12, 2): [1]}
    assert files_of(directory, 2, 12) == "the folders rank-*-of-2.g12"
    assert files_of(directory, 1, 0).startswith("the files manifest.json, records-0.bin")


def test_folders_without_a_store_are_ignored(tmp_path: Path) -> None:
    for name in ("rank-0-of-2", "rank-0-of-2-old", "rank-0-of-2.g0", "rank-0-of-2.g01", "rank-2-of-2", "rank-0-of-1"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").touch()
    (tmp_path / "rank-0-of-2" / "manifest.json").unlink()
    (tmp_path / "records").touch()
    assert stores_under(str(tmp_path)) == {}


def test_a_store_in_the_folder_of_another_rank_is_refused(
    tmp_path: Path, records: list[RecordSpec], model: ModelIdentity, engine: IoEngine
) -> None:
    first, second = (tmp_path / f"rank-{rank}-of-2" for rank in range(2))
    make(str(first), records, model, engine)
    shutil.copytree(first, second)
    shutil.copytree(first, tmp_path / "of the only rank")
    for folder, wanted in ((second, "rank 1 of 2"), (tmp_path / "of the only rank", "a run with one rank")):
        with pytest.raises(ForeignStoreError, match=rf"{folder} holds the store of rank 0 of 2, not of {wanted}; "):
            Store.open([StorePath(str(folder))], model=None, engine=engine)
        with pytest.raises(ForeignStoreError, match="its own name again"):
            last_commit([str(folder)])
    Store.open([StorePath(str(first))], model=None, engine=engine).close()

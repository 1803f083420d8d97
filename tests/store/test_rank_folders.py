"""Each rank's store has its own folder. Stores of another number of ranks are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hf_lohan.files import ForeignStoreError, IoEngine, StorePath
from hf_lohan.store import ModelIdentity, RecordSpec, Store, last_commit
from hf_lohan.store.rank_folders import rank_folder, refuse_other_ranks, stores_under

pytestmark = pytest.mark.storm


def make(folder: str, records: list[RecordSpec], model: ModelIdentity, engine: IoEngine) -> None:
    Store.create([StorePath(folder)], records, model=model, engine=engine).close()


def test_a_single_rank_uses_the_directory_itself() -> None:
    assert rank_folder("/drive/store", 0, 1) == "/drive/store"
    assert rank_folder("/drive/store", 2, 4) == "/drive/store/rank-2-of-4"


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_another_number_of_ranks_is_refused(
    num_ranks: int, tmp_path: Path, records: list[RecordSpec], model: ModelIdentity, engine: IoEngine
) -> None:
    directory = str(tmp_path / "store")
    refuse_other_ranks([directory], num_ranks)  # no store exists yet
    for rank in range(num_ranks):
        make(rank_folder(directory, rank, num_ranks), records, model, engine)
        refuse_other_ranks([directory], num_ranks)
    assert [rank for rank, _ in stores_under(directory)[num_ranks]] == list(range(num_ranks))
    stored_ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
    with pytest.raises(
        ForeignStoreError, match=rf"of a run with {stored_ranks}, and this run has 4 ranks; .* lohan reshard"
    ):
        refuse_other_ranks([directory], 4)
    make(rank_folder(directory, 0, 4), records, model, engine)
    with pytest.raises(ForeignStoreError, match="resume_from_checkpoint=True"):  # its own store has no commit
        refuse_other_ranks([directory], 4)
    with Store.open([StorePath(rank_folder(directory, 0, 4))], model=model, engine=engine) as store:
        store.commit()
    refuse_other_ranks([directory], 4)


def test_folders_without_a_store_are_ignored(tmp_path: Path) -> None:
    (tmp_path / "rank-0-of-2").mkdir()
    (tmp_path / "rank-0-of-2-old").mkdir()
    (tmp_path / "records").touch()
    assert stores_under(str(tmp_path)) == {}
    refuse_other_ranks([str(tmp_path)], 3)


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

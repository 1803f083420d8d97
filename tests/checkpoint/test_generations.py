"""Which of the stores on the ssd paths a run continues. `last_step` and the commands give the same answer."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from covering import slow_but
from resharded_stores import (
    STORE,
    contents,
    contents_of_rank,
    find,
    goes_on,
    newest_folder,
    remove_newest,
    reshard_to,
    train,
    without_generation,
)

import hf_lohan
from hf_lohan.annexes.resharding.reshard import reshard
from hf_lohan.checkpoint import generations
from hf_lohan.checkpoint.generations import stores_of
from hf_lohan.files import ForeignStoreError
from hf_lohan.ranks import Links
from hf_lohan.store.store_folders import remove_store
from hf_lohan.testing.thread_ranks import run_ranks

Found = tuple[str, int, int, int]


def found_by(num_ranks: int, store: Path) -> Found:
    """Return the state that a run finds, the number of ranks and the step, and the generation of its own stores."""

    def on_rank(links: Links) -> Found:
        found, _ = find(links, [store])
        return found.state, found.num_ranks, 0 if found.found is None else found.last.step, found.generation

    (first, *others) = run_ranks(num_ranks, on_rank)
    assert all(other == first for other in others)
    return first


def test_the_newest_complete_generation_continues(run: Path) -> None:
    store = run / STORE
    assert found_by(1, store) == ("own", 1, 3, 0)
    assert found_by(2, store) == ("reshardable", 1, 3, 1)
    reshard_to(2, lambda rank: [store])
    assert found_by(2, store) == ("own", 2, 3, 1) and found_by(1, store) == ("reshardable", 2, 3, 2)
    goes_on(store, 2, 4)
    assert found_by(1, store) == found_by(3, store) == ("reshardable", 2, 4, 2)
    assert hf_lohan.last_step(run) == 4


def test_an_incomplete_copy_is_ignored_while_its_source_is_there(run: Path) -> None:
    """A killed reshard leaves it. Its folders are used again."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    remove_newest(store, 1, 2)
    assert found_by(1, store) == ("own", 1, 3, 0)
    assert found_by(2, store) == found_by(3, store) == ("reshardable", 1, 3, 1)
    found, _ = find(Links.alone(), [store])
    assert [seen.directories for seen in found.unneeded] == [(str(store / "rank-0-of-2.g1"),)]
    remove_store([str(store)])
    assert found_by(1, store) == ("lost", 2, 3, 2), "the rest of it is all that is left"


def test_a_copy_gives_way_to_a_source_that_went_on(run: Path) -> None:
    """Two machines have a complete copy, one of them went on alone from the source, and the other one comes back."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    goes_on(store, 1, 4)
    assert found_by(1, store) == ("own", 1, 4, 0) and hf_lohan.last_step(run) == 4
    assert found_by(2, store) == ("reshardable", 1, 4, 2), "the copy is not overwritten"
    reshard_to(2, lambda rank: [store])
    assert found_by(2, store) == ("own", 2, 4, 2)


def test_a_step_of_the_copy_counts_although_its_source_is_there(run: Path) -> None:
    reshard_to(2, lambda rank: [run / STORE])
    goes_on(run / STORE, 2, 4, ranks=[0])  # and the other rank died before its commit
    assert found_by(2, run / STORE) == ("own", 2, 3, 1)
    goes_on(run / STORE, 2, 4, ranks=[1])
    goes_on(run / STORE, 1, 9)
    assert found_by(2, run / STORE) == ("own", 2, 4, 1)


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_resumable", [True, False])
def test_an_older_generation_does_not_take_the_place_of_lost_stores(
    is_resumable: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also not for a loop, whose commits have no journal."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    goes_on(store, 2, 4)
    gone = newest_folder(store, 1, 2)
    aside = gone.rename(run / "gone")
    monkeypatch.setattr(generations, "is_resumable", lambda commit: is_resumable)
    assert found_by(1, store) == found_by(2, store) == ("lost", 2, 4, 2)
    for asks in (lambda: hf_lohan.last_step(run), lambda: reshard([[str(store)]], 3)):
        with pytest.raises(ValueError, match="the store of rank 1 of 2 is not under"):
            asks()
    aside.rename(gone)
    assert found_by(2, store) == ("own", 2, 4, 1)


def test_stores_that_went_on_without_a_machine_count_when_it_comes_back(run: Path) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    goes_on(store, 2, 8)
    gone = newest_folder(store, 1, 2).rename(run / "gone")
    shutil.copytree(run / STORE, run / "other", ignore=shutil.ignore_patterns("rank-*"))
    (run / "other").rename(store / "rank-0-of-1.g2")  # as a run from a checkpoint makes it
    goes_on(store, 1, 4)
    gone.rename(store / "rank-1-of-2.g1")
    assert found_by(2, store) == ("reshardable", 1, 4, 3)
    named = {seen.generation for seen in find(Links.alone(), [store])[0].unneeded}
    assert named == {0}, "stores with a later step are not called unneeded"


@pytest.mark.parametrize("own_ranks", slow_but((1, 2), (1, 2, 3)))
def test_stores_of_older_versions_open(own_ranks: int, run: Path) -> None:
    """Their folders name no generation. That of a single rank's store is the ssd path."""
    store = run / STORE
    assert found_by(own_ranks, store)[1:3] == (1, 3)
    reshard_to(2, lambda rank: [store])
    goes_on(store, 2, 4)
    without_generation(store, 2)
    remove_store([str(store)])
    state = "own" if own_ranks == 2 else "reshardable"
    assert found_by(own_ranks, store) == (state, 2, 4, int(own_ranks != 2))
    before = contents(store, 2)
    reshard_to(3, lambda rank: [store])
    reshard_to(2, lambda rank: [store])
    assert contents(store, 2) == before and (store / "rank-0-of-2.g2").is_dir()


@pytest.mark.covering(0)
@pytest.mark.parametrize("names_source", [True, False])
def test_an_interrupted_reshard_of_an_older_version_continues(
    names_source: bool, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies lie beside the old store in the same generation. Then the old one was moved, file by file."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    without_generation(store, 2)
    if not names_source:  # as in the first version
        monkeypatch.setattr(generations, "RESHARDED_STORES", "another name")
    assert found_by(2, store) == ("reshardable", 1, 3, 1), "the old store still continues"
    goes_on(store, 1, 4)
    assert found_by(2, store) == ("reshardable", 1, 4, 1)
    remove_newest(store, 1, 2)
    assert found_by(1, store) == ("own", 1, 4, 0)


def test_a_copy_of_a_copy_of_an_older_version_lies_beside_it(run: Path) -> None:
    store = run / STORE
    for num_ranks in (2, 3):
        reshard_to(num_ranks, lambda rank: [store])
    without_generation(store, 2)
    without_generation(store, 3)
    remove_store([str(store)])
    assert found_by(3, store) == ("reshardable", 2, 3, 1) and hf_lohan.last_step(run) == 3
    goes_on(store, 2, 4)
    assert found_by(2, store) == ("own", 2, 4, 0)


def test_the_copies_of_an_older_version_continue_when_it_had_begun_to_move_the_old_store(run: Path) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    without_generation(store, 2)
    (store / "old-store-of-1").mkdir()
    (store / "old-store-of-1" / "moving-store.json").write_text("{}")
    (store / "commit.safetensors").rename(store / "old-store-of-1" / "commit.safetensors")
    assert found_by(2, store) == ("own", 2, 3, 0) and found_by(1, store) == ("reshardable", 2, 3, 1)
    (store / "new-store-of-2" / "rank-1-of-2").mkdir(parents=True)
    with pytest.raises(ValueError, match="an older version of hf_lohan was ended while it moved the stores in"):
        hf_lohan.last_step(run)


def test_incomplete_stores_of_another_number_block_nobody(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run, `last_step` and the commands ignore them."""
    store = run / STORE
    reshard_to(3, lambda rank: [store])
    goes_on(store, 3, 9)
    without_generation(store, 3)
    for rank in range(2):
        remove_newest(store, rank, 3)
    assert found_by(1, store) == ("own", 1, 3, 0) and hf_lohan.last_step(run) == 3
    assert "the stores of 3 ranks are ignored: the store of rank 0 and 1 of 3 is gone" in caplog.text
    reshard([[str(store)]], 2)
    assert found_by(2, store) == ("own", 2, 3, 1)


def test_several_complete_runs_are_named_with_their_steps(run: Path) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    without_generation(store, 2)
    goes_on(store, 2, 4)
    for asks in (lambda: found_by(3, store), lambda: hf_lohan.last_step(run)):
        with pytest.raises(ValueError, match=r"1 rank have step 3 and are the files .*; the stores of 2 rank"):
            asks()


def test_two_machines_with_different_stores_in_one_folder_are_refused(run: Path, tmp_path: Path) -> None:
    """The second machine has the store of a run that it once made alone, with as many commits."""
    drives = [Path(shutil.copytree(run / STORE, tmp_path / f"drive-{rank}" / "store")) for rank in range(2)]
    remove_store([str(drives[1])])
    train(tmp_path / "other", 3)
    shutil.copytree(tmp_path / "other" / STORE, drives[1], dirs_exist_ok=True)
    with pytest.raises(ValueError, match="hold different stores of one rank, seen by rank 0 and rank 1"):
        reshard_to(2, lambda rank: [drives[rank]])


def test_ranks_that_start_in_another_order_copy_the_stores_to_their_own_paths(run: Path, tmp_path: Path) -> None:
    """Each of two machines has its own drive. A rank's new store counts, and not an older one of the other rank."""
    drives = [Path(shutil.copytree(run / STORE, tmp_path / "drive-0")), tmp_path / "drive-1"]
    reshard_to(2, lambda rank: [drives[rank]])
    before = [contents_of_rank(drives[rank], rank, 2) for rank in range(2)]
    reshard_to(2, lambda rank: [drives[1 - rank]])
    assert [contents_of_rank(drives[1 - rank], rank, 2) for rank in range(2)] == before

    def on_rank(links: Links) -> tuple[str, int]:
        found, _ = find(links, [drives[1 - links.ranks.rank]])
        return found.state, found.generation

    assert run_ranks(2, on_rank) == [("own", 2), ("own", 2)]


def test_a_damaged_store_stops_a_run_only_if_it_may_be_needed(run: Path) -> None:
    store = run / STORE
    other = Path(shutil.copytree(store, store / "rank-0-of-3", ignore=shutil.ignore_patterns("rank-*")))
    (other / "manifest.json").write_text("{")
    assert found_by(1, store) == ("own", 1, 3, 0)
    other.rename(store / "rank-0-of-3.g1")
    with pytest.raises(ForeignStoreError, match=r"rank-0-of-3.g1/manifest.json is damaged"):
        found_by(1, store)
    reshard_to_two = lambda: reshard([[str(store)]], 2)  # noqa: E731
    with pytest.raises(ForeignStoreError, match="is damaged"):
        reshard_to_two()


def test_a_copy_without_a_whole_step_is_made_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run has written to its frozen weights."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    monkeypatch.setattr(generations, "is_resumable", lambda commit: "cut_from" not in commit.facts)
    assert found_by(2, store) == ("reshardable", 1, 3, 2)


def test_a_run_that_another_one_has_overtaken_is_refused(run: Path) -> None:
    """While it made its new stores, another process made the same ones and committed a step."""
    store = run / STORE

    def asks(action: Callable[[], object]) -> None:
        with pytest.raises(OSError, match=r"another process has committed a step in .*rank-0-of-2.g1: start again"):
            action()

    found = stores_of([[str(store)]])
    reshard([[str(store)]], 2)
    goes_on(store, 2, 4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hf_lohan.annexes.resharding.reshard.stores_of", lambda paths: found)
        asks(lambda: reshard([[str(store)]], 2))
    assert found_by(2, store) == ("own", 2, 4, 1)


def test_nothing_is_found_where_nothing_is(tmp_path: Path) -> None:
    assert found_by(2, tmp_path / "new") == ("nothing", 0, 0, 0)
    (tmp_path / "rank-0-of-2.g1").mkdir()
    (tmp_path / "old-store-of-3").write_text("a note of the user")
    assert found_by(2, tmp_path) == ("nothing", 0, 0, 0)

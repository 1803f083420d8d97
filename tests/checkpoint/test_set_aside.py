"""Stores of another number of ranks are set aside whole, also if a run is killed meanwhile, and never removed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from resharded_stores import STORE, content_at, contents, find, form_of, in_child, reshard_to, train

from hf_lohan.checkpoint.moves import OLD, Move
from hf_lohan.checkpoint.other_ranks import OtherRanks, find_other_ranks
from hf_lohan.checkpoint.reshard_together import reshard_together, set_left_over_aside
from hf_lohan.checkpoint.seen_stores import seen_stores, set_aside
from hf_lohan.files import IoEngine, StorageError, StoreInUseError, StorePath
from hf_lohan.files.lock import DirectoryLock
from hf_lohan.ranks import Links
from hf_lohan.store import Store
from hf_lohan.store.rank_folders import rank_folder, stores_under
from hf_lohan.store.store_folders import remove_store
from hf_lohan.testing.stored_state import Content, content_of
from hf_lohan.testing.thread_ranks import run_ranks


@pytest.mark.parametrize("num_calls", [5, 9, 11, 13])
def test_a_killed_move_of_a_single_ranks_store_loses_nothing(num_calls: int, run: Path, tmp_path: Path) -> None:
    """It moves file by file. The next run goes on with the move."""
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store], sets_aside=False)
    assert not in_child(lambda: moved_by_two(store), dies_at=num_calls)
    (found, _), *_ = reshard_to(2, lambda rank: [store])
    assert found.state == "resharded"
    assert [*stores_under(str(store))] == [2] and contents(store / "old-store-of-1", 1) == before
    assert not (store / "old-store-of-1-2").exists()


def test_one_of_two_nodes_that_share_a_drive_finishes_a_killed_move(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store], sets_aside=False)
    assert not in_child(lambda: moved_by_two(store), dies_at=12)
    both, calls, finish = threading.Barrier(2), [], Move.finish

    def finishing(move: Move) -> None:
        calls.append(move)
        with suppress(threading.BrokenBarrierError):  # waits for the other node
            both.wait(0.5)
        finish(move)

    monkeypatch.setattr(Move, "finish", finishing)

    def on_rank(links: Links) -> str:
        return find(links, [store])[0].state

    assert run_ranks(2, on_rank, num_local=1) == ["resharded", "resharded"]
    assert len(calls) == 1 and contents(store / "old-store-of-1", 1) == before
    assert not [*store.glob("old-store-of-*/moving-*")]


def test_a_killed_move_of_an_older_version_ends_in_two_folders(run: Path) -> None:
    """It left no note, so nobody knows that both parts are of one store."""
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store], sets_aside=False)
    first, second = store / "old-store-of-1", store / "old-store-of-1-2"
    first.mkdir()
    moved = "commit.safetensors"
    (store / moved).rename(first / moved)
    (found, _), *_ = reshard_to(2, lambda rank: [store])
    assert found.state == "resharded"
    assert [path.name for path in first.iterdir()] == [moved] and [*stores_under(str(store))] == [2]
    (first / moved).rename(second / moved)
    assert contents(second, 1) == before, "both parts are the store"


def test_a_file_with_the_name_of_a_folder_of_old_stores_is_ignored(run: Path) -> None:
    store = run / STORE
    (store / "old-store-of-3").write_text("a note of the user")
    reshard_to(2, lambda rank: [store])
    assert [*stores_under(str(store))] == [2]
    assert (store / "old-store-of-3").read_text() == "a note of the user"


def test_a_damaged_note_of_a_move_is_named(run: Path) -> None:
    note = run / STORE / "old-store-of-3" / "moving-rank-0-of-3.json"
    note.parent.mkdir()
    note.write_text("{")
    with pytest.raises(StorageError, match=f"no valid note of a move in {note}: move rank-0-of-3 from "):
        reshard_to(2, lambda rank: [run / STORE])


def test_a_draft_of_an_earlier_step_of_the_same_stores_is_no_loss(run: Path, tmp_path: Path) -> None:
    """It is replaced, as one of the same step is."""
    store = run / STORE
    reshard_to(2, lambda rank: [store], sets_aside=False)
    drafts = [shutil.copytree(folder, tmp_path / folder.name) for folder in store.glob("rank-*")]
    for folder in store.glob("rank-*"):
        shutil.rmtree(folder)
    train(run, 4, resume="last_step")
    for draft in drafts:
        shutil.copytree(draft, store / draft.name)
    (found, _), *_ = reshard_to(2, lambda rank: [store])
    assert (found.state, found.step, found.own_left) == ("reshardable", 4, ())
    assert not [*store.glob("lost-store-of-*")]
    assert {commit.facts["global_step"] for _, commit in (content_at(folder) for folder in store.glob("rank-*"))} == {4}


@pytest.fixture(scope="module")
def run_on_two_paths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the two ssd paths of a run of one rank."""
    folder = tmp_path_factory.mktemp("two-paths")
    train(folder / "run", 3, ssd=[str(folder / "first"), str(folder / "second")])
    return folder


def find_on(paths: Sequence[Path], links: Links) -> tuple[OtherRanks, list[str]]:
    own = [rank_folder(str(path), links.ranks.rank, links.ranks.num_ranks) for path in paths]
    return find_other_ranks([[*map(str, paths)]], own, links, None), own


def reshard_on(paths: Sequence[Path], num_ranks: int, *, sets_aside: bool = True) -> str:
    """Reshard stores on several ssd paths, and return what was found."""

    def on_rank(links: Links) -> str:
        found, own = find_on(paths, links)
        if found.state == "reshardable":
            reshard_together(found, own, links, form_of, None)
        if sets_aside:
            set_left_over_aside(found, own, links, is_open=False)
        return found.state

    return run_ranks(num_ranks, on_rank)[0]


def contents_on(paths: Sequence[Path], num_ranks: int) -> list[tuple[Content, int]]:
    engine = IoEngine(2, 1 << 20, 1 << 22)
    found = []
    for rank in range(num_ranks):
        parts = [StorePath(rank_folder(str(path), rank, num_ranks)) for path in paths]
        with Store.open(parts, model=None, engine=engine) as store:
            assert store.committed is not None
            found.append((content_of(store), store.committed.number))
    engine.close()
    return found


@pytest.mark.parametrize(
    ("old_ranks", "num_kills"), [(1, 9), (3, 7), *(pytest.param(n, 200, marks=pytest.mark.slow) for n in (1, 3))]
)
def test_a_killed_move_from_two_ssd_paths_is_finished(
    old_ranks: int, num_kills: int, run_on_two_paths: Path, tmp_path: Path
) -> None:
    """It is killed at each call, or at some. Both numbers of ranks can continue, and each store is in one place."""

    def copied(paths: Sequence[Path], name: str) -> list[Path]:
        return [Path(shutil.copytree(path, tmp_path / name / path.name)) for path in paths]

    drives = copied([run_on_two_paths / name for name in ("first", "second")], "old")
    if old_ranks > 1:
        reshard_on(drives, old_ranks)
    old = contents_on(drives, old_ranks)
    reshard_on(drives, 2, sets_aside=False)
    new = contents_on(drives, 2)
    counted = copied(drives, "counted")
    num_calls = in_child(lambda: reshard_on(counted, 2), dies_at=None)
    assert num_calls > 10
    num_finished = 0
    calls = [*range(num_calls, 0, -max(1, num_calls // num_kills))]
    for dies_at in calls:
        paths = copied(drives, "killed")
        assert not in_child(lambda paths=paths: reshard_on(paths, 2), dies_at=dies_at)
        paths_of_old = copied(paths, "old-number")
        assert reshard_on(paths, 2) in ("resharded", "nothing")
        asides = [sorted(path.glob(f"old-store-of-{old_ranks}*")) for path in paths]
        assert [len(of_path) for of_path in asides] == [1, 1], "all parts are in one folder of the same name"
        assert contents_on(paths, 2) == new and contents_on([folder for (folder,) in asides], old_ranks) == old
        assert not [*tmp_path.glob("killed/*/old-store-of-*/moving-*")]

        num_finished += (
            reshard_on(paths_of_old, old_ranks) == "reshardable"
        )  # the old stores were moved: the new ones count
        assert contents_on(paths_of_old, old_ranks) == old
        shutil.rmtree(tmp_path / "killed")
        shutil.rmtree(tmp_path / "old-number")
    assert 0 < num_finished < len(calls)


def test_each_generation_of_old_stores_has_its_own_folder(run: Path) -> None:
    """A part of the first one was deleted. It must not be mixed with the second one."""
    store = run / STORE
    reshard_to(3, lambda rank: [store])
    reshard_to(2, lambda rank: [store])
    shutil.rmtree(store / "old-store-of-3" / "rank-1-of-3")
    reshard_to(3, lambda rank: [store])
    second = contents(store, 3)
    reshard_to(2, lambda rank: [store])
    assert sorted(path.name for path in (store / "old-store-of-3").iterdir()) == ["rank-0-of-3", "rank-2-of-3"]
    assert contents(store / "old-store-of-3-2", 3) == second


def moved_by_two(store: Path) -> None:
    (seen,) = seen_stores([[str(store)]], 0, 2)
    set_aside([(seen, 1, seen.directories)], OLD, Links.alone())


def test_old_stores_are_set_aside_and_can_be_brought_back(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    store = run / STORE
    before = contents(store, 1)
    for number in range(2):
        caplog.clear()
        reshard_to(2, lambda rank: [store])
        aside = store / ("old-store-of-1" if number == 0 else "old-store-of-1-2")
        assert f"{aside} (" in caplog.text and "you may delete these folders" in caplog.text
        assert contents(aside, 1) == before
        for rank in range(2):
            shutil.rmtree(store / f"rank-{rank}-of-2")
        for file in [*aside.iterdir()]:
            shutil.copytree(file, store / file.name) if file.is_dir() else shutil.copy(file, store)
    assert train(run, 4, resume="last_step")[-1]["step"] == 4


@pytest.mark.parametrize("what", ["other store", "later step"])
def test_a_store_that_changed_since_the_report_is_left_alone(
    what: str, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store], sets_aside=False)
    if what == "other store":
        train(tmp_path / "other", 3)
    else:
        shutil.copytree(run, tmp_path / "other")
        for rank in range(2):
            shutil.rmtree(tmp_path / "other" / STORE / f"rank-{rank}-of-2")
        train(tmp_path / "other", 4, resume="last_step")
    expected = contents(tmp_path / "other" / STORE, 1)

    def on_rank(links: Links) -> None:
        found, own = find(links, [store])
        assert found.state == "resharded"
        links.barrier("the report")
        if links.ranks.rank == 0:
            remove_store([str(store)])
            shutil.copytree(tmp_path / "other" / STORE, store, dirs_exist_ok=True)
        links.barrier("the change")
        set_left_over_aside(found, own, links, is_open=False)

    run_ranks(2, on_rank)
    assert contents(store, 1) == expected and not [*store.glob("old-store-*")]
    assert f"{store} is left as it is, because it no longer is the store that this run has found there" in caplog.text


def test_two_runs_with_different_numbers_of_ranks_do_not_set_each_others_stores_aside(run: Path) -> None:
    store = run / STORE
    before = contents(store, 1)
    for num_ranks in (2, 3):
        reshard_to(num_ranks, lambda rank: [store], sets_aside=False)
    names = sorted(path.name for path in store.iterdir())

    def on_rank(links: Links) -> None:
        found, own = find(links, [store])
        assert sorted(found.left_over) == [1, 3]
        set_left_over_aside(found, own, links, is_open=False)

    lock = DirectoryLock(str(store / "rank-2-of-3"))  # as the run of three ranks holds it
    with pytest.raises(StoreInUseError, match="rank-2-of-3"):
        run_ranks(2, on_rank)
    lock.close()
    assert sorted(path.name for path in store.iterdir()) == names, "all locks are taken before the first rename"
    assert contents(store, 1) == before

    own_lock = DirectoryLock(str(store / "rank-1-of-2"))
    with pytest.raises(StoreInUseError, match="rank-1-of-2"):
        run_ranks(2, on_rank)
    own_lock.close()
    assert sorted(path.name for path in store.iterdir()) == names


def test_old_stores_on_a_whole_drive_are_set_aside(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ssd path is where a drive is mounted, whose `lost+found` only root may read."""
    store = run / STORE
    before = contents(store, 1)
    (store / "lost+found").mkdir()
    listdir = os.listdir

    def refusing(path: str = ".") -> list[str]:
        if os.path.basename(path) == "lost+found":
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return listdir(path)

    monkeypatch.setattr(os, "listdir", refusing)
    reshard_to(2, lambda rank: [store])
    assert [*stores_under(str(store))] == [2]
    assert contents(store / "old-store-of-1", 1) == before

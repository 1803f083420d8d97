"""A run continues with another number of ranks. Its stores are divided as by `lohan reshard`, and a run that is killed
meanwhile loses nothing."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from resharded_stores import (
    STORE,
    content_at,
    contents,
    contents_of_rank,
    find,
    form_of,
    in_child,
    reshard_to,
    resharded,
    train,
)

import hf_lohan
import hf_lohan.checkpoint.seen_stores as seen_module
from hf_lohan.checkpoint.moves import aside_of
from hf_lohan.checkpoint.reshard_together import reshard_together, set_left_over_aside, set_lost_aside
from hf_lohan.checkpoint.resharding import reshard
from hf_lohan.files import CapacityError, CorruptionError, ForeignStoreError, IoEngine, StorePath
from hf_lohan.planning.run_plan import CHUNK_TOKENS, RUN_ID
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.store import Store, last_commit
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.store.rank_folders import rank_folder, stores_under
from hf_lohan.store.store_folders import remove_store
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks


def test_stores_are_divided_as_by_the_command(run: Path, tmp_path: Path) -> None:
    store = run / STORE
    first = contents(store, 1)
    for number, num_ranks in enumerate((2, 3, 1)):
        expected = resharded(run, tmp_path / f"by-hand-{number}", num_ranks)
        found = reshard_to(num_ranks, lambda rank: [store])
        assert {sent for _, sent in found} == {0}, "all ranks see all stores"
        assert contents(store, num_ranks) == expected
        assert [*stores_under(str(store))] == [num_ranks], "the old stores are gone"
    assert contents(store, 1) == first


def test_a_machine_gets_the_records_of_stores_that_it_does_not_see(run: Path, tmp_path: Path) -> None:
    """Each rank's machine has its own drive, and the first one has the store of one rank."""
    expected = resharded(run, tmp_path / "by-hand", 2)
    drives = [tmp_path / f"drive-{rank}" / "store" for rank in range(3)]
    shutil.copytree(run / STORE, drives[0])
    found = reshard_to(2, lambda rank: [drives[rank]])
    assert [contents_of_rank(drives[rank], rank, 2) for rank in (0, 1)] == expected
    assert [sent for _, sent in found] == [sum(map(len, expected[1][0].values())), 0]

    expected = resharded(run, tmp_path / "three-by-hand", 3)
    reshard_to(3, lambda rank: [drives[rank]])
    assert [contents_of_rank(drives[rank], rank, 3) for rank in range(3)] == expected
    assert [[*drive.glob("rank-*-of-*")] for drive in drives] == [
        [drive / f"rank-{rank}-of-3"] for rank, drive in enumerate(drives)
    ]

    # One machine with these three drives, which ssd names by {local_rank}.
    reshard_to(1, lambda rank: drives)
    assert contents(drives[0], 1) == contents(run / STORE, 1)
    assert not [folder for drive in drives for folder in drive.glob("rank-*-of-*")]


def test_two_machines_with_different_stores_in_one_folder_are_refused(run: Path, tmp_path: Path) -> None:
    """The second machine has the store of a run that it once made alone, with as many commits."""
    drives = [Path(shutil.copytree(run / STORE, tmp_path / f"drive-{rank}" / "store")) for rank in range(2)]
    remove_store([str(drives[1])])
    train(tmp_path / "other", 3)
    shutil.copytree(tmp_path / "other" / STORE, drives[1], dirs_exist_ok=True)
    with pytest.raises(ValueError, match="holds different stores on the machines of rank 0 and rank 1"):
        reshard_to(2, lambda rank: [drives[rank]])


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_killed_reshard_loses_nothing(num_ranks: int, run: Path, tmp_path: Path) -> None:
    """From three ranks to one, which removes folders, and to two."""
    reshard_to(3, lambda rank: [run / STORE])
    old = contents(run / STORE, 3)
    expected = resharded(run, tmp_path / "by-hand", num_ranks)
    shutil.copytree(run, tmp_path / "counted")
    num_calls = in_child(lambda: reshard_to(num_ranks, lambda rank: [tmp_path / "counted" / STORE]), dies_at=None)
    assert num_calls > 50
    states = set()
    calls = [*(num_calls * part // 4 for part in (1, 2, 3)), *(num_calls - left for left in (8, 5, 2))]
    for number, dies_at in enumerate(calls):
        store = tmp_path / f"killed-{number}" / STORE
        shutil.copytree(run, tmp_path / f"killed-{number}")
        assert not in_child(lambda store=store: reshard_to(num_ranks, lambda rank: [store]), dies_at=dies_at)
        (found, _), *_ = reshard_to(num_ranks, lambda rank, store=store: [store], sets_aside=False)
        states.add(found.state)
        if found.state == "reshardable":
            assert contents(store, 3) == old
        reshard_to(num_ranks, lambda rank, store=store: [store])
        assert contents(store, num_ranks) == expected and contents(store / "old-store-of-3", 3) == old
        assert [*stores_under(str(store))] == [num_ranks] and (num_ranks == 1) == (not [*store.glob("rank-*")])
    assert states == {"reshardable", "resharded"}


@pytest.mark.parametrize("removes_old", [False, True])
def test_a_reshard_without_a_step_is_undone_by_the_command(removes_old: bool, run: Path, tmp_path: Path) -> None:
    """Its commits say from how many ranks it was made, which must not be copied."""
    straight = train(tmp_path / "straight", 4)
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store])
    reshard([str(store)], 1, form_of=form_of, removes_old=removes_old)
    found, _ = find(Links.alone(), [store])
    assert (found.state, found.left_over) == ("nothing", () if removes_old else (2,))
    assert contents(store, 1) == before
    assert train(run, 4, resume=True) == straight
    assert contents(store / "old-store-of-1", 1) == before


def test_the_old_ranks_go_on_after_a_reshard_that_was_not_finished(run: Path) -> None:
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store], sets_aside=False)
    found, own = find(Links.alone(), [store])
    assert (found.state, found.left_over) == ("nothing", (2,))
    set_left_over_aside(found, own, Links.alone(), is_open=False)
    assert contents(store, 1) == before and not [*store.glob("rank-*")]


def test_the_end_of_one_rank_ends_all_and_keeps_the_old_stores(run: Path) -> None:
    store = run / STORE
    before = contents(store, 1)

    def on_rank(links: Links) -> None:
        found, own = find(links, [store])
        if links.ranks.rank == 1:
            raise OSError("the second machine lost its power")
        reshard_together(found, own, links, form_of, None)

    first, second = rank_outcomes(2, on_rank)
    assert isinstance(second.error, OSError) and isinstance(first.error, RankFailedError)
    assert "rank 1" in str(first.error) and "the second machine lost its power" in str(first.error)
    assert contents(store, 1) == before


def test_a_damaged_record_is_named_and_nothing_is_removed(run: Path) -> None:
    """As with the same number of ranks, damage is an error: a checkpoint is not taken in silence."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    commit = last_commit([str(store / "rank-1-of-2")])
    assert commit is not None
    file = store / "rank-1-of-2" / f"records-{int(commit.home[0])}.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CorruptionError, match=r"rank-1-of-2.*records-"):
        train(run, 4, resume=True)
    assert sorted(path.name for path in store.glob("rank-*")) == ["rank-0-of-2", "rank-1-of-2"]
    content[0] ^= 1
    file.write_bytes(bytes(content))
    assert train(run, 4, resume=True)[-1]["step"] == 4


def test_a_drive_without_room_is_named_and_nothing_is_removed(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    before = contents(store, 2)
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 1 << 16)
    with pytest.raises(CapacityError):
        train(run, 4, resume=True)
    assert contents(store, 2) == before


@pytest.mark.parametrize("resume", [True, "last_step"])
def test_a_run_resumes_from_the_stores_of_two_ranks(resume: str | bool, run: Path, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 4)
    reshard_to(2, lambda rank: [run / STORE])
    assert train(run, 4, resume=resume) == straight
    assert content_at(run / STORE)[0] == content_at(tmp_path / "straight" / STORE)[0]
    assert hf_lohan.last_step(run) == 4


def test_a_model_that_is_streamed_from_a_path_resumes_too(tmp_path: Path) -> None:
    """Its store is opened before `train` says that the run resumes."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    path = {"model": str(tmp_path / "model")}
    straight = train(tmp_path / "straight", 4, **path)
    train(tmp_path / "run", 3, **path)
    store = tmp_path / "run" / STORE
    reshard_to(2, lambda rank: [store])
    with pytest.raises(ValueError, match=r"have step 3 of 2 ranks, .* overwrite it; pass resume_from_checkpoint"):
        train(tmp_path / "run", 4, **path)
    assert last_commit([str(store)]) is None, "nothing is copied before a run resumes"
    assert train(tmp_path / "run", 4, resume="last_step", **path) == straight
    assert [*stores_under(str(store))] == [1]


def test_a_new_store_without_room_for_two_versions_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is loaded before `train` finds the old stores, so the new one may have got one version."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    path = {"model": str(tmp_path / "model")}
    straight = train(tmp_path / "straight", 4, **path)
    train(tmp_path / "run", 3, **path)
    store = tmp_path / "run" / STORE
    reshard_to(2, lambda rank: [store])
    monkeypatch.setattr("hf_lohan.store.store.fits", lambda *args: False)
    with pytest.raises(ForeignStoreError, match=r"which has no step, .* did not fit .* delete the new store"):
        train(tmp_path / "run", 4, resume="last_step", **path)
    monkeypatch.undo()
    gc.collect()  # closes the engine
    remove_store([str(store)])
    assert train(tmp_path / "run", 4, resume="last_step", **path) == straight


@pytest.mark.parametrize("resume", [None, True, "last_step"])
def test_a_streamed_model_does_not_continue_another_run(resume: str | bool | None, tmp_path: Path) -> None:
    """Both runs have the same model and ssd path."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    settings = {"model": str(tmp_path / "model"), "ssd": str(tmp_path / "drive")}
    train(tmp_path / "first", 3, **settings)
    reshard_to(2, lambda rank: [tmp_path / "drive"])
    before = contents(tmp_path / "drive", 2)
    with pytest.raises(
        ValueError, match=rf"has steps of the run in {tmp_path}/first, which .* use the same output_dir"
    ):
        train(tmp_path / "second", 4, resume=resume, **settings)
    assert contents(tmp_path / "drive", 2) == before and last_commit([str(tmp_path / "drive")]) is None
    assert train(tmp_path / "first", 4, resume=True, **settings)[-1]["step"] == 4


@pytest.mark.parametrize("resume", [True, "last_step"])
def test_a_model_in_memory_does_not_continue_another_run(resume: str | bool, tmp_path: Path) -> None:
    """Both runs have the same ssd path."""
    train(tmp_path / "first", 3, ssd=str(tmp_path / "drive"))
    reshard_to(2, lambda rank: [tmp_path / "drive"])
    before = contents(tmp_path / "drive", 2)
    with pytest.raises(ForeignStoreError, match=rf"has steps of the run in {tmp_path}/first, .* the same output_dir"):
        train(tmp_path / "second", 4, resume=resume, ssd=str(tmp_path / "drive"))
    assert contents(tmp_path / "drive", 2) == before


def test_a_streamed_model_continues_from_a_checkpoint_if_a_store_is_gone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is loaded before `train` says what to do."""
    tiny_model("llama").save_pretrained(tmp_path / "model")
    path = {"model": str(tmp_path / "model")}
    straight = train(tmp_path / "straight", 4, **path)
    train(tmp_path / "run", 3, **path)
    store = tmp_path / "run" / STORE
    reshard_to(2, lambda rank: [store])
    shutil.rmtree(store / "rank-1-of-2")
    with pytest.raises(ValueError, match=r"pass resume_from_checkpoint=True to continue from .*checkpoint-2"):
        train(tmp_path / "run", 4, resume="last_step", **path)
    with pytest.raises(ValueError, match=r"continue from it with resume_from_checkpoint=True"):
        train(tmp_path / "run", 4, **path)
    assert train(tmp_path / "run", 4, resume=True, **path) == straight
    assert "The run continues from " in caplog.text and (store / "lost-store-of-2" / "rank-0-of-2").is_dir()


def test_without_being_asked_a_run_does_not_touch_the_stores_of_other_ranks(run: Path) -> None:
    reshard_to(2, lambda rank: [run / STORE])
    before = contents(run / STORE, 2)
    with pytest.raises(ValueError, match=r"holds the store of a run with 2 ranks.* lohan reshard"):
        train(run, 4)
    with pytest.raises(ValueError, match=r"holds the store of a run with 2 ranks.* lohan reshard"):
        train(run, 4, resume=str(run / "checkpoint-2"))
    assert contents(run / STORE, 2) == before and not (run / STORE / "manifest.json").exists()


def test_a_draft_is_not_overwritten_by_a_run_that_does_not_resume(run: Path) -> None:
    reshard_to(2, lambda rank: [run / STORE])
    reshard_to(1, lambda rank: [run / STORE], sets_aside=False)
    before = contents(run / STORE, 2), contents(run / STORE, 1)
    with pytest.raises(ValueError, match=r"have step 3 of 2 ranks, and this run would overwrite it"):
        train(run, 4)
    assert (contents(run / STORE, 2), contents(run / STORE, 1)) == before


def test_a_draft_does_not_win_over_a_later_step_of_the_ranks_before(run: Path, tmp_path: Path) -> None:
    """Two ranks go on after their stores were copied, and then a folder is gone."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    reshard_to(1, lambda rank: [store], sets_aside=False)
    goes_on(store, 2, 4)
    assert find(Links.alone(), [store])[0].state == "reshardable", "both are there, and the later step counts"
    gone = Path(shutil.move(store / "rank-1-of-2", tmp_path / "gone"))
    with pytest.raises(ValueError, match=r"step 3; those of 2 ranks are incomplete \(the store of rank 1 is gone"):
        find(Links.alone(), [store])
    shutil.move(gone, store / "rank-1-of-2")
    assert find(Links.alone(), [store])[0].step == 4


def goes_on(store: Path, num_ranks: int, step: int, ranks: Sequence[int] | None = None) -> None:
    """Commit another step in each rank's store."""
    io = IoEngine(1, 1 << 20, 1 << 22)
    for rank in range(num_ranks) if ranks is None else ranks:
        path = StorePath(rank_folder(str(store), rank, num_ranks))
        with Store.open([path], model=None, engine=io) as opened:
            last = opened.committed
            assert last is not None
            if num_ranks > 1:
                opened.agree_on_commits(ImmediateAgreement(last.group_id))
            facts = {name: fact for name, fact in last.facts.items() if not name.startswith("cut_from")}
            opened.commit({**facts, "global_step": step}, last.journal, opened.log, model_files=opened.model_files)
    io.close()


def test_several_complete_runs_are_named_with_their_steps(run: Path) -> None:
    store = run / STORE
    reshard([str(store)], 2, form_of=form_of)
    goes_on(store, 2, 4)
    with pytest.raises(
        ValueError, match=r"1 rank are complete, with step 3; those of 2 ranks are complete, with step 4"
    ):
        reshard_to(3, lambda rank: [store])


def test_stores_of_more_numbers_are_seen_together(run: Path) -> None:
    """The number that is copied has fewer ranks than another one."""
    store = run / STORE
    reshard_to(3, lambda rank: [store], sets_aside=False)
    found = reshard_to(2, lambda rank: [store])
    assert (found[0][0].num_ranks, sorted(found[0][0].left_over)) == (1, [1, 3])
    assert [*stores_under(str(store))] == [2]


def test_a_machine_that_comes_back_gets_the_later_step(run: Path, tmp_path: Path) -> None:
    """Two machines have their own drives. One leaves, the other one goes on alone, and the first one comes back."""
    drives = [tmp_path / f"drive-{rank}" / "store" for rank in range(2)]
    shutil.copytree(run / STORE, drives[0])
    reshard_to(2, lambda rank: [drives[rank]])
    for rank, drive in enumerate(drives):
        goes_on(drive, 2, 3, ranks=[rank])
    shutil.rmtree(drives[0])
    shutil.copytree(run / STORE, drives[0])
    goes_on(drives[0], 1, 4)
    left = contents_of_rank(drives[1], 1, 2)[0]
    found = reshard_to(2, lambda rank: [drives[rank]])
    assert (found[0][0].state, found[0][0].step) == ("reshardable", 4)
    assert content_at(drives[1] / "lost-store-of-2" / "rank-1-of-2")[0] == left
    assert content_at(drives[1] / "rank-1-of-2")[1].facts["global_step"] == 4


def test_a_damaged_store_of_another_number_does_not_stop_a_run(run: Path) -> None:
    shutil.copytree(run / STORE, run / STORE / "rank-0-of-3", ignore=shutil.ignore_patterns("rank-*"))
    (run / STORE / "rank-0-of-3" / "manifest.json").write_text("{")
    found, _ = find(Links.alone(), [run / STORE])
    assert found.state == "nothing"


def test_a_copy_that_was_written_to_without_a_step_is_made_again(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store], sets_aside=False)
    expected = contents(store, 2)
    states = []
    for is_torn in (False, True):
        if is_torn:
            monkeypatch.setattr(seen_module, "is_resumable", lambda commit: "cut_from" not in commit.facts)
        (found, _), *_ = reshard_to(2, lambda rank: [store], sets_aside=False)
        states.append(found.state)
    assert states == ["resharded", "reshardable"]
    assert contents(store, 2) == expected


def test_the_user_is_not_told_to_delete_what_may_be_needed(tmp_path: Path) -> None:
    for name in ("old-store-of-2", "lost-store-of-4", "other"):
        (tmp_path / name).mkdir()
    named = aside_of([str(tmp_path / "rank-0-of-1")])
    assert "old-store-of-2" in named and "lost-store-of-4" not in named


def test_a_missing_folder_costs_the_steps_since_the_last_checkpoint(
    run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = train(tmp_path / "straight", 4)
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    left = content_at(store / "rank-0-of-2")[0]
    shutil.rmtree(store / "rank-1-of-2")
    with pytest.raises(
        ValueError, match=r"step 3, .*because the store of rank 1 of 2 is gone; .*checkpoint-2, which costs 1 step"
    ):
        train(run, 4, resume="last_step")
    assert train(run, 4, resume=True) == straight
    assert "step, 3, is lost, because the store of rank 1 of 2 is gone. The run continues from " in caplog.text
    assert "checkpoint-2, which costs 1 step. What is left" in caplog.text
    assert content_at(store / "lost-store-of-2" / "rank-0-of-2")[0] == left, "nothing is destroyed"
    assert hf_lohan.last_step(run) == 4


def test_the_newest_checkpoint_of_the_run_is_taken(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A checkpoint is complete before the commit that names it is on disk, and then a machine is lost. The folder also
    has a later checkpoint of another run."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    shutil.rmtree(run)
    train(run, 3)
    killed = shutil.copytree(run / STORE, tmp_path / "killed")
    train(run, 4, resume="last_step")
    shutil.rmtree(run / STORE)
    shutil.copytree(killed, run / STORE)
    other = Path(shutil.copytree(run / "checkpoint-2", run / "checkpoint-9"))
    facts = json.loads((other / "lohan" / "run.json").read_text())
    (other / "lohan" / "run.json").write_text(json.dumps({**facts, "run_id": "another"}))
    reshard_of_launch(run, 2)
    shutil.rmtree(run / STORE / "rank-1-of-2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    train(run, 4)
    assert f"The run continues from {run / 'checkpoint-4'}, which costs 0 steps" in caplog.text


def test_commits_of_streamed_experts_name_their_run(tmp_path: Path) -> None:
    """Without a name its newest checkpoint is not known."""
    names = []
    for step, resume in ((2, None), (3, "last_step")):
        train(tmp_path, step, resume=resume, model=tiny_model("qwen3_moe"), experts="streamed", cpu_memory="16MiB")
        commit = last_commit([str(tmp_path / STORE)])
        assert commit is not None and commit.facts["global_step"] == step
        names.append(commit.facts[RUN_ID])
    assert isinstance(names[0], str) and names[0] == names[1]


@pytest.mark.parametrize("by_command", [False, True])
def test_the_decided_chunks_are_carried_over(by_command: bool, run: Path) -> None:
    """A run has decided them after the commit from which it continues."""
    store = run / STORE
    commit = last_commit([str(store)])
    assert commit is not None
    decided = json.dumps({CHUNK_TOKENS: 16, RUN_ID: commit.facts[RUN_ID]})
    (store / "chunk_tokens.json").write_text(decided)
    if by_command:
        reshard([str(store)], 2, form_of=form_of, removes_old=True)
    else:
        reshard_to(2, lambda rank: [store])
    assert [(store / f"rank-{rank}-of-2" / "chunk_tokens.json").read_text() for rank in range(2)] == [decided] * 2
    (store / "chunk_tokens.json").unlink()
    reshard_to(1, lambda rank: [store])
    assert (store / "chunk_tokens.json").read_text() == decided


@pytest.mark.parametrize("is_draft", [False, True])
def test_a_leftover_of_the_same_number_is_set_aside(is_draft: bool, run: Path) -> None:
    """A drive of one of two ranks is gone."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    if not is_draft:
        goes_on(store, 2, 4)
    shutil.rmtree(store / "rank-1-of-2")
    left = content_at(store / "rank-0-of-2")

    def on_rank(links: Links) -> tuple[str, int, int, str]:
        found, _ = find(links, [store])
        if found.state == "lost":
            set_lost_aside(found, links)
        return found.state, found.num_ranks, found.step, found.why_lost

    step = 3 if is_draft else 4
    assert run_ranks(2, on_rank) == [("lost", 2, step, "the store of rank 1 of 2 is gone")] * 2
    kept = content_at(store / "lost-store-of-2" / "rank-0-of-2")
    assert kept[0] == left[0] and kept[1].facts == left[1].facts


def test_a_draft_of_an_earlier_state_is_set_aside(run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One of its two drives is gone, and the stores of the ranks before were restored from a backup."""
    store = run / STORE
    backup = shutil.copytree(store, tmp_path / "backup")
    goes_on(store, 1, 4)
    reshard_to(2, lambda rank: [store])
    shutil.rmtree(store / "rank-1-of-2")
    left = content_at(store / "rank-0-of-2")
    shutil.copytree(backup, store, dirs_exist_ok=True)
    reshard_to(2, lambda rank: [store])
    aside = store / "lost-store-of-2" / "rank-0-of-2"
    assert content_at(aside)[0] == left[0] and content_at(aside)[1].facts["global_step"] == 4
    assert content_at(store / "rank-0-of-2")[1].facts["global_step"] == 3
    assert f"of which a part is gone are set aside in {aside.parent}" in caplog.text


def test_a_launch_continues_with_another_number_of_ranks(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A machine that joins a launch has not counted its attempts."""
    straight = train(tmp_path / "straight", 4)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "elastic")
    shutil.rmtree(run)
    train(run, 3)
    reshard_of_launch(run, 2)
    copy = Path(shutil.copytree(run / STORE, tmp_path / "copy"))
    assert train(run, 4) == straight
    assert "step 3 was committed by 2 ranks, and its stores are resharded for 1 rank" in caplog.text

    caplog.clear()
    shutil.rmtree(run / STORE)
    copy.rename(run / STORE)
    shutil.rmtree(run / STORE / "rank-1-of-2")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    for is_aside in (False, True):
        if is_aside:  # an attempt that was killed before its first commit leaves this
            remove_store([str(run / STORE)])
        shutil.rmtree(run / "checkpoint-4")  # the attempt that is lost did not come so far
        assert train(run, 4) == straight
        assert "The run continues from " in caplog.text and "checkpoint-2, which costs 1 step" in caplog.text
        caplog.clear()


def reshard_of_launch(run: Path, num_ranks: int) -> None:
    """Reshard the stores for ranks of the launch that the environment names."""
    from hf_lohan.huggingface.ranks import launch_id

    def on_rank(links: Links) -> None:
        found, own = find(links, [run / STORE], launch_id())
        assert found.is_of_launch
        reshard_together(found, own, links, form_of, launch_id())
        set_left_over_aside(found, own, links, is_open=False)

    run_ranks(num_ranks, on_rank)

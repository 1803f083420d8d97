"""A run continues with another number of ranks. Its stores are divided as by `lohan reshard`, and a process that is
killed meanwhile loses nothing."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from resharded_stores import (
    STORE,
    content_at,
    contents,
    contents_of_rank,
    find,
    in_child,
    newest_folder,
    remove_newest,
    reshard_to,
    resharded,
    train,
)

import hf_lohan
from hf_lohan.annexes.resharding import reshard_together as together_module
from hf_lohan.annexes.resharding.reshard import checksums_of, reshard
from hf_lohan.annexes.resharding.reshard_together import reshard_together
from hf_lohan.checkpoint.generations import stores_of
from hf_lohan.files import CapacityError, CorruptionError, ForeignStoreError
from hf_lohan.huggingface import local_run
from hf_lohan.huggingface.trainer import rank_trainer
from hf_lohan.planning.run_plan import CHUNK_TOKENS, RUN_ID
from hf_lohan.ranks import Links, RankFailedError, RankLane, bytes_of
from hf_lohan.store import last_commit
from hf_lohan.store.rank_folders import stores_under
from hf_lohan.store.store_folders import remove_store
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

BY_COMMAND = {"command": False, "command that removes": True}


def test_stores_are_divided_as_by_the_command(run: Path, tmp_path: Path) -> None:
    store = run / STORE
    first = contents(store, 1)
    for number, num_ranks in enumerate((2, 3, 1, 4)):
        expected = resharded(run, tmp_path / f"by-hand-{number}", num_ranks)
        found = reshard_to(num_ranks, lambda rank: [store])
        assert {sent for _, sent in found} == {0}, "all ranks see all stores"
        assert contents(store, num_ranks) == expected
        assert max(stores_under(str(store))) == (number + 1, num_ranks)
    reshard_to(1, lambda rank: [store])
    assert contents(store, 1) == first and hf_lohan.last_step(run) == 3


def test_a_machine_gets_the_records_of_stores_that_it_does_not_see(run: Path, tmp_path: Path) -> None:
    """Each rank's machine has its own drive, and the first one has the store of one rank."""
    expected = resharded(run, tmp_path / "by-hand", 2)
    drives = [tmp_path / f"drive-{rank}" / "store" for rank in range(3)]
    shutil.copytree(run / STORE, drives[0])
    found = reshard_to(2, lambda rank: [drives[rank]])
    assert [contents_of_rank(drives[rank], rank, 2) for rank in (0, 1)] == expected
    num_bytes = sum(map(len, expected[1][0].values()))
    assert num_bytes < found[0][1] < 1.01 * num_bytes and not found[1][1], "the records and their checksums"

    expected = resharded(run, tmp_path / "three-by-hand", 3)
    reshard_to(3, lambda rank: [drives[rank]])
    assert [contents_of_rank(drives[rank], rank, 3) for rank in range(3)] == expected

    # One machine with these three drives, which ssd names by {local_rank}.
    reshard_to(1, lambda rank: drives)
    assert contents(drives[0], 1) == contents(run / STORE, 1)


@pytest.mark.covering(0)
@pytest.mark.parametrize("part", ["elements", "checksums"])
def test_damage_on_the_way_to_another_machine_is_named(
    part: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One bit of what arrives. The new store would have it with a right checksum for ever."""
    drives = [tmp_path / f"drive-{rank}" / "store" for rank in range(2)]
    shutil.copytree(run / STORE, drives[0])
    hand_over = together_module._hand_over

    def damaging(content: Any, reader: int, writer: int, lane: RankLane) -> None:
        hand_over(content, reader, writer, lane)
        if content is not None and lane.place == writer and (content.dtype == torch.uint8) == (part == "checksums"):
            bytes_of(content)[0] ^= 1

    with monkeypatch.context() as patch:
        patch.setattr(together_module, "_hand_over", damaging)
        with pytest.raises(CorruptionError, match=r"param of .* changed in transit from rank 0 to rank 1"):
            reshard_to(2, lambda rank: [drives[rank]])
    found = reshard_to(2, lambda rank: [drives[rank]])
    assert found[0][0].state == "reshardable"


def test_a_copy_keeps_the_checksums_of_its_source(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So damage in memory between the read and the write is found by the next read."""
    store = run / STORE

    def damaging(old: Any, piece: Any, content: torch.Tensor) -> Any:
        checksums = checksums_of(old, piece, content)
        content.view(torch.uint8)[0] ^= 1
        return checksums

    monkeypatch.setattr("hf_lohan.annexes.resharding.reshard.checksums_of", damaging)
    reshard([[str(store)]], 2)
    with pytest.raises(CorruptionError):
        contents(store, 2)


def killed(way: str, num_ranks: int, store: Path) -> Callable[[], object]:
    """Return a reshard in this way, for a child that is killed in it."""
    if way in BY_COMMAND:
        return lambda: reshard([[str(store)]], num_ranks, removes_old=BY_COMMAND[way])
    return lambda: reshard_to(num_ranks, lambda rank: [store])


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_kills", [4, pytest.param(40, marks=pytest.mark.slow)])
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("way", ["together", *BY_COMMAND])
def test_a_killed_reshard_leaves_one_state(way: str, num_ranks: int, num_kills: int, run: Path, tmp_path: Path) -> None:
    """At any instant. From three ranks, which may also continue: each number of ranks gets the same bits."""
    if num_ranks == 2:  # the source is a store without rank folders or a generation
        old_ranks, old = 1, contents(run / STORE, 1)
    else:
        reshard([[str(run / STORE)]], 3, removes_old=True)
        old_ranks, old = 3, contents(run / STORE, 3)
    expected = resharded(run, tmp_path / "by-hand", num_ranks)
    counted = Path(shutil.copytree(run, tmp_path / "counted")) / STORE
    num_calls = in_child(killed(way, num_ranks, counted), dies_at=None)
    assert num_calls > 50
    last = range(num_calls, num_calls - num_kills // 2, -1)
    dies = {*last, *Random(num_ranks).sample(range(1, num_calls), num_kills - len(last))}
    num_new = 0
    for dies_at in sorted(dies):
        store = Path(shutil.copytree(run, tmp_path / "killed")) / STORE
        assert not in_child(killed(way, num_ranks, store), dies_at=dies_at)
        left = stores_of([[str(store)]])
        assert left.why_lost == "" and left.num_ranks in (num_ranks, old_ranks), (dies_at, left)
        num_new += left.num_ranks == num_ranks
        for number, wanted in ((num_ranks, expected), (old_ranks, old)):
            copy = Path(shutil.copytree(store, tmp_path / "copy"))
            reshard_to(number, lambda rank, copy=copy: [copy])
            assert contents(copy, number) == wanted, dies_at
            shutil.rmtree(copy)
        shutil.rmtree(tmp_path / "killed")
    assert num_kills < 40 or 0 < num_new < len(dies)


@pytest.mark.covering(0)
@pytest.mark.parametrize("removes_old", [False, True])
def test_a_reshard_without_a_step_is_undone_by_the_command(removes_old: bool, run: Path, tmp_path: Path) -> None:
    straight = train(tmp_path / "straight", 4)
    store = run / STORE
    before = contents(store, 1)
    reshard_to(2, lambda rank: [store])
    reshard([[str(store)]], 1, removes_old=removes_old)
    assert find(Links.alone(), [store])[0].state == "own"
    assert contents(store, 1) == before and (store / "rank-0-of-2.g1").is_dir() != removes_old
    assert train(run, 4, resume=True) == straight


def test_the_end_of_one_rank_ends_all_and_keeps_the_old_stores(run: Path) -> None:
    store = run / STORE
    before = contents(store, 1)

    def on_rank(links: Links) -> None:
        found, _ = find(links, [store])
        if links.ranks.rank == 1:
            raise OSError("the second machine lost its power")
        reshard_together(found, links, None)

    first, second = rank_outcomes(2, on_rank)
    assert isinstance(second.error, OSError) and isinstance(first.error, RankFailedError)
    assert "rank 1" in str(first.error) and "the second machine lost its power" in str(first.error)
    assert contents(store, 1) == before and find(Links.alone(), [store])[0].state == "own"


def test_a_damaged_record_is_named_and_nothing_is_removed(run: Path) -> None:
    """As with the same number of ranks, damage is an error: a checkpoint is not taken in silence."""
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    folder = newest_folder(store, 1, 2)
    commit = last_commit([str(folder)])
    assert commit is not None
    file = folder / f"records-{int(commit.home[0])}.bin"
    content = bytearray(file.read_bytes())
    content[0] ^= 1
    file.write_bytes(bytes(content))
    with pytest.raises(CorruptionError, match=r"rank-1-of-2.*records-"):
        train(run, 4, resume=True)
    content[0] ^= 1
    file.write_bytes(bytes(content))
    assert train(run, 4, resume=True)[-1]["step"] == 4


def test_a_drive_without_room_is_named_and_what_may_be_deleted(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = run / STORE
    reshard_to(2, lambda rank: [store])
    before = contents(store, 2)
    monkeypatch.setattr("hf_lohan.files.directories.free_bytes", lambda path: 1 << 16)
    with pytest.raises(CapacityError, match=r"you may delete the files manifest.json, .* in .*store \([\d,]+ bytes"):
        train(run, 4, resume=True)
    assert contents(store, 2) == before


@pytest.mark.covering(0)
@pytest.mark.parametrize("resume", [True, "last_step"])
def test_a_run_resumes_from_the_stores_of_two_ranks(
    resume: str | bool, run: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    straight = train(tmp_path / "straight", 4)
    reshard_to(2, lambda rank: [run / STORE])
    assert train(run, 4, resume=resume) == straight
    assert content_at(run / STORE / "rank-0-of-1.g2")[0] == content_at(tmp_path / "straight" / STORE)[0]
    assert hf_lohan.last_step(run) == 4
    assert (
        f"records-1.bin, model-0 in {run / STORE} (" in caplog.text and "any more; you may delete them" in caplog.text
    )


Streamed = tuple[dict[str, str], Any]


@pytest.fixture(scope="module")
def streamed_runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Streamed]:
    """A run of three steps over a model from a path, the path, and what four steps give."""
    folder = tmp_path_factory.mktemp("streamed")
    tiny_model("llama").save_pretrained(folder / "model")
    path = {"model": str(folder / "model")}
    straight = train(folder / "straight", 4, **path)
    train(folder / "run", 3, **path)
    return folder / "run", (path, straight)


@pytest.fixture
def streamed(streamed_runs: tuple[Path, Streamed], tmp_path: Path) -> Streamed:
    """The path and the outcome of the run, which is copied to `run`."""
    shutil.copytree(streamed_runs[0], tmp_path / "run")
    return streamed_runs[1]


def test_a_model_that_is_streamed_from_a_path_resumes_too(streamed: Streamed, tmp_path: Path) -> None:
    """Its store is opened before `train` says that the run resumes."""
    path, straight = streamed
    store = tmp_path / "run" / STORE
    reshard_to(2, lambda rank: [store])
    left = contents(store, 2)
    with pytest.raises(ValueError, match=r"holds the store of a run with 2 ranks, and this run has 1 rank; continue"):
        train(tmp_path / "run", 4, **path)
    assert last_commit([str(store / "rank-0-of-1.g2")]) is None, "nothing is copied before a run resumes"
    assert contents(store, 2) == left
    assert train(tmp_path / "run", 4, resume="last_step", **path) == straight


def test_a_streamed_model_replaces_what_a_killed_reshard_has_left(streamed: Streamed, tmp_path: Path) -> None:
    """A copy with a commit, of which another rank had none."""
    path, straight = streamed
    store = tmp_path / "run" / STORE
    reshard([[str(store)]], 2, removes_old=True)
    reshard_to(3, lambda rank: [store])
    reshard_to(1, lambda rank: [store])
    copy = store / "rank-0-of-1.g3"
    remove_newest(store, 2, 3)  # its source is gone, so that it does not count
    copy.rename(store / "rank-0-of-1.g2")
    assert last_commit([str(store / "rank-0-of-1.g2")]) is not None
    assert train(tmp_path / "run", 4, resume="last_step", **path) == straight


def test_stores_that_another_process_reshards_meanwhile_are_not_continued(
    streamed: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Either before the run has locked its store, or between loading a model and `train`. The newest generation would
    later replace what the run trains."""
    store = tmp_path / "run" / STORE

    def meanwhile(module: Any, name: str) -> Any:
        function = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Any:
            if len([*store.glob("rank-*")]) < 4:
                copy = shutil.copytree(tmp_path / "run", tmp_path / f"copy-of-{name}")  # the store may be locked
                reshard([[str(copy / STORE)]], 2)
                for folder in (copy / STORE).glob("rank-*"):
                    shutil.copytree(folder, store / folder.name, dirs_exist_ok=True)
            return function(*args, **kwargs)

        return called

    with monkeypatch.context() as patch, pytest.raises(ForeignStoreError, match="resharded by another process while"):
        patch.setattr(local_run, "open_tiers", meanwhile(local_run, "open_tiers"))
        train(tmp_path / "run", 4, resume="last_step")
    for folder in store.glob("rank-*"):
        shutil.rmtree(folder)
    with monkeypatch.context() as patch, pytest.raises(ForeignStoreError, match="after the model was loaded; load it"):
        patch.setattr(rank_trainer, "stores_here", meanwhile(rank_trainer, "stores_here"))
        train(tmp_path / "run", 4, resume="last_step", **streamed[0])
    assert find(Links.alone(), [store])[0].num_ranks == 2


def test_a_new_store_without_room_for_two_versions_is_named(
    streamed: Streamed, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is loaded before `train` finds the old stores, so the new one may have got one version."""
    path, straight = streamed
    store = tmp_path / "run" / STORE
    reshard_to(2, lambda rank: [store])
    monkeypatch.setattr("hf_lohan.store.store.fits", lambda *args: False)
    with pytest.raises(ForeignStoreError, match=r"has durability .* did not fit .* delete the new store"):
        train(tmp_path / "run", 4, resume="last_step", **path)
    monkeypatch.undo()
    gc.collect()  # closes the engine
    remove_store([str(store / "rank-0-of-1.g2")])
    assert train(tmp_path / "run", 4, resume="last_step", **path) == straight


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_streamed", [True, False])
@pytest.mark.parametrize("resume", [None, True, "last_step"])
def test_another_run_is_not_continued(resume: str | bool | None, is_streamed: bool, tmp_path: Path) -> None:
    """Both runs have the same model and ssd path."""
    settings = {"ssd": str(tmp_path / "drive")}
    if is_streamed:
        tiny_model("llama").save_pretrained(tmp_path / "model")
        settings["model"] = str(tmp_path / "model")
    train(tmp_path / "first", 3, **settings)
    reshard_to(2, lambda rank: [tmp_path / "drive"])
    before = contents(tmp_path / "drive", 2)
    with pytest.raises(
        ForeignStoreError, match=rf"has steps of the run in {tmp_path}/first, which .* use the same output_dir"
    ):
        train(tmp_path / "second", 4, resume=resume, **settings)
    assert contents(tmp_path / "drive", 2) == before
    assert last_commit([str(tmp_path / "drive" / "rank-0-of-1.g2")]) is None
    assert train(tmp_path / "first", 4, resume=True, **settings)[-1]["step"] == 4


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_missing_folder_costs_the_steps_since_the_last_checkpoint(
    is_streamed: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = {}
    if is_streamed:
        tiny_model("llama").save_pretrained(tmp_path / "model")
        settings["model"] = str(tmp_path / "model")
    run = tmp_path / "run"
    straight = train(tmp_path / "straight", 4, **settings)
    train(run, 3, **settings)
    reshard([[str(run / STORE)]], 2, removes_old=True)
    left = content_at(newest_folder(run / STORE, 0, 2))[0]
    remove_newest(run / STORE, 1, 2)
    with pytest.raises(
        ValueError, match=r"step 3, .*because the store of rank 1 of 2 is gone; .*checkpoint-2, which costs 1 step"
    ):
        train(run, 4, resume="last_step", **settings)
    with pytest.raises(ValueError, match=r"continue from it with resume_from_checkpoint=True"):
        train(run, 4, **settings)
    assert train(run, 4, resume=True, **settings) == straight
    assert "step, 3, is lost, because the store of rank 1 of 2 is gone. The run continues from " in caplog.text
    assert "checkpoint-2, which costs 1 step. The rest of the old" in caplog.text
    assert content_at(newest_folder(run / STORE, 0, 2))[0] == left, "nothing is destroyed"
    assert hf_lohan.last_step(run) == 4 and max(stores_under(str(run / STORE))) == (2, 1)


def test_without_being_asked_a_run_does_not_touch_the_stores_of_other_ranks(run: Path) -> None:
    reshard_to(2, lambda rank: [run / STORE])
    before = contents(run / STORE, 2)
    for resume in (None, str(run / "checkpoint-2")):
        with pytest.raises(ValueError, match=r"holds the store of a run with 2 ranks.* lohan reshard"):
            train(run, 4, resume=resume)
    assert contents(run / STORE, 2) == before and not (run / STORE / "rank-0-of-1.g2").exists()
    reshard_to(1, lambda rank: [run / STORE])
    before = contents(run / STORE, 1)
    with pytest.raises(ValueError, match=r"have step 3 of 2 ranks, and this run would overwrite it"):
        train(run, 4)
    assert contents(run / STORE, 1) == before


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
    remove_newest(run / STORE, 1, 2)
    remove_store([str(run / STORE)])
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


@pytest.mark.covering(0)
@pytest.mark.parametrize("by_command", [False, True])
def test_the_decided_chunks_are_carried_over(by_command: bool, run: Path) -> None:
    """A run has decided them after the commit from which it continues."""
    store = run / STORE
    commit = last_commit([str(store)])
    assert commit is not None
    decided = json.dumps({CHUNK_TOKENS: 16, RUN_ID: commit.facts[RUN_ID]})
    (store / "chunk_tokens.json").write_text(decided)
    if by_command:
        reshard([[str(store)]], 2, removes_old=True)
    else:
        reshard_to(2, lambda rank: [store])
    assert [(newest_folder(store, rank, 2) / "chunk_tokens.json").read_text() for rank in range(2)] == [decided] * 2
    reshard_to(1, lambda rank: [store])
    assert (store / "rank-0-of-1.g2" / "chunk_tokens.json").read_text() == decided


def reshard_of_launch(run: Path, num_ranks: int) -> None:
    """Reshard the stores for ranks of the launch that the environment names."""
    from hf_lohan.huggingface.ranks import launch_id

    def on_rank(links: Links) -> None:
        found, _ = find(links, [run / STORE], launch_id())
        assert found.is_of_launch
        reshard_together(found, links, launch_id())

    run_ranks(num_ranks, on_rank)

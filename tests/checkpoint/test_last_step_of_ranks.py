"""The step that several ranks resume from after one of them died between commits. Each rank and `last_step` give the
same answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_lohan
from hf_lohan.checkpoint.optimizer_states import FOLDER_NAME
from hf_lohan.checkpoint.resume_point import CHECKPOINT_FACTS_NAME, ResumePoint, point_of_attempt
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.ranks import CommitAgreement, Links
from hf_lohan.report.run_data import FOLDER, SETTINGS_NAME, STORE_FOLDER
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.store.rank_folders import rank_folder
from hf_lohan.testing.thread_ranks import run_ranks

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
RECORDS = (RecordSpec("a", "param", "bfloat16", 2048, granule_numel=2048),)


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    with_threads = IoEngine(2, 16384, 1 << 20)
    yield with_threads
    with_threads.close()


def store_of(run: Path, rank: int) -> str:
    return rank_folder(str(run / STORE_FOLDER), rank, 2)


def commit(run: Path, num_commits: list[int], engine: IoEngine, **own_facts: str) -> None:
    """Commit as two training ranks do. The first commit is the start of the run, each later commit a step. Each rank
    stops after its number of commits."""
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / SETTINGS_NAME).write_text(json.dumps({"ssd": [{"path": store_of(run, 0)}]}))

    def train(links: Links) -> None:
        rank = links.ranks.rank
        Path(store_of(run, rank)).mkdir(parents=True)
        paths = [StorePath(store_of(run, rank), 10**6)]
        with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability="step") as store:
            CommitAgreement(links).restore_common_commit(store)
            for number in range(num_commits[rank]):
                facts = {"global_step": number, "is_resumable": number > 0, "durability": store.durability, **own_facts}
                journal = {"trainer_state.json": b"{}"} if number else {}
                store.commit({**facts, "output_dir": str(run)}, journal, b'{"step": 1}\n' if number else b"")
            links.barrier("all have stopped")

    run_ranks(2, train)


def chosen(run: Path, resume: str | bool) -> list[ResumePoint]:
    """Return the resume point that each rank chooses."""

    def choose(links: Links) -> ResumePoint:
        return ResumePoint.choose(
            resume,
            lambda: [store_of(run, links.ranks.rank)],
            str(run),
            lambda _folder: None,
            lambda *_of_journal: None,
            links,
        )

    return run_ranks(2, choose)


@pytest.mark.parametrize("num_commits", [[2, 1], [1, 2], [1, 1]])
def test_ranks_begin_anew_if_one_died_in_its_first_step(
    num_commits: list[int], tmp_path: Path, engine: IoEngine
) -> None:
    """The other rank has committed that step, so its store alone would resume there."""
    commit(tmp_path / "run", num_commits, engine)
    assert hf_lohan.last_step(tmp_path / "run") is None
    assert chosen(tmp_path / "run", True) == [ResumePoint(True)] * 2, (
        "without a common step only a checkpoint may be used"
    )
    with pytest.raises(ValueError, match="no step has been committed"):
        chosen(tmp_path / "run", "last_step")


@pytest.mark.parametrize("num_commits", [[3, 2], [2, 3], [2, 2]])
def test_ranks_resume_from_their_newest_common_step(num_commits: list[int], tmp_path: Path, engine: IoEngine) -> None:
    commit(tmp_path / "run", num_commits, engine)
    assert hf_lohan.last_step(tmp_path / "run") == 1
    for resume in (True, "last_step"):
        points = chosen(tmp_path / "run", resume)
        assert [point.commit.facts["global_step"] for point in points if point.commit] == [1, 1]


def test_a_restarted_attempt_takes_the_newest_checkpoint_that_all_machines_see(
    tmp_path: Path, engine: IoEngine
) -> None:
    """A shared folder may show a checkpoint to one machine some seconds later than to another."""
    commit(tmp_path / "run", [1, 1], engine, launch_id="launch", run_id="run")
    for rank, steps in enumerate([(4, 6), (4,)]):
        for step in steps:
            checkpoint = tmp_path / f"seen-by-{rank}" / f"checkpoint-{step}"
            (checkpoint / FOLDER_NAME).mkdir(parents=True)
            (checkpoint / "trainer_state.json").touch()
            (checkpoint / FOLDER_NAME / CHECKPOINT_FACTS_NAME).write_text(json.dumps({"run_id": "run"}))

    def choose(links: Links) -> str | None:
        rank = links.ranks.rank
        return point_of_attempt("launch", [store_of(tmp_path / "run", rank)], str(tmp_path / f"seen-by-{rank}"), links)

    assert run_ranks(2, choose) == [str(tmp_path / "seen-by-1" / "checkpoint-4")] * 2

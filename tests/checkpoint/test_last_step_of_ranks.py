"""Which step several ranks go on from where one of them died between the others' commits: whoever asks is told the
same, each rank from its own store and all others, and who looks at the run's folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import hf_lohan
from hf_lohan.checkpoint.resume_point import ResumePoint
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


def commit(run: Path, num_commits: list[int], engine: IoEngine) -> None:
    """As two ranks do that train: the first commit is the begin of the run, and each other one a step. Each rank dies
    when it has made as many as are said of it."""
    (run / FOLDER).mkdir(parents=True)
    (run / FOLDER / SETTINGS_NAME).write_text(json.dumps({"ssd": [{"path": store_of(run, 0)}]}))

    def train(links: Links) -> None:
        rank = links.ranks.rank
        Path(store_of(run, rank)).mkdir(parents=True)
        paths = [StorePath(store_of(run, rank), 10**6)]
        with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability="step") as store:
            CommitAgreement(links).restore_common_commit(store)
            for number in range(num_commits[rank]):
                facts = {"global_step": number, "is_resumable": number > 0, "durability": store.durability}
                journal = {"trainer_state.json": b"{}"} if number else {}
                store.commit({**facts, "output_dir": str(run)}, journal, b'{"step": 1}\n' if number else b"")
            links.barrier("all are dead")

    run_ranks(2, train)


def chosen(run: Path, asked: str | bool) -> list[ResumePoint]:
    """By each rank, as it goes on."""

    def choose(links: Links) -> ResumePoint:
        return ResumePoint.choose(
            asked,
            lambda: [store_of(run, links.ranks.rank)],
            str(run),
            lambda _folder: None,
            lambda *_of_journal: None,
            links,
        )

    return run_ranks(2, choose)


@pytest.mark.parametrize("num_commits", [[2, 1], [1, 2], [1, 1]])
def test_one_that_died_in_its_first_step_has_the_others_begin_anew(
    num_commits: list[int], tmp_path: Path, engine: IoEngine
) -> None:
    """Though another has committed that step: a look at one store would find it."""
    commit(tmp_path / "run", num_commits, engine)
    assert hf_lohan.last_step(tmp_path / "run") is None
    assert chosen(tmp_path / "run", True) == [ResumePoint(True)] * 2, "nothing but a checkpoint, if there is one"
    with pytest.raises(ValueError, match="no step has been committed"):
        chosen(tmp_path / "run", "last_step")


@pytest.mark.parametrize("num_commits", [[3, 2], [2, 3], [2, 2]])
def test_they_go_on_from_the_newest_step_that_both_have(
    num_commits: list[int], tmp_path: Path, engine: IoEngine
) -> None:
    commit(tmp_path / "run", num_commits, engine)
    assert hf_lohan.last_step(tmp_path / "run") == 1
    for asked in (True, "last_step"):
        points = chosen(tmp_path / "run", asked)
        assert [point.commit.facts["global_step"] for point in points if point.commit] == [1, 1]

"""Ranks commit together. If one of them is killed anywhere, all continue from the same commit, bit for bit."""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import pytest
from covering import slow_but

from hf_lohan.files import IoEngine, StorePath
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError
from hf_lohan.ranks.transport.agreements import CommitAgreement, newest_common_commit
from hf_lohan.store import Commit, ModelIdentity, RecordSpec, Store
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.testing.stored_state import Content, aligned, content_of
from hf_lohan.testing.thread_ranks import Outcome, rank_outcomes, run_ranks

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
RECORDS = (RecordSpec("a", "param", "bfloat16", 8192, granule_numel=2048),)
NUM_STEPS = 4


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    with_threads = IoEngine(2, 16384, 1 << 20)
    yield with_threads
    with_threads.close()


class Killed(BaseException):
    """Ends a rank like SIGKILL."""


@dataclass
class KilledAt:
    """Kills one rank right before the n-th call of one kind in a commit."""

    rank: int
    step: int
    call: str
    """A function of `os`, or "commit", "tell", "told" or "before_write"."""
    nth: int = 1
    num_calls: int = field(default=0, init=False)
    is_done: bool = field(default=False, init=False)

    def pass_by(self, rank: int, step: int, call: str) -> None:
        if (rank, step, call) != (self.rank, self.step, self.call):
            return
        self.num_calls += 1
        if self.num_calls == self.nth:
            self.is_done = True
            raise Killed


def path_of(root: Path, rank: int) -> list[StorePath]:
    return [StorePath(str(root / f"rank-{rank}"), 10**6)]


class TrainedRank:
    """One rank's store, and its content at each commit."""

    def __init__(self, links: Links, root: Path, engine: IoEngine, kill: KilledAt | None, seed: int = 0) -> None:
        self.rank = links.ranks.rank
        self.kill = kill
        self.states: dict[int, Content] = {}
        self.random = Random(f"{seed} {self.rank}")
        self.store = Store.open_or_create(
            path_of(root, self.rank), RECORDS, model=MODEL, engine=engine, durability="step"
        )
        self.agreement = CommitAgreement(links)
        self.began_at = self.agreement.restore_common_commit(self.store)
        self.began_with = content_of(self.store)

    def train(self, num_steps: int) -> None:
        first = self.store.committed.number + 1 if self.store.committed is not None else 1
        for step in range(first, first + num_steps):
            threading.current_thread().step = step  # type: ignore[attr-defined]
            if self.kill is not None:
                self.kill.pass_by(self.rank, step, "before_write")
            for start in (0, 2048, 4096):
                if self.random.random() < 0.7:
                    self.store.write("a", "param", start, aligned(RECORDS[0], 2048, self.random)).wait()
            self.states[step] = content_of(self.store)
            if self.kill is not None:
                self.kill.pass_by(self.rank, step, "commit")
            self.store.commit()
            if self.kill is not None:
                self.kill.pass_by(self.rank, step, "told")
        self.agreement.wait_for_commit(first + num_steps - 1)


@contextmanager
def calls_that_kill(kill: KilledAt) -> Iterator[None]:
    """Let calls of `os` and of the agreement kill the rank."""

    def passing(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            thread = threading.current_thread()
            if thread.name == f"rank-{kill.rank}" and hasattr(thread, "step"):
                kill.pass_by(kill.rank, thread.step, name)
            return real(*args, **kwargs)

        return call

    with ExitStack() as patched:
        for name in ("fsync", "fdatasync", "link", "replace", "unlink"):
            patched.enter_context(patch.object(os, name, passing(name, getattr(os, name))))
        real_tell = CommitAgreement.announce_commit

        def tell(agreement: CommitAgreement, number: int) -> None:
            thread = threading.current_thread()
            kill.pass_by(int(thread.name.removeprefix("rank-")), number, "tell")
            real_tell(agreement, number)

        patched.enter_context(patch.object(CommitAgreement, "announce_commit", tell))
        yield


KILLS = [
    ("commit", 1),
    ("fdatasync", 1),
    ("unlink", 1),
    ("fsync", 1),
    ("unlink", 2),
    ("link", 1),
    ("replace", 1),
    ("fsync", 2),
    ("tell", 1),
    ("told", 1),
    ("before_write", 1),
]
"""In the order of a commit: data, the new file, the old name, the new name and the folder. Then the message to the
other ranks, and the next step.
"""


IN_A_LATER_STEP, IN_THE_FIRST_STEP, OF_THREE_RANKS = (2, 3), (2, 1), (3, 3)
QUICK = [*((kill, IN_A_LATER_STEP) for kill in KILLS), (("fsync", 1), IN_THE_FIRST_STEP), (("told", 1), OF_THREE_RANKS)]
EVERY = [(kill, at) for kill in KILLS for at in (IN_A_LATER_STEP, IN_THE_FIRST_STEP, OF_THREE_RANKS)]


@pytest.mark.parametrize("case", slow_but(QUICK, EVERY), ids=str)
def test_all_ranks_continue_from_one_commit_after_a_rank_is_killed_anywhere(
    case: tuple[tuple[str, int], tuple[int, int]], tmp_path: Path, engine: IoEngine
) -> None:
    ((call, nth), (num_ranks, killed_step)), root = case, tmp_path
    for rank in range(num_ranks):
        (root / f"rank-{rank}").mkdir(parents=True)
    kill = KilledAt(num_ranks - 1, killed_step, call, nth)
    states: dict[int, dict[int, Content]] = {}

    def until_killed(links: Links) -> None:
        trained = TrainedRank(links, root, engine, kill)
        states[trained.rank] = trained.states
        try:
            trained.train(NUM_STEPS)
        finally:
            trained.store.close()

    with calls_that_kill(kill):
        outcomes = rank_outcomes(num_ranks, until_killed, delays_seed=nth, timeout_s=5)
    if not kill.is_done:  # a first commit replaces no file
        assert (call, killed_step) in {("link", 1), ("unlink", 1)} and not any(o.error for o in outcomes)
        return
    assert isinstance(outcomes[-1].error, Killed)
    others_ended(outcomes[:-1], num_ranks - 1)

    def go_on(links: Links) -> tuple[int, dict[int, Content]]:
        trained = TrainedRank(links, root, engine, None, seed=1)
        number = trained.began_at.number if trained.began_at is not None else 0
        held = states[trained.rank]
        assert trained.began_with == (held[number] if number else {("a", "param"): bytes(RECORDS[0].num_bytes)})
        trained.train(2)
        content = content_of(trained.store)
        trained.store.close()
        assert content == trained.states[number + 2]
        return number, trained.states

    results = run_ranks(num_ranks, go_on, delays_seed=killed_step)
    numbers = {number for number, _ in results}
    is_durable = KILLS.index((call, nth)) > KILLS.index(("replace", 1))
    before = killed_step - 1
    assert len(numbers) == 1
    # A process sees a new name at once, even if a power cut could still undo it.
    assert numbers <= ({before + 1, before} if is_durable and call != "before_write" else {before})
    again = run_ranks(num_ranks, lambda links: last_number(links, root, engine))
    assert set(again) == {numbers.pop() + 2}


def others_ended(outcomes: Sequence[Outcome[None]], killed: int) -> None:
    for outcome in outcomes:
        assert isinstance(outcome.error, RankFailedError)
        assert re.match(rf"rank {killed} \(pid \d+, .*\) failed: Killed", str(outcome.error))
        assert "waited for all ranks to have the commit" in str(outcome.error)


def last_number(links: Links, root: Path, engine: IoEngine) -> int:
    trained = TrainedRank(links, root, engine, None)
    trained.store.close()
    return trained.began_at.number


def test_a_slow_commit_of_one_rank_delays_only_writes_of_the_next_step(tmp_path: Path, engine: IoEngine) -> None:
    has_committed, order = threading.Event(), list[str]()

    def run(links: Links) -> None:
        (tmp_path / f"rank-{links.ranks.rank}").mkdir()
        trained = TrainedRank(links, tmp_path, engine, None)
        trained.train(1)
        rank = links.ranks.rank
        trained.store.write("a", "param", 0, aligned(RECORDS[0], 2048, trained.random)).wait()
        if rank == 1:
            assert has_committed.wait(60)
            order.append("rank 1 commits")
        trained.store.commit()
        if rank == 0:
            has_committed.set()
        trained.store.write("a", "param", 0, aligned(RECORDS[0], 2048, trained.random)).wait()
        if rank == 0:
            order.append("rank 0 has written")
        trained.store.close()

    run_ranks(2, run)
    assert order == ["rank 1 commits", "rank 0 has written"]


def test_the_error_of_an_empty_folder_names_the_rank(tmp_path: Path, engine: IoEngine) -> None:
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()

    def train(links: Links) -> None:
        trained = TrainedRank(links, tmp_path, engine, None)
        trained.train(2)
        trained.store.close()

    run_ranks(2, train)
    for file in (tmp_path / "rank-1").iterdir():
        file.unlink()

    def go_on(links: Links) -> None:
        with Store.open_or_create(path_of(tmp_path, links.ranks.rank), RECORDS, model=MODEL, engine=engine) as store:
            before = store.committed
            with pytest.raises(RanksDisagreeError, match=r"that all ranks hold: rank 0 holds commit 2 \(start"):
                CommitAgreement(links).restore_common_commit(store)
            assert store.committed is before

    run_ranks(2, go_on)


def test_ranks_that_keep_different_numbers_of_versions_are_refused(tmp_path: Path, engine: IoEngine) -> None:

    def begin(links: Links) -> None:
        paths = path_of(tmp_path, links.ranks.rank)
        Path(paths[0].path).mkdir()
        homes = 2 - links.ranks.rank
        store = Store.create(paths, RECORDS, model=MODEL, engine=engine, num_homes=homes)
        said = r"rank 0 keeps two versions .* rank 1 keeps one version; set durability"
        with store, pytest.raises(RanksDisagreeError, match=said):
            CommitAgreement(links).restore_common_commit(store)

    run_ranks(2, begin)


def test_stores_with_one_version_do_not_change(tmp_path: Path, engine: IoEngine) -> None:
    """Such stores have no steps to resume. The store of a rank that ended within a step is torn."""
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()

    def train(links: Links) -> None:
        rank = links.ranks.rank
        with Store.create(path_of(tmp_path, rank), RECORDS, model=MODEL, engine=engine, num_homes=1) as store:
            assert CommitAgreement(links).restore_common_commit(store) is None
            for _ in range(2 if rank == 0 else 1):
                store.write("a", "param", 0, aligned(RECORDS[0], 2048, Random(rank))).wait()
                store.commit()
            if rank == 1:
                store.write("a", "param", 0, aligned(RECORDS[0], 2048, Random(7))).wait()

    def go_on(links: Links) -> bool:
        paths = path_of(tmp_path, links.ranks.rank)
        with Store.open(paths, model=MODEL, engine=engine, allow_torn=True) as store:
            assert CommitAgreement(links).restore_common_commit(store) is None
            assert store.committed is not None and store.committed.number == 2 - links.ranks.rank
            store.restore_commit(store.committed)
            return store.versions.is_torn

    run_ranks(2, train)
    assert run_ranks(2, go_on) == [False, True]


def trained_on(root: Path, engine: IoEngine, num_steps: int, *, seed: int = 0) -> list[Content]:
    """Continue the run of two ranks below ``root``. Returns the last contents of their stores."""

    def train(links: Links) -> Content:
        trained = TrainedRank(links, root, engine, None, seed)
        with trained.store as store:
            trained.train(num_steps)
            return content_of(store)

    return run_ranks(2, train)


@pytest.mark.parametrize("num_steps", [1, 2, 3])
@pytest.mark.parametrize("of_other", [0, 1])
def test_two_continuations_of_a_run_are_not_mixed(
    tmp_path: Path, engine: IoEngine, num_steps: int, of_other: int
) -> None:
    """Drives are restored from copies, and one of them later from a copy of another time. All commits have the same
    numbers."""
    for rank in range(2):
        (tmp_path / "one" / f"rank-{rank}").mkdir(parents=True)
    begun = trained_on(tmp_path / "one", engine, 2)
    for name in ("other", "mixed"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    for name, seed in (("one", 1), ("other", 2)):
        trained_on(tmp_path / name, engine, num_steps, seed=seed)
    for rank in range(2):
        shutil.rmtree(tmp_path / "mixed" / f"rank-{rank}")
        source = tmp_path / ("other" if rank == of_other else "one")
        shutil.copytree(source / f"rank-{rank}", tmp_path / "mixed" / f"rank-{rank}")

    if num_steps == 1:  # both still have the commit with which they began
        assert trained_on(tmp_path / "mixed", engine, 0) == begun
    else:
        with pytest.raises(RanksDisagreeError, match="there is no commit that all ranks hold"):
            trained_on(tmp_path / "mixed", engine, 0)
    assert len(trained_on(tmp_path / "one", engine, 1)) == 2, "each continuation by itself goes on"


def test_stores_with_one_group_for_all_starts_go_on(tmp_path: Path, engine: IoEngine) -> None:
    """As earlier versions made them."""
    contents = []
    for rank in range(2):
        (tmp_path / f"rank-{rank}").mkdir()
        with Store.create(path_of(tmp_path, rank), RECORDS, model=MODEL, engine=engine, num_homes=2) as store:
            store.agree_on_commits(ImmediateAgreement("run", keeps_previous=True))
            for _ in range(3):
                store.write("a", "param", 0, aligned(RECORDS[0], 2048, Random(rank))).wait()
                store.commit()
            contents.append(content_of(store))
    assert trained_on(tmp_path, engine, 0) == contents
    trained_on(tmp_path, engine, 2)
    assert len(trained_on(tmp_path, engine, 1)) == 2


def test_the_newest_common_commit() -> None:
    assert newest_common_commit([[("a", 7), ("a", 6)], [("a", 6), ("a", 5)], [("a", 7), ("a", 6)]]) == ("a", 6)
    assert newest_common_commit([[("a", 1), ("", 0)], [("", 0)]]) == ("", 0)
    with pytest.raises(RanksDisagreeError, match=r"rank 0 holds commit 7 \(start a\); rank 1 holds nothing"):
        newest_common_commit([[("a", 7)], [("", 0)]])


def test_a_single_rank_keeps_the_previous_commit(tmp_path: Path, engine: IoEngine) -> None:
    (tmp_path / "rank-0").mkdir()
    with Links.alone() as links:
        trained = TrainedRank(links, tmp_path, engine, None)
        trained.train(3)
        kept: list[Commit] = trained.store.kept_commits
        assert [commit.number for commit in kept] == [3, 2]
        trained.store.close()

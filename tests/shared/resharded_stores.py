"""Stopped runs whose stores are resharded: by ranks that are threads, by the command, and in a child that is killed."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from short_runs import train_until

from hf_lohan.annexes.resharding.reshard import reshard
from hf_lohan.annexes.resharding.reshard_together import reshard_together
from hf_lohan.checkpoint.generations import RunStores, find_stores
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.ranks import Links
from hf_lohan.store import Commit, Store
from hf_lohan.store.commits import ImmediateAgreement
from hf_lohan.store.rank_folders import rank_folder, stores_under
from hf_lohan.testing.stored_state import Content, content_of
from hf_lohan.testing.thread_ranks import run_ranks

STORE = Path("_lohan") / "store"
Sees = Callable[[int], Sequence[Path]]
"""Returns the directories that a rank sees. The first one is its own."""


train = partial(train_until, save_steps=2)


@pytest.fixture(scope="module")
def stopped_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The output folder of a run of one rank that was stopped after its third step. It has a checkpoint of step 2."""
    folder = tmp_path_factory.mktemp("run")
    train(folder, 3)
    return folder


@pytest.fixture
def run(stopped_run: Path, tmp_path: Path) -> Path:
    """A copy of the stopped run."""
    return Path(shutil.copytree(stopped_run, tmp_path / "run"))


def find(links: Links, sees: Sequence[Path], launch: str | None = None) -> tuple[RunStores, list[str]]:
    """Return what a rank finds, and the folders of its store."""
    found = find_stores([[str(directory)] for directory in sees], links, launch)
    return found, found.own_folders(links.ranks.rank, links.ranks.num_ranks)


def reshard_to(num_ranks: int, sees: Sees) -> list[tuple[RunStores, int]]:
    """Reshard on ranks that are threads. Returns what each rank found, and its sent bytes."""

    def on_rank(links: Links) -> tuple[RunStores, int]:
        found, _ = find(links, sees(links.ranks.rank))
        assert found.state in ("reshardable", "own"), found
        if found.state == "reshardable":
            reshard_together(found, links, None)
        return found, links.sent_bytes["weights"]

    return run_ranks(num_ranks, on_rank)


def newest_folder(directory: Path, rank: int, num_ranks: int) -> Path:
    """Return the folder of a rank's store in the newest generation with stores of so many ranks."""
    generations = [generation for generation, num in stores_under(str(directory)) if num == num_ranks]
    return Path(rank_folder(str(directory), rank, num_ranks, max(generations)))


def content_at(folder: Path) -> tuple[Content, Commit]:
    engine = IoEngine(2, 1 << 20, 1 << 22)
    try:
        with Store.open([StorePath(str(folder))], model=None, engine=engine) as store:
            assert store.committed is not None
            return content_of(store), store.committed
    finally:
        engine.close()


def contents_of_rank(directory: Path, rank: int, num_ranks: int) -> tuple[Content, Any]:
    """Return the content of a rank's store, and what its commit says except where it was resharded from."""
    content, commit = content_at(newest_folder(directory, rank, num_ranks))
    facts = {name: fact for name, fact in commit.facts.items() if not name.startswith("cut_from")}
    return content, (commit.number, commit.journal, facts, commit.model_files)


def contents(directory: Path, num_ranks: int) -> list[tuple[Content, Any]]:
    return [contents_of_rank(directory, rank, num_ranks) for rank in range(num_ranks)]


def resharded(run: Path, copy: Path, num_ranks: int) -> list[tuple[Content, Any]]:
    """Return the stores that `lohan reshard` makes of a copy of a run."""
    shutil.copytree(run, copy)
    reshard([[str(copy / STORE)]], num_ranks, removes_old=True)
    return contents(copy / STORE, num_ranks)


SYSTEM_CALLS = ("pwrite", "pwritev", "replace", "rename", "unlink", "mkdir", "fsync", "fdatasync", "ftruncate")


def in_child(action: Callable[[], object], *, dies_at: int | None) -> int:
    """Run `action` in a forked child, which is killed at this call of the operating system. Returns the calls that it
    made if it ended by itself."""
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        num_calls, lock = 0, threading.Lock()

        def counted(call: Callable[..., Any]) -> Callable[..., Any]:
            def counting(*args: Any, **kwargs: Any) -> Any:
                nonlocal num_calls
                with lock:
                    num_calls += 1
                    if num_calls == dies_at:
                        os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counting

        for name in SYSTEM_CALLS:
            setattr(os, name, counted(getattr(os, name)))
        try:
            action()
            os.write(writer, str(num_calls).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(pid, 0)
    told = os.read(reader, 100)
    os.close(reader)
    return int(told or 0)


def goes_on(store: Path, num_ranks: int, step: int, ranks: Sequence[int] | None = None) -> None:
    """Commit another step in each rank's newest store."""
    io = IoEngine(1, 1 << 20, 1 << 22)
    for rank in range(num_ranks) if ranks is None else ranks:
        path = StorePath(str(newest_folder(store, rank, num_ranks)))
        with Store.open([path], model=None, engine=io) as opened:
            last = opened.committed
            assert last is not None
            if num_ranks > 1:
                opened.agree_on_commits(ImmediateAgreement(last.group_id, keeps_previous=True))
            facts = {name: fact for name, fact in last.facts.items() if not name.startswith("cut_from")}
            opened.commit({**facts, "global_step": step}, last.journal, opened.log, model_files=opened.model_files)
    io.close()


def remove_newest(store: Path, rank: int, num_ranks: int) -> None:
    """Remove a rank's newest store, as if its drive was gone."""
    shutil.rmtree(newest_folder(store, rank, num_ranks))


def without_generation(store: Path, num_ranks: int) -> None:
    """Give the newest stores of so many ranks the names that older versions gave them."""
    for rank in range(num_ranks):
        newest_folder(store, rank, num_ranks).rename(rank_folder(str(store), rank, num_ranks))

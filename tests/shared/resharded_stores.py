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

from hf_lohan.checkpoint.other_ranks import OtherRanks, find_other_ranks
from hf_lohan.checkpoint.reshard_together import reshard_together, set_left_over_aside
from hf_lohan.checkpoint.resharding import reshard
from hf_lohan.files import IoEngine, StorePath
from hf_lohan.huggingface.models.export import described_model
from hf_lohan.ranks import Links
from hf_lohan.store import Commit, Store
from hf_lohan.store.rank_folders import rank_folder
from hf_lohan.testing.stored_state import Content, content_of
from hf_lohan.testing.thread_ranks import run_ranks

STORE = Path("_lohan") / "store"
Sees = Callable[[int], Sequence[Path]]
"""Returns the directories that a rank sees. The first one is its own."""


def form_of(store: Store) -> Any:
    return described_model(store)[1]


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


def find(links: Links, sees: Sequence[Path], launch: str | None = None) -> tuple[OtherRanks, list[str]]:
    own = [rank_folder(str(sees[0]), links.ranks.rank, links.ranks.num_ranks)]
    return find_other_ranks([[str(directory)] for directory in sees], own, links, launch), own


def reshard_to(num_ranks: int, sees: Sees, *, sets_aside: bool = True) -> list[Any]:
    """Reshard on ranks that are threads. Returns what each rank found, and its sent bytes."""

    def on_rank(links: Links) -> tuple[OtherRanks, int]:
        found, own = find(links, sees(links.ranks.rank))
        assert found.state in ("reshardable", "resharded"), found
        if found.state == "reshardable":
            reshard_together(found, own, links, form_of, None)
        if sets_aside:
            set_left_over_aside(found, own, links, is_open=False)
        return found, links.sent_bytes["weights"]

    return run_ranks(num_ranks, on_rank)


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
    content, commit = content_at(Path(rank_folder(str(directory), rank, num_ranks)))
    facts = {name: fact for name, fact in commit.facts.items() if not name.startswith("cut_from")}
    return content, (commit.number, commit.journal, facts, commit.model_files)


def contents(directory: Path, num_ranks: int) -> list[tuple[Content, Any]]:
    return [contents_of_rank(directory, rank, num_ranks) for rank in range(num_ranks)]


def resharded(run: Path, copy: Path, num_ranks: int) -> list[tuple[Content, Any]]:
    """Return the stores that `lohan reshard` makes of a copy of a run."""
    shutil.copytree(run, copy)
    reshard([str(copy / STORE)], num_ranks, form_of=form_of, removes_old=True)
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

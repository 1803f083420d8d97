"""Processes commit together. If one of them is killed at any time, all continue from one commit, to the bit."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random

import pytest
import torch
from rank_processes import RankProcesses

from hf_lohan.files import IoEngine, StorePath
from hf_lohan.ranks import CommitAgreement, Links
from hf_lohan.store import ModelIdentity, RecordSpec, Store
from hf_lohan.testing.stored_state import aligned, content_of
from hf_lohan.testing.thread_ranks import run_ranks

pytestmark = pytest.mark.usefixtures("fork_server")
MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
NUM_GRANULES, GRANULE = 8, 2048
RECORDS = (RecordSpec("a", "param", "bfloat16", NUM_GRANULES * GRANULE, granule_numel=GRANULE),)
ROOT = "LOHAN_TEST_STORES"
Report = Callable[[object], None]


def written_in(step: int, rank: int) -> dict[int, Random]:
    """Return the granules that a step writes, each with the generator of its values."""
    which = Random(f"{rank} {step}").sample(range(NUM_GRANULES), 3)
    return {granule: Random(f"{rank} {step} {granule}") for granule in which}


def content_after(step: int, rank: int) -> bytes:
    granules = [bytes(2 * GRANULE)] * NUM_GRANULES
    for number in range(1, step + 1):
        for granule, random in written_in(number, rank).items():
            granules[granule] = aligned(RECORDS[0], GRANULE, random).view(torch.uint8).numpy().tobytes()
    return b"".join(granules)


def opened(links: Links, engine: IoEngine, root: str) -> Store:
    path = Path(root) / f"rank-{links.ranks.rank}"
    path.mkdir(exist_ok=True)
    return Store.open_or_create([StorePath(str(path))], RECORDS, model=MODEL, engine=engine, durability="step")


def train(store: Store, rank: int) -> Iterator[int]:
    """Train and yield the number of each commit."""
    step = store.committed.number if store.committed is not None else 0
    while True:
        step += 1
        for granule, random in written_in(step, rank).items():
            store.write("a", "param", granule * GRANULE, aligned(RECORDS[0], GRANULE, random)).wait()
        store.commit()
        yield step


def train_until_killed(links: Links, report: Report) -> None:
    engine = IoEngine(1, 16384, 1 << 20)
    store = opened(links, engine, os.environ[ROOT])
    try:
        CommitAgreement(links).restore_common_commit(store)
        report(os.getpid())
        for step in train(store, links.ranks.rank):
            if links.ranks.rank == 0:
                report(step)
    finally:
        store.close()
        engine.close()


def test_all_ranks_continue_from_one_commit_after_one_of_three_is_killed(tmp_path: Path) -> None:
    random, numbers = Random(4), [0]
    for attempt in range(3):
        ranks = RankProcesses(3, train_until_killed, environment={ROOT: str(tmp_path)})
        try:
            pids = [ranks.report_of(rank) for rank in range(3)]
            for _ in range(random.randint(3, 20)):
                assert isinstance(ranks.report_of(0), int)
            time.sleep(0.005 * random.random())
            os.kill(pids[attempt % 3], signal.SIGKILL)
            ends = ranks.ends()
        finally:
            ranks.close()
        for rank, ended in enumerate(ends):
            if rank != attempt % 3:
                assert ended is not None and ended.error.startswith("RankFailedError: rank "), ended
        engine = IoEngine(2, 16384, 1 << 20)

        def go_on(links: Links, engine: IoEngine = engine) -> tuple[int, int]:
            with opened(links, engine, str(tmp_path)) as store:
                newest = store.committed.number if store.committed is not None else 0
                commit = CommitAgreement(links).restore_common_commit(store)
                number = commit.number if commit is not None else 0
                assert content_of(store)["a", "param"] == content_after(number, links.ranks.rank)
                for step in train(store, links.ranks.rank):
                    if step == number + 2:
                        break
                return number, newest

        found = run_ranks(3, go_on)
        engine.close()
        assert len({number for number, _ in found}) == 1
        assert all(newest - number in (0, 1) for number, newest in found)
        assert found[0][0] > numbers[-1], "the ranks had more commits"
        numbers.append(found[0][0] + 2)

"""Until all ranks have the next commit, the previous one survives any power cut, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from unittest.mock import patch

import pytest
from recorded_disk import PowerCut, RecordedDisk
from versioned_stores import MODEL, write_some
from versioned_stores import TWO_RECORDS as RECORDS

from hf_lohan.files import CapacityError, IoEngine, StorageError, StorePath
from hf_lohan.store import GRANULE_NUMEL, Commit, Store
from hf_lohan.store.commits import COMMIT_NAME, PREVIOUS_NAME
from hf_lohan.testing.stored_state import Content, aligned, content_of


@dataclass
class OtherRanks:
    """Ranks that confirm a commit as soon as this rank waits for them."""

    group_id: str = "run"
    keeps_previous: bool = True
    told: list[int] = field(default_factory=list)
    waited: list[int] = field(default_factory=list)
    on_wait: Callable[[int], None] = lambda number: None

    def announce_commit(self, number: int) -> None:
        self.told.append(number)

    def wait_for_commit(self, number: int) -> None:
        self.on_wait(number)
        self.waited.append(number)


@dataclass(frozen=True)
class State:
    number: int
    content: Content
    log: bytes
    model: str


class Run:
    """A store that commits together with other ranks. Among the calls of the disk it marks each state before its
    commit, the number of each finished commit, and the number of each commit that all ranks have. No rank goes back
    further than that.
    """

    def __init__(self, root: Path, engine: IoEngine, disk: RecordedDisk | None = None) -> None:
        self.paths = [StorePath(str(root / str(index)), 10**6) for index in range(2)]
        self.random, self.disk = Random(7), disk
        for path in self.paths:
            Path(path.path).mkdir(parents=True, exist_ok=True)
        self.store = Store.create(self.paths, RECORDS, model=MODEL, engine=engine, num_homes=2, stripe_bytes=8192)
        self.others = OtherRanks(on_wait=lambda number: self.mark(("all have", number)))
        self.store.agree_on_commits(self.others)
        self.states: dict[int, State] = {}
        self.mark(("all have", 0))

    def mark(self, mark: object) -> None:
        if self.disk is not None:
            self.disk.mark(mark)

    def write(self) -> None:
        write_some(self.store, self.random)

    def commit(self, *, keep_log: bool = True, model: str | None = None) -> None:
        number = 1 + (self.store.committed.number if self.store.committed is not None else 0)
        lines = f"{number}\n".encode()
        log = (self.store.log if keep_log else b"") + lines
        before = self.states[number - 1].model if number > 1 else ""
        state = State(number, content_of(self.store), log, before if model is None else model)
        self.states[number] = state
        self.mark(state)
        files = None if model is None else {"config.json": model.encode()}
        self.store.commit({}, {}, lines, keep_log=keep_log, model_files=files)
        self.mark(("is committed", number))

    def live(self) -> None:
        self.write()
        self.commit(model="first")
        for _ in range(2):
            self.write()
            self.write()
            self.commit()
        self.commit(keep_log=False)  # this commit has no new records
        self.write()
        self.commit(model="second")
        self.write()
        self.commit(model="third")
        self.write()


def check(store: Store, state: State) -> None:
    assert store.committed is not None and store.committed.number == state.number
    assert content_of(store) == state.content and store.log == state.log
    folder = store.model_folder
    assert folder is not None and (Path(folder) / "config.json").read_text() == state.model


def test_a_power_cut_keeps_every_commit_that_another_rank_may_have(ram_folder: Path, engine: IoEngine) -> None:
    with RecordedDisk(ram_folder / "disk") as disk:
        run = Run(ram_folder / "disk", engine, disk)
        run.live()
        run.store.close()
    assert run.others.told == [1, 2, 3, 4, 5, 6] and run.others.waited == [1, 2, 3, 4, 5, 6]
    cut, image, random = PowerCut(), ram_folder / "image", Random(3)
    for path in run.paths:
        cut.add_folder(Path(path.path).name)
    states: dict[int, State] = {}
    all_have, is_committed, num_with_two = -1, 0, 0
    for call in disk.calls:
        match call.mark:
            case State():
                states[call.mark.number] = call.mark
                continue
            case ("all have", number):
                all_have = number
                continue
            case ("is committed", number):
                is_committed = number
                continue
        cut.apply(call)
        if all_have < 0:
            continue
        cut.write_image(image, random)
        paths = [StorePath(str(image / Path(path.path).name), path.capacity_bytes) for path in run.paths]
        with Store.open(paths, model=MODEL, engine=engine) as store:
            kept = {commit.number: commit for commit in store.kept_commits}
            newest = max(kept, default=0)
            assert is_committed <= newest <= max(states, default=0)
            if newest:
                check(store, states[newest])
            num_with_two += len(kept) == 2
            if all_have:
                assert all_have in kept, "another rank may have no newer commit"
            if all_have or newest == 1:
                store.restore_commit(kept.get(all_have))
                if all_have:
                    check(store, states[all_have])
                else:
                    assert store.committed is None and not any(map(any, content_of(store).values()))
                store.write("a", "param", 0, aligned(RECORDS[0], GRANULE_NUMEL, run.random)).wait()
                store.commit({}, {}, b"after\n")
                assert store.committed is not None and store.committed.number == all_have + 1
                assert store.log == (states[all_have].log if all_have else b"") + b"after\n"
        shutil.rmtree(image)
    assert set(states) == {1, 2, 3, 4, 5, 6} and num_with_two > 20


def test_a_store_can_be_opened_at_the_previous_commit(ram_folder: Path, engine: IoEngine) -> None:
    run = Run(ram_folder, engine)
    run.write()
    run.commit(model="one")
    run.write()
    run.commit()
    run.store.restore_commit(run.store.kept_commits[1])
    check(run.store, run.states[1])
    run.store.close()
    with Store.open(run.paths, model=MODEL, engine=engine) as store:
        check(store, run.states[1])
        assert [commit.number for commit in store.kept_commits] == [1], "the dropped commit must not return"


def test_no_record_is_written_before_all_ranks_have_the_last_commit(ram_folder: Path, engine: IoEngine) -> None:
    run = Run(ram_folder, engine)
    run.write()
    run.commit(model="one")

    def failed(number: int) -> None:
        raise RuntimeError(f"rank 1 ended while rank 0 waited for commit {number}")

    run.others.on_wait = failed
    before = {path: path.read_bytes() for path in ram_folder.rglob("*.bin")}
    for write in (run.write, run.commit):
        with pytest.raises(RuntimeError, match="waited for commit 1"):
            write()
    assert {path: path.read_bytes() for path in ram_folder.rglob("*.bin")} == before
    check(run.store, run.states[1])
    run.others.on_wait = lambda number: None
    run.write()
    run.commit()
    check(run.store, run.states[2])
    run.store.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_a_failed_commit_leaves_the_earlier_ones(ram_folder: Path, engine: IoEngine, code: int) -> None:
    num_failed = 0
    for call in range(1, 100):
        root = ram_folder / str(call)
        with RecordedDisk(root) as disk:
            run = Run(root, engine, disk)
            for model in ("one", None):
                run.write()
                run.commit(model=model)
            run.write()
            disk.fail(call, code)
            try:
                run.commit()
            except (StorageError, CapacityError):
                num_failed += 1
            else:
                break
            assert run.others.told == [1, 2]
            run.store.restore_commit(run.store.committed)
            check(run.store, run.states[2])
            run.write()
            run.commit()
            assert run.others.told == [1, 2, 3]
            assert [commit.number for commit in run.store.kept_commits] == [3, 2]
            run.store.restore_commit(run.store.kept_commits[1])
            check(run.store, run.states[2])
            run.store.close()
        shutil.rmtree(root)
    # Two calls more than for a commit of one rank: the old name is removed and a new one is linked.
    assert num_failed == 4 + 4 + 6 + 2


def test_without_hard_links_the_previous_commit_is_copied(ram_folder: Path, engine: IoEngine) -> None:
    run = Run(ram_folder, engine)

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with patch.object(os, "link", refuse):
        for _ in range(3):
            run.write()
            run.commit(model="one")
    first = Path(run.paths[0].path)
    assert (first / PREVIOUS_NAME).stat().st_ino != (first / COMMIT_NAME).stat().st_ino
    run.store.restore_commit(run.store.kept_commits[1])
    check(run.store, run.states[2])
    run.store.close()


def test_a_store_of_one_rank_keeps_no_previous_commit(ram_folder: Path, engine: IoEngine) -> None:
    paths = [StorePath(str(ram_folder), 10**6)]
    with Store.create(paths, RECORDS, model=MODEL, engine=engine, num_homes=2) as store:
        for _ in range(2):
            store.commit()
        kept: list[Commit] = store.kept_commits
        assert [commit.number for commit in kept] == [2] and not (ram_folder / PREVIOUS_NAME).exists()

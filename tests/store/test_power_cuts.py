"""If the power is cut after any call that changes a file, the store has a committed state, bit for bit."""

from __future__ import annotations

import errno
import shutil
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from recorded_disk import PowerCut, RecordedDisk
from versioned_stores import MODEL, write_some
from versioned_stores import TWO_RECORDS as RECORDS

from hf_lohan.device import mapped_empty
from hf_lohan.files import CapacityError, IoEngine, StorageError, StorePath, TornStoreError
from hf_lohan.store import GRANULE_NUMEL, Store
from hf_lohan.testing.stored_state import Content, aligned, content_of


@dataclass(frozen=True)
class State:
    """The state of a commit, which may have failed. The facts of the commit contain `key`."""

    key: str
    content: Content
    log: bytes


@dataclass(frozen=True)
class Mark:
    """A state that later cuts may leave. If `is_sure`, its commit has returned, so later cuts leave no older state."""

    state: State
    is_sure: bool


class Run:
    """A store on a disk that records all calls. Each commit is marked among the calls."""

    def __init__(
        self, disk: RecordedDisk, engine: IoEngine, *, num_paths: int, num_homes: int, lives_in_ram: bool = False
    ) -> None:
        self.disk = disk
        self.paths = [StorePath(str(disk.root / str(i)), 10**6) for i in range(num_paths)]
        self.random = Random(num_paths)
        self.frozen = aligned(RECORDS[1], GRANULE_NUMEL, self.random)
        for path in self.paths:
            Path(path.path).mkdir(parents=True, exist_ok=True)
        self.store = Store.create(
            self.paths, RECORDS, model=MODEL, engine=engine, num_homes=num_homes, stripe_bytes=8192
        )
        self.lives_in_ram = lives_in_ram
        if lives_in_ram:
            self.store.ram.allocate_copies([(record.block, record.kind) for record in RECORDS], mapped_empty)
        disk.mark(Mark(State("", content_of(self.store), b""), is_sure=True))

    def write(self) -> None:
        """Write some versioned granules, and the frozen one with unchanged bytes."""
        if self.lives_in_ram:
            self.store.ram.keep_new(self.random.random() < 0.7)
        write_some(self.store, self.random)
        self.store.write("tail", "param", GRANULE_NUMEL, self.frozen).wait()

    def commit(self, key: str, *, keep_log: bool = True) -> None:
        lines = f"{key}\n".encode()
        state = State(key, content_of(self.store), (self.store.log if keep_log else b"") + lines)
        self.disk.mark(Mark(state, is_sure=False))
        self.store.commit({"key": key}, {"file": key.encode()}, lines, keep_log=keep_log)
        self.disk.mark(Mark(state, is_sure=True))

    def commit_fails(self, key: str) -> None:
        """Fail the last call of a commit. A power cut may then leave this commit or the previous one."""
        before = self.store.committed
        self.disk.fail(2, errno.EIO, after="rename")
        with pytest.raises(StorageError, match=r"cannot write .*commit\.safetensors"):
            self.commit(key)
        assert self.disk.calls[-1].name == "rename" and self.store.committed is before

    def write_and_commit_often(self) -> None:
        for key in ("1", "2", "3"):
            self.write()
            self.commit(key)
        self.write()
        self.write()
        self.commit("4", keep_log=False)
        self.commit_fails("5")
        self.write()
        self.commit("6")
        self.store.clear_records()
        self.write()
        self.commit("7")
        self.write()

    def step_back(self) -> None:
        """Drop drafts, which needs two homes."""
        self.store.drop_drafts()
        self.write()
        self.commit("8")
        self.write()
        self.commit_fails("9")
        self.store.drop_drafts()
        self.write()
        self.write()
        self.commit("10", keep_log=False)
        self.store.clear_records()
        self.write()
        self.store.drop_drafts()
        self.write()


def cut_after_each_call(run: Run, image: Path, engine: IoEngine, random: Random) -> set[str]:
    """Check the store after each cut. Return the keys of the commits that the cuts left, and "torn" for torn stores."""
    cut = PowerCut()
    allowed: dict[str, State] = {}
    keys = set()
    for path in run.paths:  # the test made these folders
        cut.add_folder(Path(path.path).name)
    for call in run.disk.calls:
        if call.name == "mark":
            if call.mark.is_sure:
                allowed.clear()
            allowed[call.mark.state.key] = call.mark.state
            continue
        cut.apply(call)
        if allowed:  # the store exists
            cut.write_image(image, random)
            keys.add(found_in(image, run, engine, allowed))
            shutil.rmtree(image)
    return keys


def found_in(image: Path, run: Run, engine: IoEngine, allowed: dict[str, State]) -> str:
    paths = [StorePath(str(image / Path(path.path).name), path.capacity_bytes) for path in run.paths]
    try:
        store = Store.open(paths, model=MODEL, engine=engine)
    except TornStoreError:
        assert run.store.num_homes == 1
        return "torn"
    with store:
        committed = store.committed
        key = committed.facts["key"] if committed is not None else ""
        assert key in allowed
        assert content_of(store) == allowed[key].content and store.log == allowed[key].log
        assert committed is None or committed.journal == {"file": key.encode()}
        # The store can be written and committed again.
        store.write("a", "param", 0, aligned(RECORDS[0], GRANULE_NUMEL, run.random)).wait()
        if run.store.num_homes == 2:
            store.drop_drafts()
            assert content_of(store) == allowed[key].content
        store.commit({"key": "after"}, {}, b"after\n")
        assert store.log == allowed[key].log + b"after\n"
    return key


@pytest.mark.covering(0)
@pytest.mark.parametrize("lives_in_ram", [False, True])
@pytest.mark.parametrize("num_paths", [1, 2, 3])
def test_a_power_cut_with_two_homes_leaves_a_complete_state(
    ram_folder: Path, engine: IoEngine, num_paths: int, lives_in_ram: bool
) -> None:
    with RecordedDisk(ram_folder / "disk") as disk:
        run = Run(disk, engine, num_paths=num_paths, num_homes=2, lives_in_ram=lives_in_ram)
        run.write_and_commit_often()
        run.step_back()
        run.store.close()
    keys = cut_after_each_call(run, ram_folder / "image", engine, Random(num_paths))
    assert keys >= {"", "1", "2", "3", "4", "6", "7", "8", "10"}  # commits 5 and 9 failed, so they may be missing


@pytest.mark.parametrize("num_paths", [1, 2])
def test_a_power_cut_with_one_home_leaves_a_complete_or_torn_state(
    ram_folder: Path, engine: IoEngine, num_paths: int
) -> None:
    with RecordedDisk(ram_folder / "disk") as disk:
        run = Run(disk, engine, num_paths=num_paths, num_homes=1)
        run.write_and_commit_often()
        run.store.close()
    keys = cut_after_each_call(run, ram_folder / "image", engine, Random(num_paths))
    assert keys >= {"", "torn", "1", "2", "3", "4", "6", "7"}


def test_a_store_can_be_created_after_a_power_cut_during_its_creation(ram_folder: Path, engine: IoEngine) -> None:
    with RecordedDisk(ram_folder / "disk") as disk:
        for key in ("1", "2"):  # the second run replaces the store of the first
            run = Run(disk, engine, num_paths=2, num_homes=2)
            run.write()
            run.commit(key)
            run.store.close()
    keys = set()
    for seed in range(3):
        image, random, cut = ram_folder / "image", Random(seed), PowerCut()
        for path in run.paths:
            cut.add_folder(Path(path.path).name)
        for call in disk.calls:
            cut.apply(call)
            cut.write_image(image, random)
            paths = [StorePath(str(image / Path(path.path).name), path.capacity_bytes) for path in run.paths]
            with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine) as store:
                keys.add(store.committed.facts["key"] if store.committed is not None else "")
                assert any(map(any, content_of(store).values())) == (store.committed is not None)
            shutil.rmtree(image)
    assert keys == {"", "1", "2"}


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
@pytest.mark.parametrize("retries", [True, False])
def test_a_failed_commit_can_be_repeated(ram_folder: Path, engine: IoEngine, code: int, retries: bool) -> None:
    num_failed = 0
    for call in range(1, 100):
        root = ram_folder / str(call)
        with RecordedDisk(root) as disk:
            run = Run(disk, engine, num_paths=2, num_homes=2)
            run.write()
            run.commit("1")
            before = content_of(run.store)
            run.write()
            draft = content_of(run.store)
            disk.fail(call, code)
            try:
                run.commit("2")
            except (StorageError, CapacityError) as error:
                num_failed += 1
                _is_named(error, code)
            else:
                break
            assert run.store.committed is not None and run.store.committed.facts == {"key": "1"}
            assert run.store.log == b"1\n" and run.store.has_drafts and content_of(run.store) == draft
            if not retries:
                run.store.drop_drafts()
                assert content_of(run.store) == before
                run.write()
                draft = content_of(run.store)
            run.commit("2, again")
            run.store.close()
        with Store.open(run.paths, model=MODEL, engine=engine) as store:
            assert content_of(store) == draft and store.log == b"1\n2, again\n"
        shutil.rmtree(root)
    # Four data files are synced. The log is opened, cut, written and synced. The commit is opened, written, synced and
    # renamed, and its directory is opened and synced.
    assert num_failed == 4 + 4 + 6


def _is_named(error: Exception, code: int) -> None:
    name = r"(records-[01]\.bin|log\.jsonl|commit\.safetensors)"
    if code == errno.ENOSPC:
        with pytest.raises(CapacityError, match=rf"/{name} needs [\d,]+ bytes.* but its free space .* is [\d,]+ bytes"):
            raise error
    else:
        with pytest.raises(StorageError, match=rf"cannot (sync|write) .*/{name} \(Input/output error\): "):
            raise error


def test_no_record_is_written_if_the_torn_mark_fails(ram_folder: Path, engine: IoEngine) -> None:
    with RecordedDisk(ram_folder / "disk") as disk:
        run = Run(disk, engine, num_paths=1, num_homes=1)
        run.write()
        run.commit("1")
        before = content_of(run.store)
        for call in range(1, 7):
            disk.fail(call, errno.EIO)
            with pytest.raises(StorageError, match=r"cannot write .*commit\.safetensors"):
                run.write()
            assert content_of(run.store) == before and not run.store.has_drafts
            run.store.drop_drafts()
        run.store.write("tail", "param", GRANULE_NUMEL, run.frozen).wait()  # unchanged bytes remove the mark
        run.store.close()
    with Store.open(run.paths, model=MODEL, engine=engine) as store:
        assert content_of(store) == before

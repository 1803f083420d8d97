"""A store as a database: random transactions against a model of it in memory."""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from hf_lohan.device import mapped_empty
from hf_lohan.storage import (
    GRANULE_NUMEL,
    ForeignStoreError,
    IoEngine,
    ModelIdentity,
    RecordSpec,
    StorageError,
    Store,
    StorePath,
    TornStoreError,
    last_commit,
)
from hf_lohan.storage.commit import read_commit, write_commit
from hf_lohan.storage.last_commit import committed_log
from hf_lohan.testing.stored_state import Content, aligned, content_of, zeros

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
RECORDS = (
    RecordSpec("a", "param", "bfloat16", 3 * GRANULE_NUMEL - 2048),
    RecordSpec("a", "exp_avg", "float32", 2 * GRANULE_NUMEL),
    RecordSpec("tail", "param", "bfloat16", 3 * GRANULE_NUMEL + 4096, versioned_numel=2 * GRANULE_NUMEL),
    RecordSpec("frozen", "param", "float32", GRANULE_NUMEL + 2048, versioned_numel=0),
    RecordSpec("tiny", "master_residual", "int16", 2048),
    RecordSpec("a", "moment_scales", "float32", 3 * GRANULE_NUMEL // 16),
)
CHECKPOINT = "out/checkpoint-7"


@dataclass
class State:
    """What a store would hold. ``written`` has the granules that are more than virtual zeros."""

    content: Content = field(default_factory=lambda: zeros(RECORDS))
    written: set[tuple[str, str, int]] = field(default_factory=set)
    journal: dict[str, bytes] = field(default_factory=dict)
    log: bytes = b""
    number: int = 0

    def copy(self) -> State:
        return State(dict(self.content), set(self.written), dict(self.journal), self.log, self.number)

    def granule(self, record: RecordSpec, granule: int) -> bytes:
        size = record.granule_numel * record.itemsize
        return self.content[record.block, record.kind][granule * size : (granule + 1) * size]


class Transactions(RuleBasedStateMachine):
    """Everything a run does to its store, in any order."""

    @initialize(
        num_homes=st.sampled_from([1, 2]),
        num_paths=st.integers(1, 3),
        stripe_bytes=st.sampled_from([8192, 20480, 4 << 20]),
        seed=st.integers(0, 1 << 30),
    )
    def begin(self, num_homes: int, num_paths: int, stripe_bytes: int, seed: int) -> None:
        self.random = Random(seed)
        self.root = Path(tempfile.mkdtemp())
        self.paths = [StorePath(str(self.root / str(i)), (i + 1) * 10**6) for i in range(num_paths)]
        self.engine = IoEngine(2, 65536, 1 << 20)
        self.num_homes = num_homes
        self.store = Store.create(
            self.paths, RECORDS, model=MODEL, engine=self.engine, num_homes=num_homes, stripe_bytes=stripe_bytes
        )
        self.live, self.committed = State(), State()
        self.is_torn = False

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            self.engine.close()
            shutil.rmtree(self.root)

    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        record, start, stop = self._granules(data)
        values = aligned(record, stop - start, self.random)
        self.store.write(record.block, record.kind, start, values).wait()
        self._note(record, start, values)

    @rule(data=st.data())
    def write_unaligned(self, data: st.DataObject) -> None:
        record, start, stop = self._range(data)
        values = aligned(record, stop - start + 1, self.random)[1:]
        bounce = mapped_empty(data.draw(st.sampled_from([65536, 100000, 300000])))
        self.store.write_unaligned(record.block, record.kind, start, values, bounce)
        self._note(record, start, values)

    @rule(data=st.data())
    def write_the_same_again(self, data: st.DataObject) -> None:
        record, start, stop = self._granules(data)
        values = aligned(record, stop - start)
        self.store.read(record.block, record.kind, start, values).wait()
        self.store.write(record.block, record.kind, start, values).wait()
        self._note(record, start, values)

    @rule(data=st.data())
    def read_unaligned(self, data: st.DataObject) -> None:
        record, start, stop = self._range(data)
        out = aligned(record, stop - start + 1)[1:]
        self.store.read_unaligned(record.block, record.kind, start, out, mapped_empty(65536))
        expected = self.live.content[record.block, record.kind][start * record.itemsize : stop * record.itemsize]
        assert out.view(torch.uint8).numpy().tobytes() == expected

    @rule(lines=st.binary(max_size=20), keep_log=st.booleans(), journal=st.binary(max_size=9))
    def commit(self, lines: bytes, keep_log: bool, journal: bytes) -> None:
        self.live.journal = {"file": journal}
        self.live.log = (self.committed.log if keep_log else b"") + lines
        self.live.number = self.committed.number + 1
        self.store.commit({"last_checkpoint": CHECKPOINT}, {"file": journal}, lines, keep_log=keep_log)
        self.committed, self.is_torn = self.live.copy(), False
        assert not self.store.has_drafts

    @rule()
    def drop(self) -> None:
        if self.is_torn:
            with pytest.raises(TornStoreError, match="have been overwritten since; resume from a checkpoint"):
                self.store.drop()
        else:
            self.store.drop()
            self.live = self.committed.copy()

    @rule()
    def begin_anew(self) -> None:
        self.store.begin_anew()
        self.live.content, self.live.written = zeros(RECORDS), set()
        for record in RECORDS if not self.is_torn else ():
            size = record.granule_numel * record.itemsize
            first_frozen = -(-record.versioned_numel // record.granule_numel)  # the last trained granule may be short
            frozen = range(first_frozen, -(-record.numel // record.granule_numel))
            for granule in frozen:  # what is frozen stays
                if (record.block, record.kind, granule) in self.committed.written:
                    key, start = (record.block, record.kind), granule * size
                    content = bytearray(self.live.content[key])
                    content[start : start + size] = self.committed.granule(record, granule)
                    self.live.content[key] = bytes(content)
                    self.live.written.add((*key, granule))

    @rule(in_reverse=st.booleans())
    def close_and_reopen(self, in_reverse: bool) -> None:
        self.store.close()
        found = last_commit([path.path for path in self.paths])
        assert (found.number if found is not None else 0) == self.committed.number
        paths = self.paths[::-1] if in_reverse else self.paths
        if self.is_torn:
            assert found is not None and found.is_torn and found.facts == {"last_checkpoint": CHECKPOINT}
            with pytest.raises(TornStoreError, match=rf"no whole state: resume from {CHECKPOINT}"):
                Store.open(paths, model=MODEL, engine=self.engine)
            self._reopen_torn(paths)
            return
        self.store = Store.open(paths, model=MODEL, engine=self.engine)
        self.live = self.committed.copy()
        assert not self.store.has_drafts and self.store.paths == tuple(self.paths)
        assert self.store.log == self.committed.log == committed_log([path.path for path in paths])

    def _reopen_torn(self, paths: list[StorePath]) -> None:
        self.store = Store.open(paths, model=MODEL, engine=self.engine, allow_torn=True)
        with pytest.raises(TornStoreError):
            self.store.drop()
        with pytest.raises(StorageError, match="was not written whole"):
            self.store.commit()
        self.committed.log, self.committed.journal = b"", {}
        self.store.begin_anew()
        self.live = State()

    @invariant()
    def everything_reads_as_it_should(self) -> None:
        if not hasattr(self, "store"):
            return
        assert content_of(self.store) == self.live.content
        committed = self.store.committed
        assert (committed is None) == (self.committed.number == 0)
        assert self.store.log == self.committed.log
        if committed is not None:
            assert committed.number == self.committed.number and committed.journal == self.committed.journal

    def _note(self, record: RecordSpec, start: int, values: torch.Tensor) -> None:
        if not values.numel():
            return
        name = (record.block, record.kind)
        content = bytearray(self.live.content[name])
        start_byte = start * record.itemsize
        changed = values.contiguous().view(torch.uint8).numpy().tobytes()
        content[start_byte : start_byte + len(changed)] = changed
        self.live.content[name] = bytes(content)
        for granule in range(start // record.granule_numel, -(-(start + values.numel()) // record.granule_numel)):
            self.live.written.add((*name, granule))
            is_versioned = self.num_homes == 2 and granule * record.granule_numel < record.versioned_numel
            if (*name, granule) in self.committed.written and not is_versioned:
                self.is_torn |= self.live.granule(record, granule) != self.committed.granule(record, granule)

    def _range(self, data: st.DataObject) -> tuple[RecordSpec, int, int]:
        record = data.draw(st.sampled_from(RECORDS))
        start = data.draw(st.integers(0, record.numel))
        return record, start, data.draw(st.integers(start, record.numel))

    def _granules(self, data: st.DataObject) -> tuple[RecordSpec, int, int]:
        record = data.draw(st.sampled_from(RECORDS))
        num_granules = -(-record.numel // record.granule_numel)
        first = data.draw(st.integers(0, num_granules - 1))
        stop = data.draw(st.integers(first + 1, num_granules))
        return record, first * record.granule_numel, min(stop * record.granule_numel, record.numel)


TestTransactions: Any = Transactions.TestCase
TestTransactions.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


def fill(store: Store, records: tuple[RecordSpec, ...], random: Random) -> None:
    for record in records:
        store.write(record.block, record.kind, 0, aligned(record, record.numel, random)).wait()


def new_store(root: Path, engine: IoEngine, num_homes: int, records: tuple[RecordSpec, ...] = RECORDS) -> Store:
    paths = [StorePath(str(root / "a"), 10**7), StorePath(str(root / "b"), 10**7)]
    return Store.create(paths, records, model=MODEL, engine=engine, num_homes=num_homes, stripe_bytes=8192)


def test_frozen_records_loaded_again_do_not_harm_the_commit(tmp_path: Path, engine: IoEngine) -> None:
    frozen = (RECORDS[3],)
    with new_store(tmp_path, engine, 2) as store:
        fill(store, RECORDS, Random(1))
        store.commit()
        before = content_of(store)
        store.begin_anew()
        store.write("frozen", "param", 0, _tensor(before["frozen", "param"], RECORDS[3])).wait()
        store.drop()
        assert content_of(store) == before
        fill(store, frozen, Random(2))
        with pytest.raises(TornStoreError):
            store.drop()
        paths = store.paths
    with pytest.raises(TornStoreError, match="resume from a checkpoint"):
        Store.open(paths, model=MODEL, engine=engine)


def test_nothing_versioned_needs_no_second_room(tmp_path: Path, engine: IoEngine) -> None:
    frozen = (RECORDS[3],)
    with new_store(tmp_path, engine, 2, frozen) as store:
        assert store.size_bytes == frozen[0].num_bytes and store.num_homes == 2
        fill(store, frozen, Random(1))
        store.commit()
        before, paths = content_of(store), store.paths
    assert [(Path(path.path) / "records-1.bin").stat().st_size for path in paths] == [0, 0]
    with Store.open(paths, model=MODEL, engine=engine) as store:
        assert content_of(store) == before


def test_two_homes_take_the_versioned_part_twice(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 2) as store:
        twice = sum(record.versioned_numel * record.itemsize for record in RECORDS)
        assert store.size_bytes == sum(record.num_bytes for record in RECORDS) + twice
        on_disk = [file for path in store.paths for file in Path(path.path).glob("records-*.bin")]
        assert sum(file.stat().st_size for file in on_disk) == store.size_bytes


def test_extents_hold_the_bytes_that_are_read(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 2) as store:
        assert store.extents("a", "param") is None
        for seed in (1, 2):
            fill(store, RECORDS, Random(seed))
            store.commit()
        store.write("a", "param", 0, aligned(RECORDS[0], GRANULE_NUMEL, Random(3))).wait()  # a draft
        store.sync()
        content = content_of(store)
        for name in (("a", "param"), ("tail", "param"), ("frozen", "param")):
            extents = store.extents(*name)
            assert extents is not None
            parts = []
            for path, extent in extents:
                with open(path, "rb") as file:
                    file.seek(extent.file_offset)
                    parts.append(file.read(extent.num_bytes))
            assert b"".join(parts) == content[name]
        store.begin_anew()
        assert store.extents("a", "param") is None


def test_a_torn_store_is_whole_after_the_next_commit(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 1) as store:
        fill(store, RECORDS, Random(1))
        store.commit({"last_checkpoint": CHECKPOINT}, {"file": b"1"}, b"line\n")
        fill(store, RECORDS[:1], Random(2))
        assert store.committed is not None and store.committed.journal == {"file": b"1"} and store.log == b"line\n"
        marked = last_commit([path.path for path in store.paths])
        assert marked is not None and marked.is_torn
        store.commit({}, {}, b"more\n")
        assert store.log == b"line\nmore\n"
        after, paths = content_of(store), store.paths
    with Store.open(paths, model=MODEL, engine=engine) as store:
        assert content_of(store) == after


def test_parts_of_two_stores_are_not_mixed(tmp_path: Path, engine: IoEngine) -> None:
    for name in ("one", "two"):
        with new_store(tmp_path / name, engine, 2) as store:
            fill(store, RECORDS, Random(name))
            store.commit()
    mine, theirs = ([StorePath(str(tmp_path / name / part)) for part in "ab"] for name in ("one", "two"))
    with pytest.raises(ForeignStoreError, match="parts of different stores"):
        Store.open([mine[0], theirs[1]], model=MODEL, engine=engine)
    shutil.copy(Path(theirs[0].path) / "commit.safetensors", mine[0].path)
    for look in (lambda: Store.open(mine, model=MODEL, engine=engine), lambda: last_commit([p.path for p in mine])):
        with pytest.raises(ForeignStoreError, match="belongs to another store than its manifest"):
            look()


def test_a_commit_that_does_not_fit_its_manifest_is_refused(tmp_path: Path, engine: IoEngine) -> None:
    with new_store(tmp_path, engine, 1) as store:
        store.commit()
        paths = store.paths
    commit = read_commit(paths[0].path)
    assert commit is not None
    commit.home[0] = 1
    write_commit(commit, paths[0].path)
    with pytest.raises(ForeignStoreError, match=r"does not fit its manifest .*homes that do not exist"):
        Store.open(paths, model=MODEL, engine=engine)


def test_a_store_that_is_half_made_is_made_again_but_never_one_with_a_commit(tmp_path: Path, engine: IoEngine) -> None:
    new_store(tmp_path, engine, 2).close()
    paths = [StorePath(str(tmp_path / part), 10**7) for part in "ab"]
    (tmp_path / "b" / "manifest.json").unlink()
    with pytest.raises(StorageError, match=r"there is no store in .*/b"):
        Store.open(paths, model=MODEL, engine=engine)
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine) as store:
        fill(store, RECORDS, Random(1))
        store.commit()
    (tmp_path / "b" / "manifest.json").rename(tmp_path / "b" / "away")
    with pytest.raises(StorageError, match=r"there is no store in .*/b"):
        Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine)
    (tmp_path / "b" / "away").rename(tmp_path / "b" / "manifest.json")
    other = StorePath(str(tmp_path / "c"), 10**7)
    with pytest.raises(StorageError, match=r"there is no store in .*/c"):  # the commit is in a
        Store.open_or_create([paths[1], other], RECORDS, model=MODEL, engine=engine)


@pytest.mark.parametrize(("durability", "num_homes"), [("auto", 2), ("step", 2), ("checkpoint", 1)])
def test_durability_decides_the_homes_and_stays(
    tmp_path: Path, engine: IoEngine, durability: Any, num_homes: int
) -> None:
    paths = [StorePath(str(tmp_path), 10**7)]
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability=durability) as store:
        assert store.num_homes == num_homes
    with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine) as store:
        assert store.num_homes == num_homes
    other: Any = "step" if num_homes == 1 else "checkpoint"
    with pytest.raises(ForeignStoreError, match=f"not '{other}': keep that setting"):
        Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, durability=other)


def test_auto_takes_one_home_where_two_do_not_fit_beside_the_scratch(tmp_path: Path, engine: IoEngine) -> None:
    once = sum(record.num_bytes for record in RECORDS)
    twice = once + sum(record.versioned_numel * record.itemsize for record in RECORDS)
    scratch = (RecordSpec("a", "gradient", "float32", 2048),)
    for extra_bytes, num_homes in ((-1, 1), (0, 2)):
        paths = [StorePath(str(tmp_path / str(num_homes)), twice + 8192 + extra_bytes)]
        with Store.open_or_create(paths, RECORDS, model=MODEL, engine=engine, scratch=scratch) as store:
            assert store.num_homes == num_homes
            store.scratch(scratch)


def _tensor(content: bytes, record: RecordSpec) -> torch.Tensor:
    out = aligned(record, record.numel)
    out.view(torch.uint8).copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
    return out

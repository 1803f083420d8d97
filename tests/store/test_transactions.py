"""Random transactions on a store equal those on a model in memory."""

from __future__ import annotations

import os
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
from versioned_stores import CHECKPOINT, MODEL, RECORDS

from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, StorageError, StorePath, TornStoreError
from hf_lohan.store import RecordSpec, Store, committed_log, last_commit
from hf_lohan.testing.stored_state import Content, aligned, content_of, zeros


@dataclass
class State:
    """The expected content of a store. `written` has all granules that were ever written."""

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
    """All operations of a run on its store, in random order."""

    @initialize(
        num_homes=st.sampled_from([1, 2]),
        num_paths=st.integers(1, 3),
        stripe_bytes=st.sampled_from([8192, 20480, 4 << 20]),
        seed=st.integers(0, 1 << 30),
    )
    def begin(self, num_homes: int, num_paths: int, stripe_bytes: int, seed: int) -> None:
        self.random = Random(seed)
        # In RAM where there is any: thousands of syncs would wait for a busy drive.
        self.root = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None))
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
            with pytest.raises(TornStoreError, match=r"has been overwritten, .*resume from a checkpoint"):
                self.store.drop_drafts()
        else:
            self.store.drop_drafts()
            self.live = self.committed.copy()

    @rule()
    def begin_anew(self) -> None:
        self.store.clear_records()
        self.live.content, self.live.written = zeros(RECORDS), set()
        for record in RECORDS if not self.is_torn else ():
            size = record.granule_numel * record.itemsize
            first_frozen = -(-record.versioned_numel // record.granule_numel)  # the last trained granule may be short
            frozen = range(first_frozen, -(-record.numel // record.granule_numel))
            for granule in frozen:  # frozen granules keep their values
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
            with pytest.raises(TornStoreError, match=rf"its state is incomplete; resume from {CHECKPOINT}"):
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
            self.store.drop_drafts()
        with pytest.raises(StorageError, match="is incomplete from element"):
            self.store.commit()
        self.committed.log, self.committed.journal = b"", {}
        self.store.clear_records()
        self.live = State()

    @invariant()
    def everything_reads_as_expected(self) -> None:
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

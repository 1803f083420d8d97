"""Whatever happens to it, in any order and in several threads, a resident store reads as the store below it."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from resident_stores import ALL, FROZEN, RECORDS, WEIGHT, is_all, open_store, values
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import TornStoreError
from hf_lohan.store import GRANULE_NUMEL, RecordSpec, Store
from hf_lohan.testing.storage_doubles import GatedBackend


class Gate:
    """Holds up all I/O of a store while it is shut; opened at the end of the block at the latest."""

    def __init__(self) -> None:
        self.backend = GatedBackend()
        self.backend.gate.set()

    @contextmanager
    def shut(self) -> Iterator[Callable[[], None]]:
        self.backend.gate.clear()
        try:
            yield self.backend.gate.set
        finally:
            self.backend.gate.set()


def test_a_read_during_a_write_sees_what_is_being_written(tmp_path: Path) -> None:
    gate = Gate()
    with open_store(tmp_path, backend=gate.backend) as (store, engine):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        with gate.shut():
            source = values(WEIGHT, fill=2)
            writing = store.write(*ALL, source)
            assert is_all(store, 2)
            assert not writing.done()
        writing.wait()
        assert is_all(store, 2) and engine.read_bytes == 0


def read_aligned(store: Store, out: Tensor) -> None:
    store.read(*ALL, out).wait()


def read_unaligned(store: Store, out: Tensor) -> None:
    store.read_unaligned(*ALL, out, mapped_empty(out.nbytes))


@pytest.mark.parametrize("read", [read_aligned, read_unaligned])
def test_a_read_of_more_than_is_being_written_waits_for_it(
    read: Callable[[Store, Tensor], None], tmp_path: Path
) -> None:
    gate = Gate()
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path, backend=gate.backend) as (store, _), ThreadPoolExecutor(1) as other:
        with gate.shut() as open_gate:
            writing = store.write(*ALL, values(WEIGHT, GRANULE_NUMEL, fill=2))
            out = values(WEIGHT)
            reading = other.submit(read, store, out)
            gate.backend.arrived.acquire()  # the write's; a read that did not wait would come beside it
            assert not gate.backend.arrived.acquire(timeout=0.05)
            open_gate()
        reading.result()
        writing.wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()


CHUNKS = [
    (record, start, min(start + GRANULE_NUMEL, record.numel))
    for record in RECORDS
    for start in range(0, record.numel, GRANULE_NUMEL)
]
OPERATIONS = ("write", "write", "write_unaligned", "read", "read", "read_unaligned", "commit", "drop", "begin_anew")


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.sampled_from([1, 2]),
    st.lists(st.sampled_from(OPERATIONS), min_size=1, max_size=25),
    st.sets(st.sampled_from(RECORDS), min_size=1),
)
def test_it_reads_as_the_store_does(
    seed: int, num_homes: int, operations: list[str], resident: set[RecordSpec]
) -> None:
    random = Random(seed)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_store(Path(folder), num_homes=num_homes, resident=tuple(resident)) as (store, _),
    ):
        for operation in operations:
            act(store, operation, random)
        assert_same_as_below(store)


def act(store: Store, operation: str, random: Random) -> None:
    record, start, stop = random.choice(CHUNKS)
    source = values(record, stop - start, fill=random.randrange(100))
    bounce = mapped_empty(4 * GRANULE_NUMEL)
    match operation:
        case "write":
            store.write(record.block, record.kind, start, source).wait()
        case "write_unaligned":
            first = random.randrange(start, stop)
            store.write_unaligned(record.block, record.kind, first, source[: record.numel - first], bounce)
        case "read":
            assert_same_as_below(store, record, start, stop)
        case "read_unaligned":
            out, below = (torch.empty(stop - start, dtype=source.dtype) for _ in range(2))
            first = random.randrange(0, record.numel - out.numel() + 1)
            store.read_unaligned(record.block, record.kind, first, out, bounce)
            Store.read_unaligned(store, record.block, record.kind, first, below, bounce)
            assert torch.equal(out, below)
        case "commit":
            store.commit()
        case "drop":
            with suppress(TornStoreError):  # with one home, or for frozen weights, which have only one
                store.drop()
        case "begin_anew":
            store.begin_anew()


def assert_same_as_below(
    store: Store, record: RecordSpec | None = None, start: int = 0, stop: int | None = None
) -> None:
    for one in [record] if record is not None else RECORDS:
        out, below = (values(one, (stop or one.numel) - start) for _ in range(2))
        store.read(one.block, one.kind, start, out).wait()
        Store.read(store, one.block, one.kind, start, below).wait()
        assert torch.equal(out.view(torch.uint8), below.view(torch.uint8)), (one, start)


def test_threads_that_use_different_parts_do_not_disturb_each_other(tmp_path: Path) -> None:
    """As the prefetcher and the pipeline do: rounds of writes and reads, with commits and drops between them."""
    num_rounds, own = 30, len(CHUNKS) // 2
    failures: list[BaseException] = []
    with open_store(tmp_path) as (store, _):
        random = Random(0)

        def between_rounds() -> None:
            random.choice((store.commit, store.drop))()

        meet = threading.Barrier(2, action=between_rounds)

        def work(chunks: list[tuple[RecordSpec, int, int]], seed: int) -> None:
            try:
                mine = Random(seed)
                for _ in range(num_rounds):
                    for record, start, stop in mine.sample(chunks, k=len(chunks)):
                        if mine.random() < 0.5:
                            source = values(record, stop - start, fill=mine.randrange(100))
                            store.write(record.block, record.kind, start, source).wait()
                        assert_same_as_below(store, record, start, stop)
                    meet.wait(60)
            except BaseException as error:
                failures.append(error)
                meet.abort()

        threads = [
            threading.Thread(target=work, args=(chunks, seed))
            for seed, chunks in enumerate((CHUNKS[:own], [c for c in CHUNKS[own:] if c[0] is not FROZEN]))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not failures, failures

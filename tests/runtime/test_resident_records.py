"""Records with a copy in RAM: they read as the store does, whatever becomes of it, and do not read the SSD."""

from __future__ import annotations

import errno
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
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.runtime.resident_records import ResidentStore
from hf_lohan.storage import (
    GRANULE_NUMEL,
    CorruptionError,
    FileBackend,
    IoEngine,
    ModelIdentity,
    RecordSpec,
    StorageError,
    Store,
    StorePath,
    TornStoreError,
)
from hf_lohan.testing.storage_doubles import FaultyBackend, FlippingBackend, GatedBackend

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
WEIGHT = RecordSpec("layer", "param", "bfloat16", 3 * GRANULE_NUMEL + 2048)
MOMENT = RecordSpec("layer", "exp_avg", "float32", 2 * GRANULE_NUMEL)
FROZEN = RecordSpec("frozen", "param", "float32", GRANULE_NUMEL + 4096, versioned_numel=0)
RECORDS = (WEIGHT, MOMENT, FROZEN)

Place = tuple[str, str, int]
ALL: Place = ("layer", "param", 0)


def values(record: RecordSpec, numel: int | None = None, *, fill: float | None = None) -> Tensor:
    """Aligned memory [numel] of a record's dtype, `fill` or NaN all over."""
    memory = mapped_empty((numel or record.numel) * record.itemsize).view(getattr(torch, record.dtype))
    return memory.fill_(torch.nan if fill is None else fill)


@contextmanager
def open_store(
    folder: Path,
    *,
    num_homes: int = 2,
    resident: tuple[RecordSpec, ...] = RECORDS,
    backend: FileBackend | None = None,
) -> Iterator[tuple[ResidentStore, IoEngine]]:
    """A store in `folder`, new or as it was left."""
    engine = IoEngine(2, 1 << 20, 1 << 24, backend)
    try:
        store = ResidentStore.open_or_create(
            [StorePath(str(folder), 1 << 26)],
            RECORDS,
            model=MODEL,
            engine=engine,
            durability="step" if num_homes == 2 else "checkpoint",
        )
        assert isinstance(store, ResidentStore)
        with store:
            store.keep_copies([(record.block, record.kind) for record in resident], mapped_empty)
            yield store, engine
    finally:
        engine.close()


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[tuple[ResidentStore, IoEngine]]:
    with open_store(tmp_path) as both:
        yield both


def is_all(store: Store, value: float, *, record: RecordSpec = WEIGHT) -> bool:
    out = values(record)
    store.read(record.block, record.kind, 0, out).wait()
    return bool((out == value).all())


def test_what_was_written_is_not_read_from_the_ssd(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, engine = opened
    store.write(*ALL, values(WEIGHT, fill=3)).wait()
    for _ in range(2):
        assert is_all(store, 3)
    assert engine.read_bytes == 0
    assert store.resident_read_bytes == 2 * WEIGHT.num_bytes
    assert engine.write_bytes == WEIGHT.num_bytes


def test_what_was_read_once_is_not_read_again(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=3)).wait()
        store.commit()
    with open_store(tmp_path) as (store, engine):
        for _ in range(3):
            assert is_all(store, 3)
        assert engine.read_bytes == WEIGHT.num_bytes


def test_what_has_no_copy_is_read_from_the_ssd(tmp_path: Path) -> None:
    with open_store(tmp_path, resident=(MOMENT,)) as (store, engine):
        store.write(*ALL, values(WEIGHT, fill=3)).wait()
        assert is_all(store, 3) and is_all(store, 3)
        assert engine.read_bytes == 2 * WEIGHT.num_bytes


def test_memory_is_taken_once_and_is_as_large_as_the_records(tmp_path: Path) -> None:
    taken: list[int] = []

    def host_empty(num_bytes: int) -> Tensor:
        taken.append(num_bytes)
        return mapped_empty(num_bytes)

    with open_store(tmp_path, resident=()) as (store, _):
        store.keep_copies([], host_empty)
        assert taken == []
        store.keep_copies([("layer", "param"), ("layer", "exp_avg")], host_empty)
        assert taken == [WEIGHT.num_bytes + MOMENT.num_bytes]
        for record, value in ((WEIGHT, 2), (MOMENT, 4)):  # side by side, not one over the other
            store.write(record.block, record.kind, 0, values(record, fill=value)).wait()
        assert is_all(store, 2) and is_all(store, 4, record=MOMENT)


def test_a_drop_brings_back_the_commit(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, engine = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.write("layer", "exp_avg", 0, values(MOMENT, fill=5)).wait()
    store.commit()
    store.write(*ALL, values(WEIGHT, fill=2)).wait()
    assert is_all(store, 2)
    store.drop()
    assert is_all(store, 1) and is_all(store, 1)
    assert engine.read_bytes == WEIGHT.num_bytes
    assert is_all(store, 5, record=MOMENT)  # not written since the commit: still held
    assert engine.read_bytes == WEIGHT.num_bytes


def test_a_read_that_a_drop_overtakes_is_not_held(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.commit()
    bounce = values(WEIGHT).view(torch.uint8)
    store.write_unaligned(*ALL, values(WEIGHT, fill=2), bounce)  # is not held until it is read
    guess = values(WEIGHT)
    reading = store.read(*ALL, guess)
    store.drop()
    reading.wait()
    assert (guess == 2).all()
    assert is_all(store, 1)


def test_records_begun_anew_are_zeros_until_a_drop(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    store.commit()
    for _ in range(2):
        store.begin_anew()
        assert is_all(store, 0) and is_all(store, 0)
        store.drop()
        assert is_all(store, 1)
    store.begin_anew()
    store.write(*ALL, values(WEIGHT, fill=7)).wait()
    assert is_all(store, 7)
    store.drop()
    assert is_all(store, 1)


def test_a_failed_write_leaves_what_the_store_has(tmp_path: Path) -> None:
    backend = FaultyBackend("write", 1 << 60, errno.EIO)
    with open_store(tmp_path, backend=backend) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        backend.fail_on = backend.calls["write"] + 1
        with pytest.raises(StorageError):
            store.write(*ALL, values(WEIGHT, fill=2)).wait()
        assert is_all(store, 1)
        store.write(*ALL, values(WEIGHT, fill=3)).wait()
        assert is_all(store, 3)
        store.commit()
        assert is_all(store, 3)


def test_a_write_that_cannot_begin_leaves_what_the_store_has(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, _ = opened
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    proceed, store.files.before_write = store.files.before_write, _refuse
    with pytest.raises(OSError, match="planned"):
        store.write(*ALL, values(WEIGHT, fill=2))
    store.files.before_write = proceed
    assert is_all(store, 1)


def _refuse(_tears: bool) -> None:
    raise OSError("planned")


def test_one_home_that_is_torn_reads_as_it_is(tmp_path: Path) -> None:
    with open_store(tmp_path, num_homes=1) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
        store.write("layer", "param", 0, values(WEIGHT, GRANULE_NUMEL, fill=2)).wait()
        with pytest.raises(TornStoreError):
            store.drop()
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()


def test_damage_is_an_error_and_is_not_held(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path, backend=FlippingBackend("read", 1, 77)) as (store, _):
        with pytest.raises(CorruptionError, match="param of layer is damaged"):
            is_all(store, 1)
        assert is_all(store, 1)  # read again: this time whole


def test_half_of_a_record_held_is_read_from_the_ssd_where_it_must_be(tmp_path: Path) -> None:
    with open_store(tmp_path) as (store, _):
        store.write(*ALL, values(WEIGHT, fill=1)).wait()
        store.commit()
    with open_store(tmp_path) as (store, engine):
        store.write(*ALL, values(WEIGHT, GRANULE_NUMEL, fill=2)).wait()
        part = values(WEIGHT, GRANULE_NUMEL)
        store.read(*ALL, part).wait()
        assert (part == 2).all() and engine.read_bytes == 0
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()
        assert engine.read_bytes > 0


def test_unaligned_access_reads_the_copy_and_never_leaves_it_old(opened: tuple[ResidentStore, IoEngine]) -> None:
    store, engine = opened
    bounce = mapped_empty(4 * GRANULE_NUMEL)
    store.write(*ALL, values(WEIGHT, fill=1)).wait()
    few = torch.empty(5, dtype=torch.bfloat16)
    store.read_unaligned("layer", "param", GRANULE_NUMEL - 2, few, bounce)
    assert (few == 1).all() and engine.read_bytes == 0
    store.write_unaligned("layer", "param", GRANULE_NUMEL - 2, torch.full_like(few, 9), bounce)
    expected = values(WEIGHT, fill=1)
    expected[GRANULE_NUMEL - 2 : GRANULE_NUMEL + 3] = 9
    for _ in range(2):
        out = values(WEIGHT)
        store.read(*ALL, out).wait()
        assert torch.equal(out, expected)
    store.read_unaligned("layer", "param", GRANULE_NUMEL - 2, few, bounce)
    assert (few == 9).all()


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


def read_aligned(store: ResidentStore, out: Tensor) -> None:
    store.read(*ALL, out).wait()


def read_unaligned(store: ResidentStore, out: Tensor) -> None:
    store.read_unaligned(*ALL, out, mapped_empty(out.nbytes))


@pytest.mark.parametrize("read", [read_aligned, read_unaligned])
def test_a_read_of_more_than_is_being_written_waits_for_it(
    read: Callable[[ResidentStore, Tensor], None], tmp_path: Path
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


# Whatever happens to it, a resident store reads as the store below it.

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


def act(store: ResidentStore, operation: str, random: Random) -> None:
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
    store: ResidentStore, record: RecordSpec | None = None, start: int = 0, stop: int | None = None
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

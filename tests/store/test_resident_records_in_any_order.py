"""A store with copies in RAM reads like one without, after any operations by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from random import Random

import pytest
import torch
from resident_stores import ALL, CHUNKS, FROZEN, WEIGHT, is_all, open_store, values
from storage_doubles import GatedBackend
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.store import GRANULE_NUMEL, RecordSpec, Store


class Gate:
    """Blocks all I/O of a store within `shut`."""

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


def test_a_read_during_a_write_sees_the_new_values(tmp_path: Path) -> None:
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
def test_a_read_beyond_a_running_write_waits_for_the_write(
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
            gate.backend.arrived.acquire()  # this is the write, and the read must not begin
            assert not gate.backend.arrived.acquire(timeout=0.05)
            open_gate()
        reading.result()
        writing.wait()
        assert (out[:GRANULE_NUMEL] == 2).all() and (out[GRANULE_NUMEL:] == 1).all()


def test_threads_with_different_parts_do_not_interfere(tmp_path: Path) -> None:
    """Two threads write and read in rounds, as loader and pipeline do. Between rounds the store commits or drops
    drafts.
    """
    num_rounds, own = 30, len(CHUNKS) // 2
    failures: list[BaseException] = []
    with open_store(tmp_path) as (store, _):
        random = Random(0)
        store.commit()
        zeros = {(record, start): 0.0 for record, start, _ in CHUNKS}
        now, committed = dict(zeros), dict(zeros)

        def between_rounds() -> None:
            if random.random() < 0.5:
                store.commit()
                committed.update(now)
            else:
                store.drop_drafts()
                now.update(committed)
            store.ram.keep_new(random.random() < 0.5)

        meet = threading.Barrier(2, action=between_rounds)

        def work(chunks: list[tuple[RecordSpec, int, int]], seed: int) -> None:
            try:
                mine = Random(seed)
                for _ in range(num_rounds):
                    for record, start, stop in mine.sample(chunks, k=len(chunks)):
                        out = values(record, stop - start)
                        if mine.random() < 0.5:
                            now[record, start] = fill = float(mine.randrange(100))
                            store.write(record.block, record.kind, start, out.fill_(fill)).wait()
                        store.read(record.block, record.kind, start, out.fill_(torch.nan)).wait()
                        assert (out == now[record, start]).all()
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

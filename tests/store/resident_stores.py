"""A store of three records, with copies of them in RAM."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import FileBackend, IoEngine, StorePath
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
WEIGHT = RecordSpec("layer", "param", "bfloat16", 3 * GRANULE_NUMEL + 2048)
MOMENT = RecordSpec("layer", "exp_avg", "float32", 2 * GRANULE_NUMEL)
FROZEN = RecordSpec("frozen", "param", "float32", GRANULE_NUMEL + 4096, versioned_numel=0)
RECORDS = (WEIGHT, MOMENT, FROZEN)

CHUNKS = [
    (record, start, min(start + GRANULE_NUMEL, record.numel))
    for record in RECORDS
    for start in range(0, record.numel, GRANULE_NUMEL)
]
Place = tuple[str, str, int]
ALL: Place = ("layer", "param", 0)


def values(record: RecordSpec, numel: int | None = None, *, fill: float | None = None) -> Tensor:
    """Aligned memory [numel] of a record's dtype, filled with `fill` or NaN."""
    memory = mapped_empty((numel or record.numel) * record.itemsize).view(getattr(torch, record.dtype))
    return memory.fill_(torch.nan if fill is None else fill)


@contextmanager
def open_store(
    folder: Path, *, num_homes: int = 2, resident: tuple[RecordSpec, ...] = RECORDS, backend: FileBackend | None = None
) -> Iterator[tuple[Store, IoEngine]]:
    """Create or open the store in `folder`."""
    engine = IoEngine(2, 1 << 20, 1 << 24, backend)
    try:
        store = Store.open_or_create(
            [StorePath(str(folder), 1 << 26)],
            RECORDS,
            model=MODEL,
            engine=engine,
            durability="step" if num_homes == 2 else "checkpoint",
        )
        assert isinstance(store, Store)
        with store:
            store.ram.allocate_copies([(record.block, record.kind) for record in resident], mapped_empty)
            yield store, engine
    finally:
        engine.close()


def is_all(store: Store, value: float, *, record: RecordSpec = WEIGHT) -> bool:
    out = values(record)
    store.read(record.block, record.kind, 0, out).wait()
    return bool((out == value).all())

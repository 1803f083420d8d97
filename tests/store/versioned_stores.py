"""Records with every kind of versioning, and stores of these records on two paths."""

from __future__ import annotations

from pathlib import Path
from random import Random

from hf_lohan.files import IoEngine, StorePath
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store
from hf_lohan.testing.stored_state import aligned

MODEL = ModelIdentity("LlamaForCausalLM", 12345, "abc")
RECORDS = (
    RecordSpec("a", "param", "bfloat16", 3 * GRANULE_NUMEL - 2048),
    RecordSpec("a", "exp_avg", "float32", 2 * GRANULE_NUMEL),
    RecordSpec("tail", "param", "bfloat16", 3 * GRANULE_NUMEL + 4096, versioned_numel=2 * GRANULE_NUMEL),
    RecordSpec("frozen", "param", "float32", GRANULE_NUMEL + 2048, versioned_numel=0),
    RecordSpec("tiny", "master_residual", "int16", 2048),
    RecordSpec("a", "moment_scales", "float32", 3 * GRANULE_NUMEL // 16),
)
TWO_RECORDS = (
    RecordSpec("a", "param", "bfloat16", 2 * GRANULE_NUMEL - 2048),
    RecordSpec("tail", "param", "bfloat16", 2 * GRANULE_NUMEL, versioned_numel=GRANULE_NUMEL),
)
CHECKPOINT = "out/checkpoint-7"


def fill(store: Store, records: tuple[RecordSpec, ...], random: Random) -> None:
    for record in records:
        store.write(record.block, record.kind, 0, aligned(record, record.numel, random)).wait()


def write_some(store: Store, random: Random) -> None:
    """Write some versioned granules of `TWO_RECORDS`."""
    record = random.choice(TWO_RECORDS)
    store.write(record.block, record.kind, 0, aligned(record, GRANULE_NUMEL, random)).wait()
    if random.random() < 0.5:
        rest = aligned(TWO_RECORDS[0], GRANULE_NUMEL - 2048, random)
        store.write("a", "param", GRANULE_NUMEL, rest).wait()


def new_store(root: Path, engine: IoEngine, num_homes: int, records: tuple[RecordSpec, ...] = RECORDS) -> Store:
    paths = [StorePath(str(root / "a"), 10**7), StorePath(str(root / "b"), 10**7)]
    return Store.create(paths, records, model=MODEL, engine=engine, num_homes=num_homes, stripe_bytes=8192)

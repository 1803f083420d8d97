"""A store deletes its scratch records when it is closed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from store_contents import SCRATCH, Paths, Records, Values, data_file_bytes, read_all

from hf_lohan.files import CapacityError, IoEngine
from hf_lohan.store import ModelIdentity, RecordSpec, Store


def test_scratch_records_are_created_and_deleted(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine, random_values: Values
) -> None:
    with Store.create(paths, records, model=model, engine=engine) as store:
        own_bytes = store.size_bytes + store.scratch_bytes
        scratch = store.scratch(SCRATCH)
        values, out = random_values(SCRATCH[0], 8192), random_values(SCRATCH[0], 8192)
        scratch.write("layers.0", "gradient", 0, values).wait()
        scratch.read("layers.0", "gradient", 0, out).wait()
        assert torch.equal(out.view(torch.uint8), values.view(torch.uint8))
        assert store.size_bytes + store.scratch_bytes == data_file_bytes(paths) == own_bytes + 32768
        assert not read_all(store).any()
        with pytest.raises(ValueError, match="'gradients' is taken"):
            store.scratch(SCRATCH)
        scratch.close()
        assert store.size_bytes + store.scratch_bytes == data_file_bytes(paths) == own_bytes
        store.scratch(SCRATCH)
        store.scratch(SCRATCH, name="more")
        assert store.size_bytes + store.scratch_bytes == data_file_bytes(paths) == own_bytes + 65536
    assert data_file_bytes(paths) == own_bytes
    store.close()


@pytest.mark.parametrize("name", ["records-0", "records-1", "../evil", "", "Upper", "a.b"])
def test_scratch_names_are_plain_words(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine, name: str
) -> None:
    with (
        Store.create(paths, records, model=model, engine=engine) as store,
        pytest.raises(ValueError, match="taken or not"),
    ):
        store.scratch(SCRATCH, name=name)


def test_scratch_counts_against_the_capacity(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    with Store.create(paths, records, model=model, engine=engine) as store:
        with pytest.raises(CapacityError, match=r"/a needs .* but its capacity is 200,000 bytes"):
            store.scratch([RecordSpec("layers.0", "gradient", "float32", 26 * 2048)])
        assert store.size_bytes + store.scratch_bytes == data_file_bytes(paths)
        store.scratch([RecordSpec("layers.0", "gradient", "float32", 20 * 2048)])


def test_scratch_of_a_killed_run_is_cleared(
    paths: Paths, records: Records, model: ModelIdentity, engine: IoEngine
) -> None:
    Store.create(paths, records, model=model, engine=engine).close()
    stale = Path(paths[0].path) / "gradients.bin"
    starts: tuple[Callable[[], Store], ...] = (
        lambda: Store.open(paths, model=model, engine=engine),
        lambda: Store.create(paths, records, model=model, engine=engine),
    )
    for start in starts:
        stale.write_bytes(b"left behind")
        with start() as store:
            assert not stale.exists() and store.size_bytes + store.scratch_bytes == data_file_bytes(paths)

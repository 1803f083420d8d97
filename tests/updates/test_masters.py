"""Masters that are written in any pieces are read bit for bit, also ties, after any commit, undo and reopening."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import IoEngine, StorageError, StorePath
from hf_lohan.optim.precision import TIE_RUN_NUMEL
from hf_lohan.store import GRANULE_NUMEL, ModelIdentity, RecordSpec, Store
from hf_lohan.store import commits as commit_files
from hf_lohan.store.commits import read_commit, write_commit
from hf_lohan.updates import master_pieces, read_masters, round_anew, write_masters

NUMEL = 7 * GRANULE_NUMEL + 2048
BLOCK: Any = SimpleNamespace(name="block")
MODEL = ModelIdentity("Tested", NUMEL, "0" * 64)
SPECS = [
    RecordSpec("block", "param", "bfloat16", NUMEL, granule_numel=2 * GRANULE_NUMEL),
    RecordSpec("block", "master_residual", "int16", NUMEL, granule_numel=2 * GRANULE_NUMEL),
]
BOUNCE = mapped_empty(4 * GRANULE_NUMEL)


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["hf_lohan.updates.masters"], "_WINDOW_NUMEL", 2 * TIE_RUN_NUMEL)


@pytest.fixture
def engine() -> Iterator[IoEngine]:
    engine = IoEngine(2, 1 << 20, 1 << 26)
    yield engine
    engine.close()


@pytest.fixture
def paths(tmp_path: Path) -> list[StorePath]:
    return [StorePath(str(tmp_path / "store"))]


@pytest.fixture
def store(paths: list[StorePath], engine: IoEngine) -> Iterator[Store]:
    with Store.create(paths, SPECS, model=MODEL, engine=engine, num_homes=2) as store:
        yield store


def halves(numel: int, seed: int) -> Tensor:
    """Values of float16, of which many are ties."""
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed)).half().float()


def write(store: Store, first: int, masters: Tensor) -> None:
    working, residual = (torch.empty(masters.numel(), dtype=dtype) for dtype in (torch.bfloat16, torch.int16))
    write_masters(store, BLOCK, first, masters, working, residual, BOUNCE)


def read(store: Store, first: int = 0, last: int = NUMEL) -> Tensor:
    out = torch.full((last - first,), torch.nan)
    for (start, stop), masters in zip(
        master_pieces(first, last), read_masters(store, BLOCK, first, last, BOUNCE), strict=True
    ):
        out[start:stop] = masters
    return out


def weights(store: Store) -> Tensor:
    out = torch.empty(NUMEL, dtype=torch.bfloat16)
    store.read_unaligned("block", "param", 0, out, BOUNCE)
    return out


def test_any_pieces_are_read_as_written(store: Store) -> None:
    expected = torch.zeros(NUMEL)
    random = torch.Generator().manual_seed(1)
    edges = [0, 1, 31, TIE_RUN_NUMEL - 1, TIE_RUN_NUMEL, TIE_RUN_NUMEL + 1, 3 * TIE_RUN_NUMEL, NUMEL - 1, NUMEL]
    for turn in range(25):
        picked = torch.randint(0, NUMEL + 1, (2,), generator=random).tolist()
        first, last = sorted((edges[turn % len(edges)], picked[0])) if turn % 2 else sorted(picked)
        # Values without ties must not become ties in a run that has a tie code.
        values = halves(last - first, turn) if turn % 3 else torch.randn(last - first, generator=random)
        write(store, first, values)
        expected[first:last] = values
        assert torch.equal(read(store), expected)
        assert torch.equal(read(store, *sorted(picked)), expected[slice(*sorted(picked))])
        assert torch.equal(weights(store), expected.bfloat16())


def test_tie_codes_belong_to_the_commit(store: Store, paths: list[StorePath], engine: IoEngine) -> None:
    first, second = halves(NUMEL, 1), halves(NUMEL, 2)
    write(store, 0, first)
    store.commit()
    write(store, 0, second)
    assert torch.equal(read(store), second)
    store.drop_drafts()
    assert torch.equal(read(store), first)
    write(store, 0, second)
    store.close()
    with Store.open(paths, model=MODEL, engine=engine) as reopened:
        assert torch.equal(read(reopened), first)
        write(reopened, 0, second)
        reopened.commit()
        write(reopened, 5, first[:99])
    with Store.open(paths, model=MODEL, engine=engine) as reopened:
        assert torch.equal(read(reopened), second)
        reopened.clear_records()
        assert not read(reopened).any()


def rounded_half_up(store: Store, masters: Tensor) -> Tensor:
    """Write masters as older versions did, and return the weights."""
    bits = masters.view(torch.int32)
    working = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
    store.write_unaligned("block", "param", 0, working, BOUNCE)
    store.write_unaligned("block", "master_residual", 0, bits.to(torch.int16), BOUNCE)
    return working


@pytest.mark.parametrize("values", ["float16", "float32"])
def test_a_store_of_an_older_version_is_rounded_anew(
    values: str, store: Store, paths: list[StorePath], engine: IoEngine
) -> None:
    masters = halves(NUMEL, 3) if values == "float16" else torch.randn(NUMEL)
    if values == "float32":
        masters.view(torch.int32)[[5, TIE_RUN_NUMEL, NUMEL - 1]] = 0x3F80_8000  # between 1 and the next weight
    before = rounded_half_up(store, masters)
    store.commit(rounds_half_up=True)
    store.close()
    with Store.open(paths, model=MODEL, engine=engine) as reopened:
        assert reopened.committed is not None and reopened.committed.ties is None
        assert torch.equal(read(reopened), masters)
        differ = int((before != masters.bfloat16()).sum())
        assert differ >= 3
        assert round_anew(reopened, BLOCK, 0, NUMEL, BOUNCE) == differ
        assert torch.equal(weights(reopened), masters.bfloat16())
        assert torch.equal(read(reopened), masters)
        reopened.commit()
        assert round_anew(reopened, BLOCK, 0, NUMEL, BOUNCE) == 0
    with Store.open(paths, model=MODEL, engine=engine) as reopened:
        assert reopened.committed is not None and reopened.committed.ties is not None
        assert torch.equal(read(reopened), masters)


def test_an_older_version_refuses_a_commit_with_tie_codes(
    store: Store, paths: list[StorePath], monkeypatch: pytest.MonkeyPatch
) -> None:
    store.commit()
    store.close()
    folder = paths[0].path
    commit = read_commit(folder)
    assert commit is not None and commit.ties is not None
    monkeypatch.setattr(commit_files, "_ROUNDING", "another name")  # an older version does not know the name
    with pytest.raises(StorageError, match="no valid commit"):
        read_commit(folder)
    monkeypatch.undo()
    write_commit(replace(commit, ties=None), folder)
    monkeypatch.setattr(commit_files, "_ROUNDING", "another name")
    assert read_commit(folder) is not None


def test_a_rank_without_residuals_is_not_of_an_older_version(paths: list[StorePath], engine: IoEngine) -> None:
    """Resharding drops the tie codes of all ranks if one has a commit of an older version."""
    with Store.create(paths, SPECS[:1], model=MODEL, engine=engine, num_homes=2) as store:
        store.commit()
    with Store.open(paths, model=MODEL, engine=engine) as store:
        assert store.committed is not None
        assert store.committed.ties is not None and not store.committed.ties.size

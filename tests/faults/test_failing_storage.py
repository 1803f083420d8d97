"""A drive that fails at one of its first 200 calls causes an error or no harm, and never a wrong commit."""

from __future__ import annotations

import errno
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
import torch
from engines import resolved
from storage_doubles import CountingBackend
from torch import Tensor

import hf_lohan.engine.tiers
from hf_lohan.device import CpuDevice, mapped_empty
from hf_lohan.engine import OffloadEngine, ParameterAccess, drain_model, open_tiers
from hf_lohan.files import CorruptionError, FileBackend, IoEngine, StorePath
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.store import Store
from hf_lohan.testing.models import tiny_batch, tiny_model

NUM_CALLS = 200
NUM_STEPS = 5
NUM_READS_AHEAD = 2 * 3 * NUM_STEPS
"""The largest possible number: embeddings, layer and head in each forward and backward."""
Fault = Literal["eio", "enospc", "short", "flip"]
State = dict[tuple[str, str], Tensor]


class OneFault(CountingBackend):
    """Fails at the `number`-th call, counted from 1, that reads, writes, syncs or allocates."""

    def __init__(self, fault: Fault, number: int) -> None:
        super().__init__()
        self.fault, self.number, self.num_calls = fault, number, 0
        self.struck_call = ""

    @property
    def has_struck(self) -> bool:
        return bool(self.struck_call)

    def count(self, call: str) -> int:
        count = super().count(call)
        if call in ("read", "write", "sync", "allocate"):
            self.num_calls += 1
            if self.num_calls == self.number:
                self.struck_call = call
                if self.fault in ("eio", "enospc"):
                    code = errno.EIO if self.fault == "eio" else errno.ENOSPC
                    raise OSError(code, os.strerror(code))
        return count

    def read(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        before = self.has_struck
        if self.fault == "short" and self.num_calls + 1 == self.number:
            return super().read(fd, offset, [views[0][:4096]])
        num_bytes = super().read(fd, offset, views)
        if self.fault == "flip" and self.has_struck and not before:
            views[0][self.number % views[0].nbytes] ^= 1 << self.number % 8
        return num_bytes

    def write(self, fd: int, offset: int, views: Sequence[memoryview]) -> int:
        if self.num_calls + 1 == self.number and self.fault == "short":
            return super().write(fd, offset, [views[0][:4096]])
        if self.num_calls + 1 == self.number and self.fault == "flip":
            memory = mapped_empty(views[0].nbytes)
            flipped = memory.numpy().data
            flipped[:] = views[0]
            flipped[self.number % flipped.nbytes] ^= 1 << self.number % 8
            views = [flipped, *views[1:]]
        return super().write(fd, offset, views)


def train(folder: Path, backend: FileBackend, monkeypatch: pytest.MonkeyPatch, num_steps: int = NUM_STEPS) -> None:
    """Train a tiny model. The loaded weights are committed first, then each step."""
    monkeypatch.setattr(
        hf_lohan.engine.tiers,
        "IoEngine",
        # One thread and whole requests, so that calls come in one order.
        lambda **settings: IoEngine(1, 1 << 20, settings["max_inflight_bytes"], backend),
    )
    model = tiny_model("llama", num_layers=1).train()
    config = resolved(folder, cpu_memory="3MiB", gpu_memory="1MiB", _clip="speculate")
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=True)
    tiers = open_tiers(layout, config, CpuDevice())
    engine = None
    try:
        drain_model(layout.blocks, ParameterAccess(tiers.store, layout.blocks, tiers.states))
        engine = OffloadEngine(model, layout, tiers, config)
        optimizer = OffloadAdamW(model.parameters(), lr=1e-3, engine=engine)
        for step in range(num_steps):
            model(**tiny_batch(seed=step)).loss.backward()
            engine.clip_grad_norm(3.0)
            optimizer.step()
            optimizer.zero_grad()
        if not num_steps:
            engine.commits.request()  # as the first step's forward does
        engine.wait_for_updates()
    finally:
        if engine is not None:
            engine.close()
        else:
            tiers.close()


def committed_state(folder: Path) -> tuple[int, State] | None:
    """Return the number of the last commit and all its records, or None before the first commit."""
    io = IoEngine(2, 1 << 20, 1 << 24)
    try:
        with Store.open([StorePath(str(folder))], model=None, engine=io) as store:
            if store.committed is None:
                return None
            state = {}
            for record in store.records:
                out = mapped_empty(record.num_bytes).view(getattr(torch, record.dtype))
                store.read(record.block, record.kind, 0, out).wait()
                state[record.block, record.kind] = out.clone()
            return store.committed.number, state
    finally:
        io.close()


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> dict[int, State]:
    """The records of each commit on a healthy drive, by commit number. Commit 1 holds the loaded weights."""
    folder = tmp_path_factory.mktemp("expected")
    states: dict[int, State] = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        for num_steps in range(NUM_STEPS + 1):
            store = folder / str(num_steps)
            train(store, FileBackend(), monkeypatch, num_steps)
            found = committed_state(store)
            if found is not None:
                states[found[0]] = found[1]
    return states


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", ["eio", "enospc", "short", "flip"])
def test_no_wrong_number_is_ever_committed(
    fault: Fault, ram_folder: Path, expected: dict[int, State], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended_well: Counter[str] = Counter()
    told = caught = 0
    for number in range(1, NUM_CALLS + 1):
        folder = ram_folder / "store"
        shutil.rmtree(folder, ignore_errors=True)
        backend = OneFault(fault, number)
        error: Exception | None = None
        try:
            train(folder, backend, monkeypatch)
        except (OSError, ValueError) as raised:  # StorageError, CapacityError
            error = raised
            told += 1
            assert str(folder) in str(error), f"call {number}: {error}"
        else:
            ended_well[backend.struck_call] += 1
        assert backend.has_struck, f"the run makes fewer than {number} calls"
        if not (folder / "manifest.json").exists():
            assert error is not None  # the store was never created
            continue
        try:
            found = committed_state(folder)
        except CorruptionError:
            assert fault == "flip"  # a write was flipped, and the checksum detects it when read
            caught += 1
            continue
        if found is None:
            assert error is not None
            continue
        commit, state = found
        assert error is not None or commit == NUM_STEPS + 1, f"call {number}: not all steps are committed"
        for key, values in state.items():
            assert torch.equal(values.view(torch.uint8), expected[commit][key].view(torch.uint8)), (number, key)
    assert ended_well.total() + told == NUM_CALLS
    match fault:
        case "eio" | "enospc":
            # Only failed prefetches are retried, when their block is needed.
            assert ended_well.keys() <= {"read"}, f"the run ignored errors: {ended_well}"
            assert ended_well["read"] <= NUM_READS_AHEAD
        case "short":
            assert told == 0, "a short call was treated as an error"
        case "flip":
            assert told > NUM_CALLS / 4 and caught > 0

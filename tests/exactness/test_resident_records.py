"""Copies of records in RAM change no number, and save exactly the reads of these records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from interrupted_runs import InterruptAfter, assert_same, make_trainer, train_to_end
from torch import Tensor
from trajectories import CLIPS_SOME_STEPS, SMALL_BUDGETS, assert_equal, train_offloaded, train_stock

import hf_lohan
import hf_lohan.planning.layout
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import RecordTraffic, step_traffic
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attachment import offload_model
from hf_lohan.optim import OffloadAdamW
from hf_lohan.store import Store
from hf_lohan.testing.models import tiny_batch, tiny_model


@pytest.fixture
def keep_some(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that makes plans keep copies of random records, whatever the budget is."""

    def keep(seed: int, fraction: float = 0.5) -> None:
        random = Random(seed)

        def choose(records: Sequence[RecordTraffic], **_: Any) -> tuple[RecordTraffic, ...]:
            return tuple(record for record in records if random.random() < fraction)

        monkeypatch.setattr(hf_lohan.planning.layout, "choose_resident_records", choose)

    return keep


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["none", "defer", "speculate"])
@pytest.mark.parametrize("family", ["llama", "opt", "mixtral"])
def test_equals_the_stock_trainer(family: str, clip: str, keep_some: Callable[..., None], tmp_path: Path) -> None:
    max_grad_norm = 0.0 if clip == "none" else CLIPS_SOME_STEPS[family]
    settings = {"max_grad_norm": max_grad_norm, "weight_decay": 0.1, "lr_scheduler_type": "cosine"}
    stock = train_stock(family, tmp_path / "stock", {}, **settings)
    keep_some(seed=len(family) + len(clip))
    offload = SMALL_BUDGETS if clip == "none" else {**SMALL_BUDGETS, "_clip": clip}
    assert_equal(train_offloaded(family, tmp_path / "ours", {}, offload=offload, **settings), stock)


@pytest.mark.covering(0)
@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_resuming_from_the_last_step(clip: str, keep_some: Callable[..., None], tmp_path: Path) -> None:
    """Resume in the same engine, whose copies are newer than the commit, and in new engines that copy other records."""
    whole = make_trainer(tmp_path / "whole", offload={"_resident_records": "none"})
    expected = train_to_end(whole)
    keep_some(seed=3)
    trainer = make_trainer(tmp_path / "run", InterruptAfter(3), offload={"_clip": clip})
    for resume in (None, "last_step"):
        with pytest.raises(KeyboardInterrupt):
            trainer.train(resume_from_checkpoint=resume)
        trainer.offload_engine.wait_for_updates()  # the commit may be running
        assert hf_lohan.last_step(tmp_path / "run") == 3
    trainer.offload_engine.close()
    keep_some(seed=99)
    assert_same(train_to_end(make_trainer(tmp_path / "run", offload={"_clip": clip}), "last_step"), expected)


def an_engine(folder: Path, *, hold_gradients: bool = False, frozen: bool = False, **offload: Any) -> OffloadEngine:
    model = tiny_model("llama", num_layers=6).train()
    if frozen:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
    settings = {"cpu_memory": "8MiB", "gpu_memory": "1MiB", "prefetch_blocks": 1, "_clip": "defer", "ssd": str(folder)}
    config = OffloadConfig.load({**settings, "activations": "recompute", **offload})
    return offload_model(model, config, torch_device="cpu", default_ssd_path=folder, hold_gradients=hold_gradients)


def steps(engine: OffloadEngine, optimizer: OffloadAdamW, num_steps: int) -> None:
    """Train some steps. Then wait until as many of the next blocks are prefetched as fit."""
    model: Any = engine.model
    for step in range(num_steps):
        engine.announce_backward(is_final=True)
        model(**tiny_batch(seed=10 * step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    engine.wait_for_updates()
    ring, prefetcher = engine._ring, engine._prefetcher
    with ring.lock:
        ring.changed.wait_for(
            lambda: prefetcher.find_load() is None and not any(slot.is_loading for slot in ring._all()), timeout=60
        )


def optimizer_of(engine: OffloadEngine) -> OffloadAdamW:
    parameters = [parameter for parameter in engine.model.parameters() if parameter.requires_grad]
    return OffloadAdamW(parameters, lr=1e-3, engine=engine)


@pytest.mark.covering(0)
@pytest.mark.parametrize("schedule", ["naive", "optimized"])
@pytest.mark.parametrize("frozen", [False, True], ids=["all", "norms-only"])
def test_a_step_reads_the_planned_bytes(
    frozen: bool, schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates may hand weights over to slots, so the optimized schedule may read less."""
    read: Counter[tuple[str, str]] = Counter()
    real_read = Store.read

    def counted(store: Store, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> Any:
        read[block, kind] += out.nbytes
        return real_read(store, block, kind, start_numel, out, is_urgent=is_urgent)

    engine = an_engine(tmp_path, frozen=frozen, _resident_records="none", _schedule=schedule)
    monkeypatch.setattr(Store, "read", counted)
    optimizer = optimizer_of(engine)
    steps(engine, optimizer, 2)
    read.clear()
    steps(engine, optimizer, 3)
    layout = engine.layout
    expected = step_traffic(
        [block.shape() for block in layout.blocks],
        param_itemsize=4,
        state_itemsizes={"exp_avg": 4, "exp_avg_sq": 4},
        num_slots=layout.plan.num_slots,
    )
    most = {(r.block, r.kind): 3 * r.read_bytes_per_step for r in expected if r.read_bytes_per_step}
    if schedule == "naive":
        assert most == dict(read)
    else:
        assert all(num_bytes <= most[record] for record, num_bytes in read.items())
        states = [record for record in most if record[1] != "param"]
        assert all(read[record] == most[record] for record in states)
    engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("hold_gradients", [False, True])
def test_copies_save_exactly_the_reads_of_their_records(
    hold_gradients: bool, keep_some: Callable[..., None], tmp_path: Path
) -> None:
    keep_some(seed=7)
    read_bytes = {}
    for mode in ("none", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            if mode == "none":
                patch.setattr(hf_lohan.planning.layout, "choose_resident_records", lambda *_, **__: ())
            # With this schedule updates hand no weights over, so all reads come from the store.
            engine = an_engine(tmp_path / mode, hold_gradients=hold_gradients, _schedule="naive")
            engine.planned_memory.allocate_copies()
        optimizer = optimizer_of(engine)
        steps(engine, optimizer, 2)
        before = engine.tiers.io.read_bytes, engine.tiers.io.write_bytes
        steps(engine, optimizer, 3)
        read_bytes[mode] = engine.tiers.io.read_bytes - before[0], engine.tiers.io.write_bytes - before[1]
        resident = engine.layout.resident_records
        engine.close()
    saved = 3 * sum(record.read_bytes_per_step for record in resident)
    assert 0 < saved < read_bytes["none"][0]
    assert read_bytes["auto"] == (read_bytes["none"][0] - saved, read_bytes["none"][1])


def test_nothing_is_read_if_all_records_fit(tmp_path: Path) -> None:
    engine = an_engine(tmp_path, hold_gradients=True, cpu_memory="64MiB")
    assert len(engine.layout.resident_records) == len(engine.layout.records)
    assert engine.layout.cpu_bytes <= 64 << 20
    optimizer = optimizer_of(engine)
    steps(engine, optimizer, 2)
    before = engine.tiers.io.read_bytes
    steps(engine, optimizer, 3)
    assert engine.tiers.io.read_bytes == before
    engine.close()


@pytest.mark.covering(0)
@pytest.mark.parametrize("cpu_memory", ["3MiB", "5MiB", "7MiB", "64MiB"])
@pytest.mark.parametrize("activations", ["recompute", "swap"])
@pytest.mark.parametrize("hold_gradients", [False, True])
def test_the_budget_holds_pools_and_copies(
    hold_gradients: bool, activations: str, cpu_memory: str, tmp_path: Path
) -> None:
    engine = an_engine(tmp_path, hold_gradients=hold_gradients, cpu_memory=cpu_memory, activations=activations)
    layout = engine.layout
    assert layout.cpu_bytes == layout.plan.cpu_pool_bytes + sum(r.num_bytes for r in layout.resident_records)
    assert isinstance(engine.config.cpu_memory, int)
    left = engine.config.cpu_memory - layout.activation_bytes - layout.cpu_bytes
    assert left >= 0
    sizes = {(record.block, record.kind): record.num_bytes for record in layout.records}
    resident = {(record.block, record.kind) for record in layout.resident_records}
    assert all(num_bytes > left for name, num_bytes in sizes.items() if name not in resident)
    engine.close()

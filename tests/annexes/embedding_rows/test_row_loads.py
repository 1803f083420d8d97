"""Embeddings of which only rows come to the device train with the bits of stock torch."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from engines import EngineFactory, Twins, TwinsFactory
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import CpuDevice, Lane
from hf_lohan.engine import OffloadEngine
from hf_lohan.files import CorruptionError
from hf_lohan.model import table_of_rows
from hf_lohan.testing.models import tiny_batch, tiny_model


def loads_rows(engine: OffloadEngine) -> bool:
    return engine.layout.model_blocks.table is not None


@pytest.mark.parametrize(
    ("way", "records"), [("held", "none"), ("active", "auto"), ("speculated", "auto"), ("late copies", "none")]
)
def test_equals_stock(make_twins: TwinsFactory, way: str, records: str) -> None:
    twins = make_twins(
        embedding="rows",
        _resident_records=records,
        hold_gradients=way != "active",
        device=AsyncDevice(3) if way == "late copies" else None,
    )
    assert loads_rows(twins.engine)
    if way == "speculated":
        twins.engine.clip_by("speculate")
    twins.train(3, max_norm=0.0 if way == "active" else 1.0)
    twins.assert_equal()


def accumulate(twins: Twins, seeds: range) -> None:
    for seed in seeds:
        twins.engine.announce_backward(is_final=seed == seeds[-1])
        twins.backward(seed)


def run_together(twins: Twins, seeds: range) -> None:
    def run(seed: int) -> Tensor:
        loss: Tensor = twins.model(**tiny_batch(seed=seed)).loss
        twins.engine.defer_backward(loss)
        return loss.detach()

    losses = twins.engine.run_micro_batches([partial(run, seed) for seed in seeds])
    for seed, ours in zip(seeds, losses, strict=True):
        loss = twins.stock(**tiny_batch(seed=seed)).loss
        assert torch.equal(ours, loss.detach())
        loss.backward()


@pytest.mark.parametrize("backwards", [accumulate, run_together])
def test_sums_of_backwards_equal_stock(make_twins: TwinsFactory, backwards: Any) -> None:
    twins = make_twins(embedding="rows", recompute=True)
    for step in range(2):
        backwards(twins, range(10 * step, 10 * step + 3))
        twins.clip(1.0)
        twins.step()
    twins.assert_equal()


class CountedDevice(CpuDevice):
    """Counts copied bytes by lane."""

    def __init__(self) -> None:
        super().__init__()
        self.copied: Counter[Lane] = Counter()

    def copy(self, lane: Lane, dst: Tensor, src: Tensor) -> None:
        self.copied[lane] += dst.nbytes
        super().copy(lane, dst, src)


def test_a_large_vocabulary_needs_no_slot(make_twins: TwinsFactory, tmp_path: Path) -> None:
    """Rows alone cross the link in both directions, and the device has a slot for the head alone."""
    vocabulary, width, tokens = 128_000, 24, tiny_batch()["input_ids"].unique()
    copied, num_slots = {}, {}
    for embedding in ("whole", "rows"):
        device = CountedDevice()
        twins = make_twins(
            model_factory=lambda: tiny_model("llama", vocab_size=vocabulary, hidden_size=width, num_layers=1),
            embedding=embedding,
            device=device,
            ssd=str(tmp_path / embedding),
            cpu_memory="48MiB",
            gpu_memory="48MiB",
        )
        twins.backward(1)
        twins.clip(1.0)
        copied[embedding] = device.copied[Lane.D2H]
        num_slots[embedding] = twins.engine.layout.plan.num_slots[SizeClass.OUTER]
        twins.step()
        twins.assert_equal()
    rows = twins.engine.embedding_rows
    assert rows is not None
    assert rows.num_bytes == len(tokens) * width * 4
    assert copied["whole"] - copied["rows"] == (vocabulary - len(tokens)) * width * 4
    assert num_slots == {"whole": 2, "rows": 1}


def test_only_granules_with_needed_rows_are_read(build_engine: EngineFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama", vocab_size=4096)
    table = model.get_input_embeddings().weight.detach().clone()
    engine = build_engine(
        model, embedding="rows", _resident_records="none", cpu_memory="8MiB", gpu_memory="4MiB", hold_gradients=False
    )
    block = engine.layout.model_blocks.table
    assert block is not None
    of_granule = block.granule_numel // 64
    read, starts = engine.tiers.store.read, []

    def noted(name: str, kind: str, start: int, out: Tensor, **options: Any) -> Any:
        if name == block.name:
            starts.append((start // block.granule_numel, out.numel() // block.granule_numel))
        return read(name, kind, start, out, **options)

    monkeypatch.setattr(engine.tiers.store, "read", noted)
    ids = torch.tensor([0, 1, 3 * of_granule, 4 * of_granule - 1, 4 * of_granule, 3])
    with torch.no_grad():
        found = torch.nn.functional.embedding(ids, model.get_input_embeddings().weight)
    assert torch.equal(found, table[ids])
    assert starts == [(0, 1), (3, 2)]
    extents = engine.tiers.store.extents(block.name, "param")
    assert extents is not None
    path, extent = extents[0]
    with open(path, "r+b") as file:
        file.seek(extent.file_offset + 3 * of_granule * 64 * 4 + 5)
        file.write(b"damage")
    with torch.no_grad():
        torch.nn.functional.embedding(torch.tensor([1]), model.get_input_embeddings().weight)
        with pytest.raises(CorruptionError):
            torch.nn.functional.embedding(ids, model.get_input_embeddings().weight)


@pytest.mark.parametrize("padding", [7, 3])
def test_padding_and_several_uses_in_a_forward(make_twins: TwinsFactory, padding: int) -> None:
    """No token of a batch is 3."""
    twins = make_twins(
        model_factory=lambda: tiny_model("llama", vocab_size=5001, hidden_size=40, pad_token_id=padding),
        embedding="rows",
        cpu_memory="8MiB",
        gpu_memory="4MiB",
    )
    for seed in range(2):
        losses = []
        for model in twins.models:
            embed, output = model.get_input_embeddings(), None
            batch = tiny_batch(seed=seed)

            def add_use(_module: Any, _args: Any, output: Any, embed: Any = embed) -> None:
                output.loss = output.loss + embed(torch.arange(3, 60)).square().sum()

            handle = model.register_forward_hook(add_use, prepend=True)
            output = model(**batch)
            handle.remove()
            losses.append(output.loss)
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        twins.clip(1.0)
        twins.step()
    assert loads_rows(twins.engine)
    twins.assert_equal()


def test_other_reads_of_the_table_are_whole(build_engine: EngineFactory) -> None:
    model = tiny_model("llama")
    weight = model.get_input_embeddings().weight
    norm = weight.detach().norm()
    build_engine(model, embedding="rows")
    with torch.no_grad():
        assert torch.equal(weight.norm(), norm)
        with pytest.raises(IndexError, match=r"index out of range in self: .* a token has the index 300"):
            model.get_input_embeddings()(torch.tensor([300]))


class TrainableTokensWrapper(nn.Module):
    """Has the name of PEFT's class."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def test_why_embeddings_are_whole() -> None:
    assert isinstance(table_of_rows(tiny_model("llama")), nn.Parameter)
    assert table_of_rows(tiny_model("opt")) == ("lm_head.weight and model.decoder.embed_tokens.weight are one tensor")
    rare = tiny_model("llama")
    rare.get_input_embeddings().scale_grad_by_freq = True
    assert "scale_grad_by_freq" in str(table_of_rows(rare))
    wrapped = tiny_model("llama")
    wrapped.model.embed_tokens = TrainableTokensWrapper(wrapped.get_input_embeddings())
    wrapped.get_input_embeddings = lambda: wrapped.model.embed_tokens.inner
    assert "PEFT" in str(table_of_rows(wrapped))
    assert table_of_rows(nn.Linear(2, 2)) == "the model has no table of input embeddings"

"""Ranks that share packed weights equal one process that accumulates their batches over the same packed base."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import training_ranks
from async_device import AsyncDevice
from engines import resolved
from packed_bases import Base, base_of
from torch import Tensor
from training_ranks import assert_same_run, closing, take_steps

import hf_lohan.engine.ranks
from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.costs import SizeClass
from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import OffloadEngine, ParameterAccess, open_tiers
from hf_lohan.huggingface.offloaded_model import stream_experts
from hf_lohan.planning import OffloadLayout, lay_out, part_bytes
from hf_lohan.ranks import WEIGHTS_INT8, BlockCodec, Links, MeasuredCodec, Ranks
from hf_lohan.testing.models import tiny_batch
from hf_lohan.testing.thread_ranks import run_ranks
from hf_lohan.weights import NodeShards

NUM_STEPS = 2
MAX_NORM = 0.05
SETTINGS: dict[str, Any] = {
    "cpu_memory": "16MiB",
    "gpu_memory": "4MiB",
    "_io_threads": 1,
    "prefetch_blocks": 1,
    "activations": "recompute",
    "_resident_records": "none",
}
NF4 = {"method": "nf4", "double": True}


@dataclass
class Trained(training_ranks.Trained):
    """The results of a rank."""

    layout: Any = None
    read_bytes: int = 0
    """Bytes that the last step read from the drive."""
    shared_bytes: int = 0
    """Memory through which blocks go to the ranks of a node."""
    sent: dict[str, int] = field(default_factory=dict)


def train(
    links: Links,
    folder: Path,
    base: Base,
    *,
    dtype: torch.dtype | None = None,
    num_batches: int = 1,
    device: Device | None = None,
    max_norm: float = MAX_NORM,
    **settings: Any,
) -> Trained:
    """Train one rank of several, or one process with the batches of ``num_batches`` ranks."""
    rank = links.ranks.rank
    config = resolved(folder / f"rank-{rank}", **{**SETTINGS, "quantize": base.quantization, **settings})
    layout = lay_out(base.model, config, working_dtype=dtype, hold_gradients=True, ranks=links.ranks)
    tiers = open_tiers(layout, config, device or CpuDevice(), links)
    base.write(ParameterAccess(tiers.store, layout.blocks, tiers.states, links, packs=True))
    engine = OffloadEngine(base.model, layout, tiers, config, compute_expert=one_expert)
    stream_experts(engine.experts)
    engine.planned_memory.allocate_copies()
    found = Trained(layout=layout, shared_bytes=tiers.rank_memory.weights.bytes.numel() if tiers.rank_memory else 0)
    before, read = dict(links.sent_bytes), [0, tiers.io.read_bytes]

    def end_step(engine: OffloadEngine, _step: int) -> None:
        engine.wait_for_updates()
        links.barrier("a step that is over")
        read.append(tiers.io.read_bytes)

    with closing(engine, links):
        take_steps(
            engine,
            lambda step, number: base.model(**tiny_batch(seed=1000 * step + rank + number)).loss,
            NUM_STEPS,
            lr=1e-2,
            num_micro=num_batches,
            max_norm=max_norm,
            after_step=end_step,
            into=found,
        )
        found.read_bytes = read[-1] - read[-2]
        found.sent = {channel: links.sent_bytes[channel] - before[channel] for channel in links.sent_bytes}
        access = engine.parameters
        found.weights = {name: access.read_parameter(name) for name in sorted(access.parts)}
        return found


def train_ranks(
    folder: Path, make_base: Callable[[], Base], *, num_ranks: int = 2, num_local: int | None = None, **settings: Any
) -> list[Trained]:
    bases = [make_base() for _ in range(num_ranks)]  # in this thread, because transformers is not made for several

    def of_rank(links: Links) -> Trained:
        return train(links, folder, bases[links.ranks.rank], **settings)

    return run_ranks(num_ranks, of_rank, num_local=num_local)


def check_ranks(
    folder: Path,
    make_base: Callable[[], Base],
    *,
    num_ranks: int = 2,
    num_local: int | None = None,
    ranks: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[list[Trained], Trained]:
    """Train ranks and one process, and check that losses, norms and all weights are equal. ``ranks``: settings of the
    ranks alone."""
    alone = train(Links.alone(), folder / "alone", make_base(), num_batches=num_ranks, **settings)
    trained = train_ranks(folder, make_base, num_ranks=num_ranks, num_local=num_local, **settings, **(ranks or {}))
    num_packed = {len(block.packed_slices) for block in alone.layout.blocks if block.size_class is SizeClass.LAYER}
    assert max(num_packed) or any(block.size_class is SizeClass.EXPERT for block in alone.layout.blocks)
    for rank, ours in enumerate(trained):
        assert ours.layout.packs
        assert_same_run(ours, alone, rank, num_ranks)
    return trained, alone


def cut_kinds(layout: OffloadLayout) -> set[str]:
    """The kinds of records that a cut between two ranks divides."""
    return {
        kind
        for block in layout.blocks
        if block.owner is None
        for kind in ("scales", "codes")
        if block.packed_slices
        for start, stop in block.record_ranges(kind)
        if 0 < stop - start < {"scales": block.scales_bytes, "codes": block.codes_bytes}[kind]
    }


FORMS = [NF4, {"method": "nf4", "double": False}, {"method": "fp4", "double": False, "block": 128}, {"method": "int8"}]


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("form", FORMS, ids=["nf4", "plain nf4", "fp4", "int8"])
def test_two_ranks_train_as_one_process(form: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    trained, _ = check_ranks(tmp_path, lambda: base_of("llama", form), dtype=dtype)
    assert "codes" in cut_kinds(trained[0].layout)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["gpt2", "mixtral"])
def test_other_layers_train_as_one_process(family: str, tmp_path: Path) -> None:
    trained, _ = check_ranks(tmp_path, lambda: base_of(family, NF4), experts="with_layer")
    assert "codes" in cut_kinds(trained[0].layout)


def test_weights_that_train_beside_packed_ones_change_on_all_ranks(tmp_path: Path) -> None:
    trained, alone = check_ranks(tmp_path, lambda: base_of("llama", NF4, trains=".mlp."))
    layers = [block for block in alone.layout.blocks if block.size_class is SizeClass.LAYER]
    assert all(block.state_numel and block.packed_slices for block in layers)
    assert any(block.rank_ranges[1][0] < block.state_numel for block in trained[0].layout.blocks)


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["llama-fp8", "llama-int4", "gpt_oss-mxfp4", "mixtral-fp8"])
def test_weights_that_a_checkpoint_packed_train_as_in_one_process(kind: str, tmp_path: Path) -> None:
    _, alone = check_ranks(tmp_path, lambda: base_of(kind, folder=tmp_path / "base"), experts="with_layer")
    decoded = base_of(kind, folder=tmp_path / "base").decoded()
    expected = train(Links.alone(), tmp_path / "decoded", decoded, num_batches=2, experts="with_layer")
    assert all(map(torch.equal, alone.losses, expected.losses))


@pytest.mark.covering(0)
@pytest.mark.parametrize("kind", ["mixtral", "gpt_oss-mxfp4"])
def test_each_rank_decodes_its_own_experts(kind: str, tmp_path: Path) -> None:
    """Ranks are compared with ranks over the decoded base, because one process sums the rows of an expert in another
    order."""

    def trained(is_packed: bool) -> list[Trained]:
        def make_base() -> Base:
            base = base_of(kind, NF4, folder=tmp_path / "base")
            return base if is_packed else base.decoded()

        folder = tmp_path / str(is_packed)
        settings: dict[str, Any] = {"experts": "streamed", "experts.parallel": "node", "max_norm": 0.0}
        return train_ranks(folder, make_base, **settings)

    packed, decoded = trained(True), trained(False)
    for ours, theirs in zip(packed, decoded, strict=True):
        experts = [block for block in ours.layout.blocks if block.size_class is SizeClass.EXPERT]
        assert all(block.packed_slices and block.owner is not None for block in experts) and experts
        assert not theirs.layout.packs and theirs.layout.model_blocks.experts
        assert_same_run(ours, theirs)
        own = sum(record.num_bytes for record in ours.layout.records if record.kind == "codes")
        assert own < 0.6 * sum(block.codes_bytes for block in ours.layout.blocks)


@pytest.mark.covering(0)
@pytest.mark.parametrize("backward", ["ram", "ssd"])
def test_nodes_keep_packed_layers_and_no_experts_of_others(backward: str, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"experts": "streamed", "experts.parallel": "world", "max_norm": 0.0}

    def of_way(name: str, way: dict[str, str]) -> list[Trained]:
        ways = {"ranks.collectives": {"forward": "exact", **way}}
        return train_ranks(tmp_path / name, lambda: base_of("mixtral", NF4), num_local=1, **settings, **ways)

    expected, found = of_way("world", {"backward": "world"}), of_way("kept", {"backward": backward})
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.layout.model_blocks.experts and ours.layout.decided().copy_bytes > 0
        assert_same_run(ours, theirs)


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", [0, 1])
def test_no_wait_is_missing_if_copies_run_late(seed: int, tmp_path: Path) -> None:
    alone = train(Links.alone(), tmp_path / "alone", base_of("llama", NF4), num_batches=2)
    devices = [AsyncDevice(seed, max_delay_s=5e-4) for _ in range(2)]
    bases = [base_of("llama", NF4) for _ in range(2)]

    def of_rank(links: Links) -> Trained:
        return train(links, tmp_path, bases[links.ranks.rank], device=devices[links.ranks.rank])

    for rank, ours in enumerate(run_ranks(2, of_rank, delays_seed=seed)):
        assert_same_run(ours, alone, rank, 2)


# Bytes.


def test_copies_in_ram_are_packed(tmp_path: Path) -> None:
    trained, alone = check_ranks(tmp_path, lambda: base_of("llama", NF4), _resident_records="auto")
    assert [ours.read_bytes for ours in (*trained, alone)] == [0, 0, 0]
    for ours in trained:
        copies = {(record.block, record.kind): record.num_bytes for record in ours.layout.resident_records}
        assert "codes" in {kind for _, kind in copies}
        assert (
            copies.items() <= {(record.block, record.kind): record.num_bytes for record in ours.layout.records}.items()
        )


def test_a_node_reads_what_one_process_reads_and_shares_packed_bytes(tmp_path: Path) -> None:
    trained, _ = check_ranks(tmp_path, lambda: base_of("llama", NF4, num_layers=6))
    alone = train(Links.alone(), tmp_path / "again", base_of("llama", NF4, num_layers=6))
    read = sum(ours.read_bytes for ours in trained)
    print(f"read {read} by two, {alone.read_bytes} by one")
    layer = max(block.fetched_bytes for block in trained[0].layout.blocks if block.size_class is SizeClass.LAYER)
    assert read <= 1.02 * alone.read_bytes + layer  # a prefetch of the next step may have begun
    largest = max(trained[0].layout.blocks, key=lambda block: block.fetched_bytes)
    assert trained[0].shared_bytes == trained[0].layout.shared_weight_bytes == 2 * largest.fetched_bytes
    layers = [block for block in trained[0].layout.blocks if block.size_class is SizeClass.LAYER]
    assert all(block.fetched_bytes < 0.2 * block.param_bytes for block in layers)


WAYS = [
    {"backward": "world"},
    {"backward": "ram"},
    {"backward": "ssd"},
    {"forward": "delta", "backward": "ram"},
    {"forward": "delta", "backward": "ssd"},
]


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(way.values()))
def test_packed_bytes_go_between_nodes(way: dict[str, str], dtype: torch.dtype, tmp_path: Path) -> None:
    """A node sends a packed layer once in all if the others keep it."""
    ranks = {"ranks.collectives": {"forward": "exact", **way}}
    trained, _ = check_ranks(
        tmp_path, lambda: base_of("llama", NF4), dtype=dtype, num_local=1, ranks=ranks, max_norm=0.0
    )
    if way["backward"] != "world":
        for rank, ours in enumerate(trained):
            shards = ((block, *block.rank_ranges[rank]) for block in ours.layout.common_blocks)
            sizes = [(last - first) * block.master.working_dtype.itemsize for block, first, last in shards]
            of_all = sum(sizes)
            trained_bytes = sum(
                size for size, block in zip(sizes, ours.layout.common_blocks, strict=True) if block.state_numel
            )
            assert of_all <= ours.sent["weights"] <= of_all + NUM_STEPS * trained_bytes


class NegatingCodec(BlockCodec):
    """Sends float32 values with the other sign, so that a value that is coded twice, or only once, is seen."""

    def message_bytes(self, numel: int) -> int:
        return 4 * numel

    def encode(self, values: Tensor, out: Tensor) -> None:
        out.view(torch.float32).copy_(-values)

    def decode(self, message: Tensor, out: Tensor) -> None:
        out.copy_(-message.view(torch.float32))


def test_a_codec_changes_no_packed_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With `forward: int8` weights beside packed ones are coded between nodes, and packed ones are not."""
    monkeypatch.setattr(hf_lohan.engine.ranks, "WEIGHTS_INT8", NegatingCodec())
    coded: list[int] = []
    encode = MeasuredCodec.encode
    monkeypatch.setattr(MeasuredCodec, "encode", lambda *args: coded.append(args[1].numel()) or encode(*args))
    ranks = {"ranks.collectives": {"forward": "int8", "backward": "world"}}
    trained, _ = check_ranks(tmp_path, lambda: base_of("llama", NF4), num_local=1, ranks=ranks, max_norm=0.0)
    monkeypatch.undo()
    assert coded and max(coded) <= max(block.stored_numel for block in trained[0].layout.blocks)


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_rounded_weights_go_with_the_bytes_of_packed_ones(dtype: torch.dtype, tmp_path: Path) -> None:
    base = base_of("llama", NF4)
    base.model.to(dtype)
    config = resolved(tmp_path, **SETTINGS, quantize=base.quantization)
    ranks = [Ranks(rank, 2, 0, 1) for rank in range(2)]
    layout = lay_out(base.model, config, working_dtype=None, hold_gradients=True, ranks=ranks[0])
    coded = [MeasuredCodec("weights", WEIGHTS_INT8) for _ in ranks]
    for block in layout.common_blocks:
        entry = torch.randn(block.fetched_numel, generator=torch.Generator().manual_seed(1)).to(
            block.master.working_dtype
        )
        entry[block.stored_numel :].view(torch.uint8).random_(0, 256)
        for rank, (first, last) in enumerate(block.rank_ranges):
            sender = NodeShards(ranks[rank], layout.common_blocks, coded=coded[rank])
            sent = entry.clone()
            form, message = sender.make_own(block, sent, is_kept=False, keeps=False)
            received = torch.zeros_like(entry)
            receiver = NodeShards(ranks[1 - rank], layout.common_blocks, coded=coded[1 - rank])
            if first < last:
                receiver._receive(block, rank, form, message, received, keeps=False)
            assert message.numel() <= max(part_bytes(block, rank), 1)
            assert torch.equal(received[first:last].view(torch.uint8), sent[first:last].view(torch.uint8))
            packed = slice(max(first, block.stored_numel), max(last, block.stored_numel))
            assert torch.equal(sent[packed].view(torch.uint8), entry[packed].view(torch.uint8))
            plain = slice(first, min(last, block.stored_numel))
            if plain.start < plain.stop:
                assert not torch.equal(sent[plain], entry[plain])

"""Ranks whose devices send weights to each other, over gloo between CPU devices. NCCL does the same between GPUs."""

from __future__ import annotations

import re
import threading
import time
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import divided_experts
import embedding_ranks
import pytest
import test_packed_weights
import torch
from async_device import AsyncDevice
from engines import resolved
from packed_bases import base_of
from test_training import NUM_STEPS, train_rank
from torch import Tensor
from trained_nodes import Training
from training_ranks import Trained, assert_same_ranks, assert_same_run, rank_engine, take_steps, weights_of

from hf_lohan.device import CpuDevice, gpu_links
from hf_lohan.engine import OffloadEngine
from hf_lohan.engine.ranks import open_device_transport
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.sequences import ROWS, cut_rows, sharing_rows
from hf_lohan.ranks import DeviceLane, DeviceLanes, Links, RankFailedError, RankTimeoutError
from hf_lohan.ranks.transport import watch
from hf_lohan.ranks.transport.lanes import LaneClosedError
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks

ROOM = {"gpu_memory": "4MiB"}
"""Also for gradients that devices add."""


def fill(lane: DeviceLane, rank: int, parts: list[tuple[int, int]]) -> Tensor:
    whole = torch.full((parts[-1][1],), -1.0)
    start, stop = parts[rank]
    whole[start:stop] = torch.arange(start, stop, dtype=torch.float32)
    lane.run("its shard of a test", lambda: lane.fill_from_all(whole, parts))
    return whole


TWO_PARTS = [(0, 8), (8, 16)]


@pytest.mark.parametrize("edges", [[0, 1000], [0, 7, 7], [0, 0, 5, 12], [0, 3, 4, 4, 100_000]])
def test_every_device_gets_the_parts_of_all(edges: list[int], over_gloo: None) -> None:
    num_ranks = len(edges) - 1
    parts = list(pairwise(edges))

    def run(links: Links) -> tuple[list[Tensor], int]:
        lane = DeviceLane.open(links, CpuDevice(), "weights")
        found = [fill(lane, links.ranks.rank, parts) for _ in range(3)]
        links.barrier("the end")
        lane.close()
        return found, lane.sent_bytes

    expected = torch.arange(edges[-1], dtype=torch.float32)
    for rank, (found, sent_bytes) in enumerate(run_ranks(num_ranks, run)):
        assert all(torch.equal(whole, expected) for whole in found)
        assert sent_bytes == 3 * 4 * (parts[rank][1] - parts[rank][0]) * (num_ranks - 1)


@pytest.mark.covering(0)
@pytest.mark.parametrize("is_in_exchange", [False, True])
def test_a_rank_that_closes_ends_the_exchange_of_another(
    is_in_exchange: bool, over_gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that has loaded all it needs closes, while another loads ahead. A group of GPUs does not tell that another
    member has aborted it. The rank leaves later."""
    monkeypatch.setattr(watch, "_CYCLE_S", 1.0)

    def run(links: Links) -> None:
        lane = DeviceLane.open(links, CpuDevice(), "weights")
        fill(lane, links.ranks.rank, TWO_PARTS)
        if links.ranks.rank == 0:
            with pytest.raises(
                RankFailedError, match=r"rank 1 .* had closed its model while rank 0 waited for its shard"
            ):
                fill(lane, 0, TWO_PARTS)
        elif is_in_exchange:
            assert lane._group is not None
            lane._group.abort = lambda: None  # type: ignore[method-assign]
            has_closed = threading.Event()
            closing = threading.Timer(0.5, lambda: (lane.close(), has_closed.set()))
            closing.start()
            with pytest.raises(LaneClosedError):
                lane.run("its shard of a test", lambda: has_closed.wait(60))
            closing.join()
        lane.close()
        links.barrier("the end")

    run_ranks(2, run)


def test_closing_ends_the_own_exchange(over_gloo: None) -> None:
    def run(links: Links) -> None:
        lane = DeviceLane.open(links, CpuDevice(), "weights")
        if links.ranks.rank == 0:
            closing = threading.Timer(0.2, lane.close)
            closing.start()
            with pytest.raises(LaneClosedError):
                fill(lane, 0, TWO_PARTS)
            closing.join()
        links.barrier("the end")
        lane.close()

    run_ranks(2, run)


@pytest.mark.parametrize("what", ["die", "hang"])
def test_an_exchange_ends_with_the_name_of_a_rank_that_dies_or_hangs(what: Any, over_gloo: None) -> None:
    timeout_s = 2.0 if what == "hang" else 10.0  # on a busy machine a rank may be silent for 2 s

    def run(links: Links) -> None:
        lane = DeviceLane.open(links, CpuDevice(), "weights")
        while True:
            fill(lane, links.ranks.rank, [(0, 8), (8, 16), (16, 20)])

    fault = Fault(1, what, 5, "weights of devices")
    outcomes = rank_outcomes(3, run, faults=[fault], timeout_s=timeout_s)
    for rank in (0, 2):
        error = outcomes[rank].error
        assert isinstance(error, RankFailedError), error
        assert isinstance(error, RankTimeoutError) or what == "die" or "was silent" in str(error), error
        assert "rank 1" in str(error), error
        assert what == "hang" or "was silent" not in str(error), error


def test_an_exchange_ends_that_has_ended_on_a_rank_that_closed(over_gloo: None) -> None:
    has_closed = threading.Event()

    def run(links: Links) -> Tensor:
        lane, rank = DeviceLane.open(links, CpuDevice(), "weights"), links.ranks.rank
        whole = torch.full((16,), -1.0)
        start, stop = TWO_PARTS[rank]
        whole[start:stop] = torch.arange(start, stop, dtype=torch.float32)

        def enqueue() -> None:
            lane.fill_from_all(whole, TWO_PARTS)
            if rank == 0:
                assert has_closed.wait(60)
                notices = links.watch._board.notices
                while 1 not in notices or lane._lane.name not in notices[1].table["closed"]:
                    time.sleep(1e-3)
                threading.Event().wait(0.5)  # it is judged

        lane.run("its shard of a test", enqueue)
        lane.close()
        has_closed.set()
        links.barrier("the end")
        return whole

    for whole in run_ranks(2, run):
        assert torch.equal(whole, torch.arange(16, dtype=torch.float32))


def test_all_ranks_learn_the_error_of_one_in_an_exchange(over_gloo: None) -> None:
    def run(links: Links) -> None:
        lane = DeviceLane.open(links, CpuDevice(), "weights")

        def fail() -> None:
            raise ValueError("broken on purpose")

        if links.ranks.rank == 1:
            lane.run("its shard of a test", fail)
        fill(lane, 0, TWO_PARTS)

    outcomes = rank_outcomes(2, run)
    for outcome in outcomes:
        assert "broken on purpose" in str(outcome.error), outcome.error


def test_ranks_that_cannot_connect_their_devices_are_told(over_gloo: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_device: CpuDevice, _store: Any, _member: int, _num_members: int) -> None:
        raise RuntimeError("no way to the other GPU")

    monkeypatch.setattr(CpuDevice, "open_group", refuse)
    for outcome in rank_outcomes(2, lambda links: DeviceLane.open(links, CpuDevice(), "weights")):
        assert "no way to the other GPU" in str(outcome.error)


# The setting.


def open_transport(links: Links, folder: Path, transport: str) -> DeviceLanes | None:
    config = resolved(folder, cpu_memory="6MiB", gpu_memory="1MiB", ranks={"transport": transport})
    return open_device_transport(config, CpuDevice(), links)


@pytest.mark.parametrize("transport", ["auto", "host"])
def test_by_default_all_goes_through_host_memory(
    transport: str, tmp_path: Path, over_gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Devices are not asked how they are linked, because the answer may take long."""
    asked: list[object] = []
    monkeypatch.setattr(CpuDevice, "why_no_group", lambda _device, identities: asked.append(identities) or "")
    monkeypatch.setattr(gpu_links, "_output_of", lambda command: asked.append(command) or "")
    assert run_ranks(2, lambda links: open_transport(links, tmp_path, transport)) == [None, None]
    assert not asked


def refusal(folder: Path, num_ranks: int = 2, num_local: int | None = None) -> str:
    """Return the error that all ranks raise."""
    outcomes = rank_outcomes(num_ranks, lambda links: open_transport(links, folder, "nccl"), num_local=num_local)
    texts = {str(outcome.error) for outcome in outcomes}
    assert len(texts) == 1 and all(isinstance(outcome.error, ValueError) for outcome in outcomes), texts
    return texts.pop()


def test_nccl_is_refused_on_cpu_devices(tmp_path: Path) -> None:
    assert refusal(tmp_path) == (
        "ranks.transport: 'nccl' cannot be used, because this run computes on the cpu, and only CUDA devices send to "
        "each other; set transport to host or auto"
    )
    assert "each machine has one rank" in refusal(tmp_path, num_local=1)


def test_nccl_is_refused_for_what_it_does_not_carry(tmp_path: Path, over_gloo: None) -> None:
    assert "each machine has one rank, and only GPUs of one machine" in refusal(tmp_path, num_local=1)
    with pytest.raises(ValueError, match=r"ranks.transport: 'nccl' .* and this is one process"):
        open_transport(Links.alone(), tmp_path, "nccl")


def test_a_reason_of_one_rank_is_raised_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def why_no_group(device: CpuDevice, identities: list[str]) -> str:
        return "GPU 3 cannot reach GPU 1" if threading.current_thread().name == "rank-1" else ""

    monkeypatch.setattr(CpuDevice, "why_no_group", why_no_group)
    assert "because GPU 3 cannot reach GPU 1;" in refusal(tmp_path)


# Training.


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("clip", ["defer", "speculate"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "mixtral"])
def test_training_equals_that_through_host_memory(
    family: str, clip: str, max_norm: float, num_ranks: int, tmp_path: Path, over_gloo: None
) -> None:
    """GPT-2 and OPT have tied heads. The losses, norms and weights have the same bits, and each rank's device sends its
    shard of each loaded block to all others.
    """
    sent: dict[str, dict[int, int]] = {"host": {}, "nccl": {}}
    of_transport: dict[str, list[Trained]] = {}
    for transport in ("host", "nccl"):
        (tmp_path / transport).mkdir()

        def note(engine: OffloadEngine, _step: int, sent: dict[int, int] = sent[transport]) -> None:
            if (devices := engine.tiers.transport) is not None:
                sent[engine.links.ranks.rank] = devices.sent_bytes

        def train(links: Links, transport: str = transport, note: Any = note) -> Trained:
            folder = tmp_path / transport
            return train_rank(
                links, folder, family, max_norm, _clip=clip, **{"ranks.transport": transport}, after_step=note, **ROOM
            )

        of_transport[transport] = run_ranks(num_ranks, train)
    assert_same_ranks(of_transport["nccl"], of_transport["host"])
    assert not sent["host"] and len(sent["nccl"]) == num_ranks
    model_bytes = sum(4 * weight.numel() for weight in of_transport["nccl"][0].weights.values())
    # Forward and backward load each layer in each step. Each rank gets the others' shards.
    assert sum(sent["nccl"].values()) > NUM_STEPS * model_bytes * (num_ranks - 1)


# Several nodes, and codecs.


def compare_transports(training: Training, folder: Path, collectives: Any) -> None:
    """Compare ranks that train with devices that send to each other with ranks that send through host memory."""
    host, nccl = (
        replace(training, transport=transport).run(folder / transport, collectives) for transport in ("host", "nccl")
    )
    for ours, theirs in zip(nccl, host, strict=True):
        assert_same_run(ours, theirs)
        assert ours.sent == theirs.sent
        assert coded_bytes(ours) == coded_bytes(theirs)


def coded_bytes(trained: Any) -> dict[str, Any]:
    names = ("exact_bytes", "sent_bytes")
    return {lane: [figures[name] for name in names] for lane, figures in trained.figures["coded"].items()}


def nodes(num_ranks: int, num_local: int, **options: Any) -> Training:
    """Return a training with a step in which coding errors are not measured any more."""
    return Training(num_ranks, num_local, gpu_memory="8MiB", **options)


@pytest.mark.covering(0)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [4, 6])
@pytest.mark.parametrize(
    "collectives",
    ["exact", "quantized", {"backward": "node", "gradients": "int8"}, {"forward": "delta", "within": "int8"}],
    ids=["exact", "quantized", "node", "delta"],
)
def test_nodes_train_as_through_host_memory(
    collectives: Any, num_ranks: int, dtype: torch.dtype, tmp_path: Path, over_gloo: None
) -> None:
    """With three nodes, the owner's sum is added after those of two others."""
    num_steps = 2 if collectives == "exact" else 4
    compare_transports(nodes(num_ranks, 2, dtype=dtype, evaluates=True, num_steps=num_steps), tmp_path, collectives)


def slowly(*values: int) -> list[Any]:
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]


@pytest.mark.covering(0)
@pytest.mark.parametrize("victim", [1, 2, *slowly(0, 3)])
@pytest.mark.parametrize("at_message", [150, 300, *slowly(*range(60, 460, 20))])
def test_a_dead_rank_ends_the_ranks_of_all_nodes(at_message: int, victim: int, tmp_path: Path, over_gloo: None) -> None:
    training = replace(nodes(4, 2), transport="nccl")

    def train(links: Links) -> Any:
        return training.train_rank(links, tmp_path, "quantized" if at_message % 40 else "exact")

    outcomes = rank_outcomes(4, train, num_local=2, faults=[Fault(victim, "die", at_message)])
    for outcome in outcomes[:victim] + outcomes[victim + 1 :]:
        assert isinstance(outcome.error, RankFailedError), outcome.error
        assert re.match(rf"rank {victim} \(.*\) ended while rank \d ", str(outcome.error)), outcome.error


# What goes beside devices, and packed weights.


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("num_local", [2, 4])
@pytest.mark.parametrize("kind", ["llama", "llama-fp8", "mixtral"])
def test_packed_weights_are_decoded_on_each_device(
    kind: str, num_local: int, tmp_path: Path, over_gloo: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Codes and scales go from device to device."""
    gathered: list[int] = []
    fill_from_all = DeviceLane.fill_from_all

    def note(lane: DeviceLane, whole: Tensor, parts: Any) -> None:
        gathered.append(whole.nbytes)
        fill_from_all(lane, whole, parts)

    monkeypatch.setattr(DeviceLane, "fill_from_all", note)

    def trained(transport: str) -> list[Any]:
        settings: dict[str, Any] = {"experts": "with_layer", "ranks.transport": transport, "gpu_memory": "8MiB"}
        form = None if "-" in kind else test_packed_weights.NF4
        folder = tmp_path / transport
        return test_packed_weights.train_ranks(
            folder, lambda: base_of(kind, form, folder=tmp_path / "base"), num_ranks=4, num_local=num_local, **settings
        )

    host, nccl = trained("host"), trained("nccl")
    assert_same_ranks(nccl, host)
    assert host[0].norms
    layers = {block.codes_bytes for block in nccl[0].layout.blocks} - {0}
    assert layers and sum(gathered) >= 2 * 3 * sum(layers)  # in forward and backward of each step


def rows_of_embeddings(num_ranks: int, folder: Path, transport: str) -> list[Any]:
    settings = {"gpu_memory": "32MiB", "ranks.transport": transport}  # chunks of the same size
    return embedding_ranks.Run(num_ranks, 2, max_norm=0.5, num_steps=2, settings=settings).ranks(folder, "rows")


def streamed_experts(num_ranks: int, folder: Path, transport: str) -> list[Any]:
    settings: dict[str, Any] = {"gpu_memory": "4MiB", "ranks.transport": transport}
    make_model = partial(divided_experts.expert_model, "mixtral")
    train = partial(divided_experts.train_rank, folder=folder, make_model=make_model, **settings)
    return run_ranks(num_ranks, train, num_local=2)


def shared_rows(num_ranks: int, folder: Path, transport: str) -> list[Any]:
    """Keys and values go through shared memory, layer by layer, while devices send weights and gradients."""

    def train(links: Links) -> Trained:
        settings: dict[str, Any] = {**ROOM, "ranks.per_row": 2, "ranks.transport": transport}
        with rank_engine(links, folder, lambda: tiny_model("llama"), **settings) as engine:
            model = engine.model
            layers = {layer: f"model.layers.{number}" for number, layer in enumerate(model.model.layers)}
            run_layers_in_chunks(model, engine.activations, layers, engine.tiers.row_memory).cut(None)

            def loss_of(step: int, _micro: int) -> Tensor:
                own = cut_rows(dict(tiny_batch(seed=step)), links.ranks.rank, 2)
                rows = own.pop(ROWS)
                with sharing_rows(model, rows, own["shift_labels"]):
                    return model(**own, num_items_in_batch=torch.tensor(16)).loss

            found = take_steps(engine, loss_of, NUM_STEPS, max_norm=0.5)
            found.weights = weights_of(engine)
            return found

    return run_ranks(num_ranks, train)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("train", "num_ranks"), [(rows_of_embeddings, 2), (rows_of_embeddings, 4), (streamed_experts, 4), (shared_rows, 2)]
)
def test_other_exchanges_go_beside_devices(train: Any, num_ranks: int, tmp_path: Path, over_gloo: None) -> None:
    host, nccl = (train(num_ranks, tmp_path / transport, transport) for transport in ("host", "nccl"))
    assert_same_ranks(nccl, host)
    for ours, theirs in zip(nccl, host, strict=True):
        for name in ("rows_bytes", "sent_bytes"):
            assert getattr(ours, name, 1) == getattr(theirs, name, 1) > 0


@pytest.mark.slow
@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_no_wait_is_missing_on_nodes_if_copies_run_late(seed: int, tmp_path: Path, over_gloo: None) -> None:
    devices = [AsyncDevice(seed + rank, max_delay_s=5e-4) for rank in range(4)]  # their threads outlive the ranks
    left, parts = iter(devices), {"within": "int8", "gradients": "int4"} if seed % 2 else "exact"
    host = nodes(4, 2, num_steps=2)
    nccl = replace(host, transport="nccl", make_device=lambda: next(left))
    of_host, of_nccl = host.run(tmp_path / "host", parts), nccl.run(tmp_path / "late", parts)
    assert_same_ranks(of_nccl, of_host)
    assert not sum(device.num_races for device in devices)

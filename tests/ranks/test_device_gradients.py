"""Ranks whose devices add gradients, over gloo between CPU devices. Sums have the same bits as on the host, in whatever
order gradients and weights become ready on each rank.
"""

from __future__ import annotations

import random
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from equal_tensors import assert_same_tensors
from exchanged_gradients import NUM_BUFFERS, Backwards, OwnersSums, RankOfExchange, check, exchange_all
from peft import LoraConfig, get_peft_model
from test_branches import ACCUMULATED, CASES, Case, check_ranks, choose_skipped_layers
from test_training import NUM_STEPS, train_rank, train_stock
from torch import Tensor, nn
from training_ranks import Trained, assert_same_ranks, assert_same_run, do_nothing

from hf_lohan.costs import SizeClass
from hf_lohan.device import BufferPool, CpuDevice, Lane
from hf_lohan.engine import OffloadEngine
from hf_lohan.model import lay_out_block
from hf_lohan.ranks import (
    GRADIENTS_INT8,
    DeviceLanes,
    DeviceSums,
    GradientExchange,
    Links,
    MeasuredCodec,
    RankFailedError,
    RanksDisagreeError,
    RankTimeoutError,
)
from hf_lohan.ranks.transport import watch
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks
from hf_lohan.updates.arrival import BackwardContext, GradientArrivals
from hf_lohan.updates.gradient_reduction import GradientReduction
from hf_lohan.updates.gradients import ArrivedChunk, ChunkGradient

__all__ = ["choose_skipped_layers"]

pytestmark = pytest.mark.usefixtures("over_gloo")

ROOM: dict[str, Any] = {"gpu_memory": "8MiB", "ranks.transport": "nccl"}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each published gradient was on a device."""
    published: list[bool] = []
    publish = GradientExchange.publish

    def note(exchange: GradientExchange, *args: Any, is_on_device: bool = False) -> None:
        published.append(is_on_device)
        publish(exchange, *args, is_on_device=is_on_device)

    monkeypatch.setattr(GradientExchange, "publish", note)
    return published


# The exchange.


@pytest.mark.parametrize("seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(6, 200))])
def test_devices_add_in_rank_order_in_any_order_of_arrival(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.choice([2, 3, 4])
    num_nodes = 1 + seed % 3
    dtype, without = draw.choice([torch.float32, torch.bfloat16]), draw.choice([0.0, 0.3, 0.8])
    num_chunks, max_numel = draw.randint(1, 12), draw.choice([10, 5000, 300_000])
    num_local, num_ranks = num_ranks, num_ranks * num_nodes
    backwards = Backwards(num_ranks, num_local, seed, dtype, num_chunks, 2, without, max_numel)

    def run(links: Links) -> OwnersSums:
        return exchange_all(links, backwards, on_device=True, num_loads=seed % 5 * 4)

    check(backwards, run_ranks(num_ranks, run, num_local=num_local, delays_seed=seed))


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", range(3))
def test_sums_are_coded_for_other_nodes_as_on_the_host(seed: int) -> None:
    """The gradient of a single rank is coded before it is multiplied by a sixth."""
    backwards = Backwards(6, 2, seed, torch.bfloat16, share_without=0.5)

    def run(links: Links, on_devices: bool) -> OwnersSums:
        coded = MeasuredCodec("gradients", GRADIENTS_INT8)
        return exchange_all(links, backwards, coded, on_device=on_devices)

    host, nccl = (
        run_ranks(6, lambda links, on_devices=on_devices: run(links, on_devices), num_local=2)  # type: ignore[misc]
        for on_devices in (False, True)
    )
    for ours, theirs in zip(nccl, host, strict=True):
        assert ours.sums.keys() == theirs.sums.keys() and ours.sent_bytes == theirs.sent_bytes
        for name, (total, bits) in theirs.sums.items():
            mean, our_bits = ours.sums[name]
            assert our_bits == bits and (mean is None) == (total is None)
            assert mean is None or torch.equal(mean.view(torch.int32), total.view(torch.int32))


def test_a_gradient_in_ram_is_not_added_to_one_on_a_device() -> None:
    backwards = Backwards(2, 2, seed=0, num_chunks=1, num_steps=1, share_without=0.0)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, backwards, on_device=True)
        buffer = rank.free.get()
        assert buffer is not None
        values = buffer[:4].view(torch.float32)
        rank.exchange.publish(0, values, 1, buffer, is_on_device=links.ranks.rank == 0)
        rank.finish()
        links.barrier("the end")

    errors = [outcome.error for outcome in rank_outcomes(2, run)]
    assert all(error is not None and "and the other has it in RAM" in str(error) for error in errors), errors
    assert any(isinstance(error, RanksDisagreeError) for error in errors)


@pytest.mark.covering(0)
@pytest.mark.parametrize("what", ["die", "hang"])
@pytest.mark.parametrize(("num_ranks", "num_local", "victim"), [(3, 3, 0), (3, 3, 1), (3, 3, 2), (4, 2, 1), (4, 2, 2)])
def test_a_sum_ends_with_the_name_of_a_rank_that_dies_or_hangs(
    num_ranks: int, num_local: int, victim: int, what: Any
) -> None:
    """Another node waits for sums of the victim's node, which does not send them."""
    timeout_s = 2.0 if what == "hang" else 10.0
    backwards = Backwards(num_ranks, num_local, seed=3, num_chunks=NUM_BUFFERS, num_steps=10, share_without=0.0)

    def run(links: Links) -> None:
        exchange_all(links, backwards, on_device=True)

    fault = Fault(victim, what, 6, "gradients of devices")
    outcomes = rank_outcomes(num_ranks, run, num_local=num_local, faults=[fault], timeout_s=timeout_s)
    assert outcomes[victim].error is not None or what == "hang", "the fault did not happen"
    for rank in set(range(num_ranks)) - {victim}:
        error = outcomes[rank].error
        assert isinstance(error, RankFailedError), error
        assert isinstance(error, RankTimeoutError) or what == "die" or "was silent" in str(error), error
        assert f"rank {victim}" in str(error), error
        assert what == "hang" or "was silent" not in str(error), error


ONE_SUM = Backwards(2, 2, seed=5, num_chunks=1, num_steps=1, share_without=0.0)


def test_a_sum_ends_if_a_rank_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank leaves later."""
    monkeypatch.setattr(watch, "_CYCLE_S", 1.0)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, ONE_SUM, on_device=True)
        rank.publish(0, 0)
        if links.ranks.rank == 1:
            assert rank.lanes is not None
            rank.lanes.close()
            links.barrier("what the other rank waits for")
        rank.finish()
        links.barrier("the end")

    outcome = rank_outcomes(2, run)[0]
    assert "rank 1" in str(outcome.error) and "had closed its model while rank 0 waited" in str(outcome.error)


def test_a_rank_that_closes_ends_no_run_after_a_dropped_step() -> None:
    def run(links: Links) -> None:
        rank = RankOfExchange(links, ONE_SUM, on_device=True)
        rank.publish(0, 0)
        rank.exchange.abandon()
        if links.ranks.rank == 1:
            rank.end()
        links.barrier("the closed rank to be known")
        rank.end()
        links.barrier("the end")

    run_ranks(2, run)


def test_all_ranks_learn_the_error_of_one_that_needs_no_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    add = DeviceSums.add

    def fail(sums: DeviceSums, sends: list[Any], *args: Any, **options: Any) -> Any:
        if sends:
            raise ValueError("broken on purpose")
        return add(sums, sends, *args, **options)

    monkeypatch.setattr(DeviceSums, "add", fail)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, ONE_SUM, on_device=True)
        rank.publish(0, 0)
        rank.finish()
        links.barrier("the end")

    for outcome in rank_outcomes(2, run):
        assert "broken on purpose" in str(outcome.error), outcome.error


class ReducingRank:
    """One rank whose gradients go to the device of rank 1, through two buffers."""

    def __init__(self, links: Links, device: CpuDevice) -> None:
        parameters = {f"p{i}": nn.Parameter(torch.zeros(GRANULE_NUMEL, 1)) for i in range(4)}
        block = lay_out_block("block", SizeClass.LAYER, parameters)
        block.rank_edges = (0, 0, block.fetched_numel)
        chunks = block.cut(2 * GRANULE_NUMEL)
        self.parts, num_bytes = block.slices, 8 * GRANULE_NUMEL
        self.lanes = DeviceLanes.open(links, device)
        sums = DeviceSums(device, self.lanes.gradients, links.ranks, num_bytes)
        self.host, self.on_device = (
            BufferPool(device, name=name, num_buffers=num, buffer_bytes=num_bytes)
            for name, num in (("gradients", 2), ("gradients on the device", 1))
        )
        self.reduction = GradientReduction(links, device, self.host, None, chunks, None, sums)  # type: ignore[arg-type]
        self.reduction.start(lambda command: command(), self._fail, lambda gradient: None)
        pipeline: Any = SimpleNamespace(
            measure_gradient=lambda part, gradient: None,
            has_gradients=False,
            count_backward=lambda: 1,
            wait_for_ranks=self.reduction.waiting,
            held_back=lambda submitted: [],
            updates_in_backward=False,
            updates_chunk=self.reduction.owns,
            submit=self._publish,
        )
        self.arrivals = GradientArrivals(device, self.host, chunks, pipeline, to_devices=self.on_device)
        self.arrivals.begin_backward(BackwardContext())
        links.barrier("all ranks to be ready")

    def close(self) -> None:
        self.reduction.close()
        self.lanes.close()

    def _fail(self, error: BaseException) -> None:
        for pool in (self.host, self.on_device):
            pool.abort(error)

    def _publish(self, arrived: ArrivedChunk, **_options: Any) -> None:
        arrived.wait_for_copies()
        slices = {piece.param_slice for piece in arrived.pieces}
        gradient = ChunkGradient(arrived.chunk, arrived.buffer, slices, arrived.dtype, on_device=arrived.on_device)
        self.reduction.publish_gradient(gradient, lambda gradient: None, lambda: None)


def test_a_wait_for_a_buffer_ends_with_the_name_of_a_rank_that_does_nothing() -> None:
    """The buffers of rank 1 are full of gradients that rank 0 has not published."""
    has_ended = threading.Event()

    def run(links: Links) -> None:
        rank = ReducingRank(links, CpuDevice())
        try:
            for part in rank.parts[: 1 if links.ranks.rank == 0 else 4]:
                rank.arrivals.send_gradient(part, torch.ones(GRANULE_NUMEL, 1))
            has_ended.wait(60)
        finally:
            has_ended.set()
            rank.close()

    errors = [outcome.error for outcome in rank_outcomes(2, run, timeout_s=2.0)]
    assert "rank 0" in str(errors[1]) and "was silent for 2 s while rank 1 waited for gradients" in str(errors[1])


def test_zeros_of_a_dropped_step_are_written_before_a_buffer_is_free() -> None:
    """Work in the lane in which gradients are sent comes late."""
    devices = [AsyncDevice(0, max_delay_s=0.0) for _ in range(2)]  # their threads outlive the ranks
    found: list[Tensor] = []

    def run(links: Links) -> None:
        device = devices[links.ranks.rank]
        rank = ReducingRank(links, device)
        if links.ranks.rank == 0:
            may_end = threading.Event()
            device._lanes[Lane.D2H_ASIDE].queue.put(lambda: may_end.wait(1.0))
            rank.arrivals.send_gradient(rank.parts[0], torch.ones(GRANULE_NUMEL, 1))
            rank.arrivals.flush()  # without the chunk's second parameter
            rank.reduction.drop_step()
            buffer = rank.on_device.acquire()
            values = buffer.bytes.view(torch.float32)
            device.copy(Lane.D2H, values, torch.full_like(values, 7.0))
            device.record(Lane.D2H).synchronize()
            may_end.set()
            device.record(Lane.D2H_ASIDE).synchronize()
            found.append(values.clone())
        else:
            rank.reduction.drop_step()
        links.barrier("the end")
        rank.close()

    run_ranks(2, run)
    assert found[0].eq(7.0).all()


# Training.


def test_all_gradients_of_one_backward_go_from_device_to_device(tmp_path: Path, ways: list[bool]) -> None:
    """Mean gradients reach the host once for each element, and are in float32."""
    copied: list[int] = []

    class Counting(CpuDevice):
        def copy(self, lane: Any, dst: Tensor, src: Tensor) -> None:
            if lane.value == "d2h aside":
                copied.append(dst.nbytes)
            super().copy(lane, dst, src)

    stock = train_stock("llama", 4, 0.5)
    for ours in run_ranks(4, lambda links: train_rank(links, tmp_path, "llama", 0.5, device=Counting(), **ROOM)):
        assert_same_tensors(ours.weights, stock.weights)
    assert ways and all(ways)
    num_params = sum(weight.numel() for weight in stock.weights.values())
    assert 4 * NUM_STEPS * num_params <= sum(copied) < 1.2 * 4 * NUM_STEPS * num_params


def freeze(engine: OffloadEngine, step: int) -> None:
    inner = engine.model.model
    for part in (inner.embed_tokens, inner.layers[0], inner.layers[1].mlp):
        part.requires_grad_(step == 1)


def drop(engine: OffloadEngine, step: int) -> None:
    """Drop the gradients on one rank, whether or not those of others have been added to them."""
    engine.model(**tiny_batch(seed=step)).loss.backward()
    if engine.links.ranks.rank == step % 2:
        time.sleep(0.01 * step)
    engine.drop_gradients()


def spoils(step: int, rank: int) -> bool:
    return (step, rank) == (1, 1)


# A third is no float, so each operation of three ranks rounds.
WAYS: dict[str, dict[str, Any]] = {
    "three in bfloat16": {"num_ranks": 3, "dtype": torch.bfloat16},
    "three experts in bfloat16": {"num_ranks": 3, "dtype": torch.bfloat16, "family": "mixtral"},
    "accumulated": {"accumulation": 3, "_clip": "defer"},
    "accumulated, guessed": {"accumulation": 3, "_clip": "speculate"},
    "together": {"accumulation": 3, "is_joint": True, "dtype": torch.bfloat16},
    "a dropped step": {"after_step": drop},
    **{f"frozen, {max_norm}": {"after_step": freeze, "max_norm": max_norm} for max_norm in (0.0, 0.5)},
    **{f"not finite, {max_norm}": {"spoils": spoils, "max_norm": max_norm} for max_norm in (0.0, 0.5)},
}
QUICK = ("three in bfloat16", "accumulated", "a dropped step", "frozen, 0.0", "not finite, 0.0")


@pytest.mark.parametrize("way", slow_but(QUICK, WAYS))
def test_devices_add_as_the_host_does(way: str, tmp_path: Path, ways: list[bool]) -> None:
    """Accumulated gradients are added on the host, unless they are of micro-batches that run together."""
    skipped: list[bool] = []
    run: dict[str, Any] = {"num_ranks": 2, "family": "llama", "max_norm": 0.5, **WAYS[way]}
    num_ranks, after_step = run.pop("num_ranks"), run.pop("after_step", do_nothing)

    def end_step(engine: OffloadEngine, step: int) -> None:
        skipped.append(engine.step_was_skipped)
        after_step(engine, step)

    host, nccl = (
        run_ranks(num_ranks, partial(train_rank, folder=tmp_path / by, after_step=end_step, **run, **room))
        for by, room in (("host", {**ROOM, "ranks.transport": "host"}), ("nccl", ROOM))
    )
    assert_same_ranks(nccl, host)
    assert any(ways) is not way.startswith("accumulated")
    assert sum(skipped) == (4 if "spoils" in run else 0)


def tiny_adapters() -> Any:
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    return get_peft_model(tiny_model("llama"), config)


def plain_batch(_branch: Any, seed: int) -> dict[str, Any]:
    return dict(tiny_batch(seed=seed))


ADAPTERS = Case(tiny_adapters, plain_batch, [[None, None]] * 4)


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("name", [*CASES, "adapters"])
def test_adapters_and_ranks_whose_batches_pass_different_layers(
    name: str, max_norm: float, tmp_path: Path, ways: list[bool]
) -> None:
    """Some gradients are on one rank only, which may not be their owner."""
    check_ranks({**CASES, "adapters": ADAPTERS}[name], tmp_path, max_norm, **ROOM)
    assert ways and all(ways)


@pytest.mark.covering(0)
@pytest.mark.parametrize("name", ACCUMULATED)
def test_accumulated_gradients_of_ranks_whose_batches_differ(name: str, tmp_path: Path, ways: list[bool]) -> None:
    check_ranks(ACCUMULATED[name], tmp_path, 0.5, **ROOM)
    assert ways and not any(ways)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_no_wait_is_missing_if_copies_run_late(seed: int, family: str, tmp_path: Path, ways: list[bool]) -> None:
    stock = train_stock(family, 2, 0.5)
    devices = [AsyncDevice(seed, max_delay_s=2e-2) for _ in range(2)]  # their threads outlive the ranks

    def train(links: Links) -> Trained:
        return train_rank(links, tmp_path, family, 0.5, device=devices[links.ranks.rank], **ROOM)

    for rank, ours in enumerate(run_ranks(2, train, delays_seed=seed)):
        assert_same_run(ours, stock, rank, 2)
    assert not sum(device.num_races for device in devices)
    assert any(ways)

"""Ranks find out which loads they have in common."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from lockstep_ranks import make_blocks, slots_for
from torch import Tensor, nn

from hf_lohan.device import CpuDevice, Event, Lane
from hf_lohan.model import Block, lay_out_block
from hf_lohan.planner import SizeClass
from hf_lohan.ranks import Channel, CodedTraffic, Kind, Links, RanksDisagreeError
from hf_lohan.store import GRANULE_NUMEL
from hf_lohan.testing.thread_ranks import run_ranks
from hf_lohan.weights import SlotRing
from hf_lohan.weights.joint_order import UNKNOWN_PLACE, JointOrder, LentShards, Standing
from hf_lohan.weights.load_order import first_of_period
from hf_lohan.weights.lockstep_loader import LockstepLoader
from hf_lohan.weights.node_shards import NodeShards
from hf_lohan.weights.peer_weights import PeerWeightCache

ORDERED = 3
"""Number of loads that rank 0 has ordered in period 2."""


def on_rank_0(check: Callable[[JointOrder, Links], None]) -> None:
    def run(links: Links) -> None:
        if links.ranks.rank == 0:
            check(JointOrder(links, cast(Any, None), lambda first, are_equal: None, lambda: None), links)

    run_ranks(2, run)


def standing(**changes: object) -> Standing:
    first = first_of_period(2)
    known: dict[str, object] = {"next_number": first + ORDERED, "has": lambda number: first <= number < first + ORDERED}
    return Standing(**{**known, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("number", "num_ended", "changes", "is_missing"),
    [
        (first_of_period(2) + 1, 0, {"is_idle": True, "num_ended": 1}, False),  # ordered here too
        (first_of_period(2) + 3, 0, {"is_idle": True, "num_ended": 1}, True),  # of a pass that has ended here
        (first_of_period(2) + 3, 1, {"is_idle": True, "num_ended": 1}, False),  # may follow here
        (first_of_period(2) + 3, 0, {"is_idle": False, "num_ended": 1}, False),  # earlier loads still run
        (first_of_period(1) + 9, 0, {"is_idle": False}, True),  # of a step that has ended here
        (first_of_period(3), 0, {"is_idle": True, "num_ended": 1}, False),  # of a step that has not ended here
    ],
)
def test_a_load_is_missing_if_this_rank_will_not_order_it(
    number: int, num_ended: int, changes: dict[str, object], is_missing: bool
) -> None:
    def check(order: JointOrder, links: Links) -> None:
        order.note_wanted(1, number, 0, UNKNOWN_PLACE, num_ended)
        assert (order.find_missing(standing(**changes)) == number) == is_missing

    on_rank_0(check)


@pytest.mark.parametrize(("block", "place", "is_common"), [(4, 4096, True), (5, 4096, False), (4, 0, False)])
@pytest.mark.parametrize("hears_first", [False, True])
def test_another_block_or_place_of_the_same_load_is_a_cut(
    hears_first: bool, block: int, place: int, is_common: bool
) -> None:
    def check(order: JointOrder, links: Links) -> None:
        with links.lock:
            order.begin(6, 1, 0)
        if hears_first:
            order.note_wanted(1, 7, block, place, 0)
        with links.lock:
            order.begin(7, 4, 4096)
        if not hears_first:
            order.note_wanted(1, 7, block, place, 0)
        assert [order.is_common(number) for number in (6, 7, 8)] == [True, is_common, is_common]
        assert order.is_common(first_of_period(1)), "the next step begins together"

    on_rank_0(check)


def test_a_failed_load_ends_after_all_ranks_have_answered() -> None:
    """Otherwise a late shard would overwrite the next block in the slot."""
    weights = torch.zeros(2 * GRANULE_NUMEL)
    may_answer = threading.Event()

    def run(links: Links) -> None:
        block = lay_out_block("layer", SizeClass.LAYER, {"layer": nn.Parameter(torch.empty(2 * GRANULE_NUMEL))})
        block.rank_edges = (0, 0, GRANULE_NUMEL, 2 * GRANULE_NUMEL)
        if links.ranks.rank == 0:
            shards = LentShards(
                CpuDevice(),
                *(cast(Any, None),) * 3,  # this rank has no shard
                links,
                [block],
                NodeShards(links.ranks, [block]),
                None,
                piece_bytes=1 << 20,
                notify=links.notify,
            )
            shards.begin_load(5, block, weights, None)
            links.set_handler(Kind.SHARD, shards.handlers[Kind.SHARD])
            load = shards.load
            assert load is not None
            links.wait_for(lambda: load.error is not None, "the error")
            assert shards.finish_load(is_wanted=False) is None
            assert shards.missing_ranks() == [2]
            may_answer.set()
            links.wait_for(lambda: not load.missing, "the shard")
            with pytest.raises(RanksDisagreeError, match="it is changed"):
                shards.finish_load(is_wanted=True)
        elif links.ranks.rank == 1:
            links.send(0, Kind.SHARD, 5, 0, 0, 0, 1, payload=b"it is changed", channel=Channel.WEIGHTS)
        else:
            may_answer.wait(60.0)
            links.send(
                0, Kind.SHARD, 5, 0, 0, GRANULE_NUMEL, 0, payload=torch.ones(GRANULE_NUMEL), channel=Channel.WEIGHTS
            )
        links.barrier("the end")

    run_ranks(3, run)
    assert weights.tolist() == [0.0] * GRANULE_NUMEL + [1.0] * GRANULE_NUMEL


class FailingSource:
    """A `JointSource` whose first lent load fails when `may_end` is set. Later loads succeed."""

    def __init__(self) -> None:
        self.begun: list[tuple[str, str]] = []
        self.may_end = threading.Event()
        self._num_ended = 0
        self._changed = threading.Condition()

    def begin_load(
        self, number: int, block: Block, version: int, is_wanted: Callable[[], bool], num_ended: int = 0
    ) -> bool:
        self.begun.append(("common", block.name))
        return True

    def is_common(self, number: int) -> bool:
        return number > 0

    def is_whole(self, number: int) -> bool:
        return True

    def finish_load(self, number: int, weights: Tensor, free: Event | None) -> Event:
        return CpuDevice().record(Lane.H2D)

    def begin_lent_load(self, number: int, block: Block, weights: Tensor, free: Event | None) -> None:
        self.begun.append(("lent", block.name))

    def finish_lent_load(self, *, is_wanted: bool) -> Event | None:
        if not self.may_end.is_set():
            return None
        raise RanksDisagreeError("rank 1 has changed the block")

    def advance_loads(self) -> bool:
        return False

    def give_up_loads(self) -> None: ...

    def stand_by(self, standing: Standing, looks_again_after_s: float) -> None: ...

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None: ...

    def wait(self) -> None:
        with self._changed:
            self._changed.wait(0.01)

    def notify(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None: ...

    def close(self) -> None: ...


@pytest.mark.parametrize("is_needed", [False, True])
def test_a_failed_load_ends_the_run_only_if_compute_needs_it(is_needed: bool) -> None:
    all_blocks = make_blocks()
    blocks, source = all_blocks[1:4], FailingSource()
    ring = SlotRing(CpuDevice(), slots_for(all_blocks, num_layer_slots=3, num_outer_slots=1))
    loader = LockstepLoader(ring, source, blocks)
    try:
        loader.foresee_pass(is_training=False)
        while not source.begun:
            time.sleep(1e-3)
        if is_needed:
            threading.Timer(0.05, source.may_end.set).start()
            with pytest.raises(RanksDisagreeError, match="rank 1 has changed"):
                loader.acquire(blocks[0])
        else:
            time.sleep(0.02)
            assert source.begun == [("lent", "layer0")], "no load of all ranks begins before the lent one has ended"
            source.may_end.set()
            loader.begin_pass(is_training=False)
            for block in blocks[1:]:
                loader.acquire(block)
            assert ring.pin(blocks[0]) is None, "the slot of the failed load is empty"
            loader.acquire(blocks[0])
            assert source.begun == [("lent", "layer0"), *(("common", f"layer{i}") for i in (1, 2, 0))]
    finally:
        source.may_end.set()
        loader.close()

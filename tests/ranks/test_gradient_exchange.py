"""Owners get the gradients of all ranks in any order and sum them in rank order."""

from __future__ import annotations

import random
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from exchanged_gradients import Backwards, OwnersSums, Place, RankOfExchange, check, exchange_all
from gloo_devices import gloo_between_cpus
from torch import Tensor

from hf_lohan.ranks import CompleteGradient, GradientExchange, Links, RankFailedError, RanksDisagreeError, SharedRegion
from hf_lohan.ranks.collectives import node_sums
from hf_lohan.ranks.collectives.node_sums import ChunkOfNodes, NodeSums, PartsOfNode
from hf_lohan.ranks.transport import watch
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks

LAYOUTS = [(1, 1), (2, 2), (3, 3), (4, 4), (8, 8), (2, 1), (3, 1), (4, 2), (4, 1), (6, 2), (8, 2)]
"""The number of ranks, and the number of ranks per node."""


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("num_ranks", "num_local"), LAYOUTS)
def test_owners_get_the_sum_in_rank_order_and_all_buffers_are_released(
    num_ranks: int, num_local: int, dtype: torch.dtype
) -> None:
    backwards = Backwards(num_ranks, num_local, seed=num_ranks, dtype=dtype)
    found = run_ranks(num_ranks, lambda links: exchange_all(links, backwards), num_local=num_local, delays_seed=3)
    check(backwards, found)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2), (4, 1)])
def test_large_chunks_are_sent_between_nodes_in_pieces(num_ranks: int, num_local: int) -> None:
    backwards = Backwards(num_ranks, num_local, seed=1, max_numel=600_000, num_steps=1, share_without=0.0)
    check(backwards, run_ranks(num_ranks, lambda links: exchange_all(links, backwards), num_local=num_local))


@pytest.mark.parametrize("num_nodes", [2, 3])
def test_pieces_for_different_owners_go_in_one_exchange(num_nodes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """So links are busy in both directions. With an exchange for each owner, a step over slow links took longer."""
    monkeypatch.setattr(node_sums, "SUM_PIECE_NUMEL", 500)
    backwards = Backwards(num_nodes, 1, seed=2, num_chunks=num_nodes, share_without=0.0, max_numel=2500)
    every_node = {node: PartsOfNode(1, torch.float32) for node in range(num_nodes)}

    def run(links: Links) -> tuple[int, Tensor]:
        sums, rank = NodeSums(links), links.ranks.rank
        begun: list[object] = []
        begin = sums._lane.begin_exchange
        monkeypatch.setattr(sums._lane, "begin_exchange", lambda *args: begun.append(args) or begin(*args))
        total = torch.empty(backwards.numel(rank))
        chunks = []
        for owner in range(num_nodes):  # the key of its chunk
            gradient, out = backwards.gradient(0, rank, owner), total if owner == rank else None
            assert gradient is not None
            chunks.append(
                ChunkOfNodes(owner, owner, backwards.numel(owner), every_node, [gradient], out, is_added=False)
            )
        sums.add(chunks)
        sums.close()
        return len(begun), total

    most_pieces = max(-(-backwards.numel(key) // 500) for key in range(num_nodes))
    assert most_pieces > 1
    for rank, (num_begun, total) in enumerate(run_ranks(num_nodes, run, num_local=1)):
        expected = backwards.mean(0, rank)
        assert expected is not None
        assert num_begun == most_pieces and torch.equal(total, expected)


def run_drawn(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks, num_local = draw.choice([layout for layout in LAYOUTS if 1 < layout[0] <= 6])
    dtype = draw.choice([torch.float32, torch.bfloat16])
    max_numel = draw.choice([10, 5_000, 5_000, 300_000])
    share_without = draw.choice([0.0, 0.1, 0.7])
    backwards = Backwards(num_ranks, num_local, seed, dtype, draw.randint(1, 6), 2, share_without, max_numel)
    found = run_ranks(num_ranks, lambda links: exchange_all(links, backwards), num_local=num_local, delays_seed=seed)
    check(backwards, found)


def test_sums_are_right_for_any_order_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sums, "SUM_PIECE_NUMEL", 700)
    for seed in range(8):
        run_drawn(seed)


@pytest.mark.slow
def test_sums_are_right_for_a_thousand_orders_of_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node_sums, "SUM_PIECE_NUMEL", 5000)
    for seed in range(8, 1008):
        run_drawn(seed)


def test_no_gradient_is_sent_within_a_node() -> None:
    backwards = Backwards(4, 4, seed=9, max_numel=100_000)
    sent_bytes: list[dict[str, int]] = []

    def run(links: Links) -> OwnersSums:
        found = exchange_all(links, backwards)
        sent_bytes.append(links.sent_bytes)
        return found

    check(backwards, run_ranks(4, run))
    assert all(sum(sent.values()) == sent["control"] < 20_000 for sent in sent_bytes)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2), (4, 1)])
def test_a_sum_may_overwrite_the_owners_own_gradient(
    num_ranks: int, num_local: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_sums, "SUM_PIECE_NUMEL", 500)
    backwards = Backwards(num_ranks, num_local, seed=4, num_chunks=6, share_without=0.0)

    class InPlace(RankOfExchange):
        def place(self, step: int, key: int) -> Place:
            return Place(self.published[step, key])

        def note_complete(self, complete: CompleteGradient) -> None:
            assert complete.place is not None
            total = complete.place.values.clone()
            self.sums.sums[complete.step, complete.key] = (total, complete.slice_bits)

    def run(links: Links) -> OwnersSums:
        return InPlace(links, backwards).run()

    check(backwards, run_ranks(num_ranks, run, num_local=num_local))


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "num_local"), [(1, 1), (3, 3), (4, 2), (4, 1)])
def test_an_abandoned_backward_releases_all_buffers_and_the_next_one_is_complete(
    num_ranks: int, num_local: int
) -> None:
    for seed in range(6):
        backwards = Backwards(num_ranks, num_local, seed, share_without=0.1)
        breaks = num_ranks - 1

        def run(links: Links, backwards: Backwards = backwards, breaks: int = breaks) -> OwnersSums:
            rank = RankOfExchange(links, backwards)
            keys = backwards.order(0, links.ranks.rank)
            for key in keys[: len(keys) // 2]:
                rank.publish(0, key)
            if links.ranks.rank == breaks:
                rank.exchange.abandon()
                rank.exchange.begin_next()
            else:
                for key in keys[len(keys) // 2 :]:
                    rank.publish(0, key)
                rank.finish()
            rank.publish_all(1)
            assert rank.finish()
            return rank.close()

        found = run_ranks(num_ranks, run, num_local=num_local, delays_seed=seed)
        for rank, sums in enumerate(found):
            assert sums.num_left == 0
            for key, owner in backwards.owners.items():
                expected = backwards.mean(1, key)
                if owner == rank and expected is not None:
                    total, _ = sums.sums[1, key]
                    assert total is not None
                    assert torch.equal(total, expected)


@pytest.mark.parametrize("ends_first", [False, True])
def test_a_step_that_is_abandoned_again_leaves_the_next_one_whole(ends_first: bool) -> None:
    """An interrupt may end the call that drops a step, which is then called again."""
    backwards = Backwards(2, 2, seed=7, share_without=0.0)

    def run(links: Links) -> OwnersSums:
        rank = RankOfExchange(links, backwards)
        first, *_ = backwards.order(0, links.ranks.rank)
        rank.publish(0, first)
        if ends_first:
            rank.exchange.end_backward()
        rank.exchange.abandon()
        rank.exchange.abandon()
        assert all(map(rank.exchange.has_told, backwards.owners))
        rank.exchange.begin_next()
        assert not any(map(rank.exchange.has_told, backwards.owners))
        rank.publish_all(1)
        assert rank.finish()
        return rank.close()

    for rank, found in enumerate(run_ranks(2, run, delays_seed=1)):
        assert found.num_left == 0
        assert {key for step, key in found.sums if step == 1} == {
            key for key, owner in backwards.owners.items() if owner == rank
        }


def test_a_rank_without_a_gradient_releases_the_buffers_of_others_early() -> None:
    """Buffers are released before the backward ends, because a rank without free buffers would wait for them."""
    backwards = Backwards(4, 2, seed=6, num_chunks=8, num_steps=1, share_without=0.5)

    def run(links: Links) -> OwnersSums:
        rank = RankOfExchange(links, backwards)
        rank.publish_all(0)
        rank.exchange.end_backward()
        rank.wait_for_all_buffers()
        assert rank.finish()
        return rank.close()

    check(backwards, run_ranks(4, run, num_local=2, delays_seed=1))


@pytest.mark.parametrize("on_device", [False, True])
def test_other_ranks_do_not_learn_that_a_sum_is_unwanted(on_device: bool) -> None:
    backwards = Backwards(4, 2, seed=2, num_steps=1)

    class Dropping(RankOfExchange):
        def place(self, step: int, key: int) -> None:
            return None

        def note_complete(self, complete: CompleteGradient) -> None:
            self.sums.sums[complete.step, complete.key] = (None, 0)

    with gloo_between_cpus():
        found = run_ranks(
            4, lambda links: Dropping(links, backwards, on_device=on_device).run(), num_local=2, delays_seed=1
        )
    assert all(sums.num_left == 0 for sums in found)
    assert {key for sums in found for _, key in sums.sums} == set(backwards.owners)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2), (4, 1)])
@pytest.mark.parametrize("at_operation", [0, 9, 25])
def test_a_rank_that_dies_ends_all_others(num_ranks: int, num_local: int, at_operation: int) -> None:
    backwards = Backwards(num_ranks, num_local, seed=5, num_steps=20, share_without=0.1)

    def run(links: Links) -> int:
        rank = RankOfExchange(links, backwards)
        try:
            for step in range(backwards.num_steps):
                rank.publish_all(step)
                rank.finish()
        except RankFailedError:
            rank.exchange.abandon()  # releases published gradients even if their owner is dead
            freed.append(not rank.exchange._published)
            raise
        finally:
            rank.end()

    freed: list[bool] = []
    fault = Fault(1, "die", at_operation, "sums" if num_local < num_ranks and at_operation > 9 else "gradients")
    timeout_s = 20.0 if num_local > 1 else 2.0  # no other rank of its node sees its end
    outcomes = rank_outcomes(
        num_ranks, run, num_local=num_local, faults=[fault], delays_seed=at_operation, timeout_s=timeout_s
    )
    for rank in (0, *range(2, num_ranks)):
        error = outcomes[rank].error
        assert isinstance(error, RankFailedError)
        assert error.rank == 1
    assert all(freed) and len(freed) >= num_ranks - 1


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "num_local"), [(4, 2), (3, 3)])
@pytest.mark.parametrize("lane", ["gradients", "control"])
def test_a_rank_that_hangs_is_named_by_all_others(num_ranks: int, num_local: int, lane: str) -> None:
    backwards = Backwards(num_ranks, num_local, seed=5, num_steps=20, share_without=0.0)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, backwards)
        try:
            for step in range(backwards.num_steps):
                rank.publish_all(step)
                rank.finish()
                links.barrier("the next step")
        finally:
            rank.end()

    outcomes = rank_outcomes(num_ranks, run, num_local=num_local, faults=[Fault(1, "hang", 8, lane)], timeout_s=2.0)
    for rank in (0, *range(2, num_ranks)):
        assert "rank 1 " in str(outcomes[rank].error), outcomes[rank].error
        assert "was silent for 2 s while rank" in str(outcomes[rank].error)


def test_a_sum_that_takes_long_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """As over a slow link. While the owner adds, it waits for no computation. The other rank waits for the owner."""
    monkeypatch.setattr(watch, "_CYCLE_S", 0.2)
    add = NodeSums.add

    def add_slowly(sums: NodeSums, chunks: Sequence[ChunkOfNodes]) -> None:
        if any(chunk.owner == 1 for chunk in chunks):
            threading.Event().wait(0.8)
        add(sums, chunks)

    monkeypatch.setattr(NodeSums, "add", add_slowly)
    backwards = Backwards(2, 1, seed=1, num_chunks=4, num_steps=1, share_without=0.0)
    assert set(backwards.owners.values()) == {0, 1}

    def run(links: Links) -> OwnersSums:
        rank = RankOfExchange(links, backwards)
        if links.ranks.rank == 0:
            threading.Event().wait(0.3)  # so that the other one has told that it waits
        rank.publish_all(0)
        rank.finish()
        links.barrier("the end of the step")
        return rank.close()

    run_ranks(2, run, num_local=1, timeout_s=30)


CALLBACKS: Any = {
    "completed": lambda _: None,
    "release": lambda _: None,
    "place": lambda _step, _key: Place(torch.empty(101)),
}


def test_gradients_of_different_sizes_are_refused() -> None:
    def run(links: Links) -> None:
        region = SharedRegion.create(links, 2 * 4096, "gradients")
        exchange = GradientExchange(links, {7: 0}, region, **CALLBACKS)
        mine = region.bytes[4096 * links.ranks.rank :].view(torch.float32)
        exchange.publish(7, mine[: 100 + links.ranks.rank], 1, None)
        exchange.end_backward()
        exchange.wait_until_complete()
        links.barrier("the end")

    outcomes = rank_outcomes(2, run)
    assert any(isinstance(outcome.error, RanksDisagreeError) for outcome in outcomes)
    for outcome in outcomes:
        assert "rank 0 has 100 elements of torch.float32 in chunk 7, and rank 1 has 101" in str(outcome.error)


def test_a_gradient_that_the_owner_cannot_read_is_refused() -> None:
    def run(links: Links) -> None:
        exchange = GradientExchange(links, {7: 0}, None, **CALLBACKS)
        exchange.publish(7, torch.zeros(10), 1, None)
        exchange.end_backward()
        exchange.wait_until_complete()

    outcomes = rank_outcomes(2, run)
    assert "chunk 7 is not in the memory that the ranks of this node share" in str(outcomes[1].error)

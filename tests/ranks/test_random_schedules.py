"""Ranks whose threads communicate in random orders, each in its own lane, never wait forever."""

from __future__ import annotations

import random
import threading

import pytest
import torch

from hf_lohan.ranks import Links, RankLane, bytes_of
from hf_lohan.testing.thread_ranks import run_ranks


def run_schedule(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.choice([2, 3, 4])
    plans = [[draw.choice(["gather", "share", "exchange", "barrier"]) for _ in range(8)] for _ in range(2)]
    owners = [draw.randrange(num_ranks) for _ in range(8)]
    numels = [draw.choice([1, 1000, 300_000]) for _ in range(8)]

    def follow(lane: RankLane, plan: list[str]) -> None:
        rank = lane.place
        for step, (what, owner, numel) in enumerate(zip(plan, owners, numels, strict=True)):
            match what:
                case "gather":
                    payload = bytes([rank, step]) * (step % 2 * 200 + 1)
                    gathered = lane.agree(f"{step}", payload)
                    assert [told[:2] for told in gathered] == [bytes([other, step]) for other in range(num_ranks)]
                case "barrier":
                    lane.barrier(f"{step}")
                case "share":
                    tensor = torch.full((numel,), float(rank))
                    lane.broadcast(tensor, owner, f"{step}")
                    assert bool((tensor == owner).all())
                case "exchange":
                    sizes = [4 * numel * (other != rank) for other in range(num_ranks)]
                    sent = torch.full((numel * (num_ranks - 1),), float(rank + step))
                    received = torch.empty_like(sent)
                    lane.exchange(bytes_of(sent), sizes, bytes_of(received), sizes, f"{step}")
                    others = [other for other in range(num_ranks) if other != rank]
                    for other, piece in zip(others, received.split(numel), strict=True):
                        assert bool((piece == other + step).all())

    def follow_both(links: Links) -> list[int]:
        lanes = [links.open("pieces", stops_compute=bool(number)) for number in range(2)]
        errors: list[BaseException] = []

        def beside() -> None:
            try:
                follow(lanes[0], plans[0])
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=beside)
        thread.start()
        follow(lanes[1], plans[1])
        thread.join(60)
        assert not errors and not thread.is_alive(), errors
        links.barrier("the end")
        return [lane.sent_bytes for lane in lanes]

    of_ranks = run_ranks(num_ranks, follow_both, delays_seed=seed)
    for number, plan in enumerate(plans):
        sent_bytes = [sent[number] for sent in of_ranks]
        of_each = sum(4 * numel for what, numel in zip(plan, numels, strict=True) if what == "exchange")
        shared = sum(4 * numel for what, numel in zip(plan, numels, strict=True) if what == "share")
        small = sum(sent_bytes) - (num_ranks - 1) * (num_ranks * of_each + shared)
        assert 0 <= small < 8 * num_ranks**2 * 1000


def test_ranks_communicate_in_any_order() -> None:
    for seed in range(10):
        run_schedule(seed)


@pytest.mark.slow
def test_ranks_communicate_in_a_thousand_orders() -> None:
    for seed in range(10, 1010):
        run_schedule(seed)

"""Ranks that communicate in random orders never wait forever."""

from __future__ import annotations

import random

import pytest
import torch

from hf_lohan.ranks import Channel, Kind, Links, PayloadReader
from hf_lohan.testing.thread_ranks import run_ranks


def run_schedule(seed: int) -> None:
    draw = random.Random(seed)
    num_ranks = draw.choice([2, 3, 4])
    plan = [draw.choice(["gather", "share", "send", "barrier"]) for _ in range(8)]
    owners = [draw.randrange(num_ranks) for _ in plan]
    numels = [draw.choice([1, 1000, 300_000]) for _ in plan]

    def follow(links: Links) -> int:
        rank, others = links.ranks.rank, links.ranks.others
        landed: dict[tuple[int, int], torch.Tensor] = {}

        def land(peer: int, numbers: tuple[int, ...], payload: PayloadReader | None) -> None:
            tensor = torch.empty(numbers[1])
            payload.read_into(tensor)
            with links.lock:
                landed[numbers[0], peer] = tensor
                links.notify()

        links.set_handler(Kind.PIECE, land)
        for step, (what, owner, numel) in enumerate(zip(plan, owners, numels, strict=True)):
            match what:
                case "gather":
                    gathered = links.all_gather(f"{step}", bytes([rank, step]))
                    assert gathered == [bytes([other, step]) for other in range(num_ranks)]
                case "barrier":
                    links.barrier(f"{step}")
                case "share":
                    tensor = torch.full((numel,), float(rank))
                    links.broadcast(tensor, owner, f"{step}")
                    assert bool((tensor == owner).all())
                case "send":
                    for other in others:
                        tensor = torch.full((numel,), float(rank + step))
                        links.send(other, Kind.PIECE, step, numel, payload=tensor, channel=Channel.GRADIENTS)
                    links.wait_for(
                        lambda step=step: all((step, other) in landed for other in others),
                        f"the pieces of {step}",
                        peers=lambda step=step: [other for other in others if (step, other) not in landed],
                    )
                    for other in others:
                        assert bool((landed[step, other] == other + step).all())
        return links.sent_bytes[Channel.GRADIENTS]

    sent_bytes = run_ranks(num_ranks, follow, delays_seed=seed)
    of_each = sum(4 * numel * (num_ranks - 1) for what, numel in zip(plan, numels, strict=True) if what == "send")
    assert sent_bytes == [of_each] * num_ranks


def test_ranks_communicate_in_any_order() -> None:
    for seed in range(10):
        run_schedule(seed)


@pytest.mark.slow
def test_ranks_communicate_in_a_thousand_orders() -> None:
    for seed in range(10, 1010):
        run_schedule(seed)

"""Ranks read weights together in rank 0's order, to the end of it, or until rank 0 fails."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.engine import CollectiveReads
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NAMES = [f"weight.{number}" for number in range(20)]


class JointAccess:
    """Each weight lies on one rank, which gives it to all others: reads in another order would not meet."""

    parts: dict[str, Any] = dict.fromkeys(NAMES)

    def __init__(self, links: Links) -> None:
        self._links = links
        self.read: list[str] = []

    def read_parameter(self, name: str) -> Tensor:
        self.read.append(name)
        owner = NAMES.index(name) % self._links.ranks.num_ranks
        value = torch.full((7,), float(NAMES.index(name)) if owner == self._links.ranks.rank else -1.0)
        self._links.broadcast(value, owner, name)
        return value

    def read_masters(self, name: str, first: int, last: int) -> Tensor:
        return self.read_parameter(name)[first:last]

    def read_pieces(self, name: str, kind: str, first: int, last: int) -> Iterator[tuple[int, Tensor]]:
        for start in range(first, last):
            yield start, self.read_parameter(name)[:1] + start


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_the_others_read_what_rank_0_reads(num_ranks: int) -> None:
    order = random.Random(0).choices(NAMES, k=30)

    def save(links: Links) -> list[str]:
        access = JointAccess(links)
        reads = CollectiveReads(lambda: access, links)  # type: ignore[arg-type, return-value]
        if links.ranks.rank:
            reads.follow_rank_0()
        else:
            with reads.leading():
                for name in order:
                    assert torch.equal(reads.read_parameter(name), torch.full((7,), float(NAMES.index(name))))
        links.barrier("all are at the same place again")
        return access.read

    assert run_ranks(num_ranks, save, delays_seed=1) == [order] * num_ranks


def test_all_read_masters_together() -> None:
    def save(links: Links) -> list[str]:
        access = JointAccess(links)
        reads = CollectiveReads(lambda: access, links)  # type: ignore[arg-type, return-value]
        if links.ranks.rank:
            reads.follow_rank_0()
        else:
            with reads.leading():
                assert torch.equal(reads.read_masters(NAMES[5], 2, 4), torch.full((2,), 5.0))
        return access.read

    assert run_ranks(2, save, delays_seed=1) == [[NAMES[5]]] * 2


@pytest.mark.parametrize("stops_after", [2, 10])
def test_all_read_to_the_end_what_rank_0_leaves_half_way(stops_after: int) -> None:
    def save(links: Links) -> list[str]:
        access = JointAccess(links)
        reads = CollectiveReads(lambda: access, links)  # type: ignore[arg-type, return-value]
        if links.ranks.rank:
            reads.follow_rank_0()
        else:
            with reads.leading():
                pieces = reads.read_pieces(NAMES[3], "param", 4, 9)
                found = [(start, float(piece)) for (start, piece), _ in zip(pieces, range(stops_after), strict=False)]
                assert found == [(4, 7.0), (5, 8.0), (6, 9.0), (7, 10.0), (8, 11.0)][:stops_after]
                pieces.close()  # type: ignore[attr-defined]
                reads.read_parameter(NAMES[0])
        return access.read

    assert run_ranks(2, save, delays_seed=1) == [[NAMES[3]] * 5 + [NAMES[0]]] * 2


def test_the_others_learn_why_rank_0_gave_up() -> None:
    def save(links: Links) -> None:
        access = JointAccess(links)
        reads = CollectiveReads(lambda: access, links)  # type: ignore[arg-type, return-value]
        if links.ranks.rank:
            reads.follow_rank_0()
        with reads.leading():
            reads.read_parameter(NAMES[0])
            raise OSError("no space left")

    writer, *others = (outcome.error for outcome in rank_outcomes(3, save))
    assert isinstance(writer, OSError)
    for error in others:
        assert isinstance(error, RankFailedError) and "no space left" in str(error)

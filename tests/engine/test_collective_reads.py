"""All ranks read weights together in rank 0's order, until rank 0 ends or fails."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.engine import CollectiveReads
from hf_lohan.ranks import Links, RankFailedError
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NAMES = [f"weight.{number}" for number in range(20)]


class JointAccess:
    """Each weight is on one rank, which broadcasts it. Reads in another order would not match."""

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


def read_by_ranks(num_ranks: int, lead: Callable[[CollectiveReads], object]) -> list[list[str]]:
    """Let rank 0 read by `lead` and the others follow. Return the names that each rank read."""

    def read(links: Links) -> list[str]:
        access = JointAccess(links)
        reads = CollectiveReads(lambda: access, links)  # type: ignore[arg-type, return-value]
        if links.ranks.rank:
            reads.follow_rank_0()
        else:
            with reads.leading():
                lead(reads)
        links.barrier("all ranks have read")
        return access.read

    return run_ranks(num_ranks, read, delays_seed=1)


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_other_ranks_read_what_rank_0_reads(num_ranks: int) -> None:
    order = random.Random(0).choices(NAMES, k=30)

    def lead(reads: CollectiveReads) -> None:
        for name in order:
            assert torch.equal(reads.read_parameter(name), torch.full((7,), float(NAMES.index(name))))

    assert read_by_ranks(num_ranks, lead) == [order] * num_ranks


def test_all_ranks_read_masters_together() -> None:
    def lead(reads: CollectiveReads) -> None:
        assert torch.equal(reads.read_masters(NAMES[5], 2, 4), torch.full((2,), 5.0))

    assert read_by_ranks(2, lead) == [[NAMES[5]]] * 2


@pytest.mark.parametrize("stops_after", [2, 10])
def test_a_read_that_rank_0_abandons_is_completed_by_all_ranks(stops_after: int) -> None:
    def lead(reads: CollectiveReads) -> None:
        pieces = reads.read_pieces(NAMES[3], "param", 4, 9)
        found = [(start, float(piece)) for (start, piece), _ in zip(pieces, range(stops_after), strict=False)]
        assert found == [(4, 7.0), (5, 8.0), (6, 9.0), (7, 10.0), (8, 11.0)][:stops_after]
        pieces.close()  # type: ignore[attr-defined]
        reads.read_parameter(NAMES[0])

    assert read_by_ranks(2, lead) == [[NAMES[3]] * 5 + [NAMES[0]]] * 2


def test_other_ranks_raise_the_error_of_rank_0() -> None:
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

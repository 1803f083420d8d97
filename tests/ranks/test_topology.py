"""Numbers of ranks and nodes."""

from __future__ import annotations

import pytest

from hf_lohan.ranks import SINGLE_RANK, Ranks


def test_ranks_are_numbered_node_by_node() -> None:
    ranks = Ranks(rank=5, num_ranks=6, local_rank=2, num_local=3)
    assert (ranks.node, ranks.num_nodes) == (1, 2)
    assert ranks.others == [0, 1, 2, 3, 4]
    assert list(ranks.on_this_node) == [3, 4, 5]
    assert ranks.rank_at(node=0, local_rank=2) == 2
    assert ranks.of_rank(1) == Ranks(1, 6, 1, 3)


def test_one_rank_is_alone() -> None:
    assert (SINGLE_RANK.others, list(SINGLE_RANK.on_this_node), SINGLE_RANK.num_nodes) == ([], [0], 1)


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ((0, 8, 0, 3), "8 ranks cannot be divided into nodes of 3"),
        ((4, 4, 0, 4), "rank 4 is not below 4"),
        ((-1, 2, 1, 2), "rank -1 is not below 2"),
        ((3, 4, 0, 2), "rank 3 has local rank 0, but on nodes of 2 ranks it has 1"),
    ],
)
def test_impossible_numbers_are_refused(ranks: tuple[int, int, int, int], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Ranks(*ranks)

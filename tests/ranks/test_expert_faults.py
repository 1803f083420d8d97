"""A rank that ends within an exchange of rows ends the others, by an error that names it."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
from divided_experts import Chosen, half_to_one, train_rank

from hf_lohan.ranks import CallOfRank, ExpertCall, Links, RankFailedError, RowExchange
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes


@pytest.mark.covering(0)
@pytest.mark.parametrize("at", [3, 6, *(pytest.param(at, marks=pytest.mark.slow) for at in range(7, 60, 4))])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2)])
def test_a_rank_that_dies_in_the_exchange_ends_the_others(
    at: int, num_ranks: int, num_local: int, tmp_path: Path
) -> None:
    balances = at % 2 == 0
    fault = Fault(1, "die", at, "lent experts" if balances else "tokens")
    train = partial(
        train_rank,
        folder=tmp_path,
        make_model=Chosen("mixtral", half_to_one),
        **{"experts.balance": 1 if balances else False},
    )
    outcomes = rank_outcomes(num_ranks, train, faults=[fault], num_local=num_local)
    for rank, outcome in enumerate(outcomes):
        assert isinstance(outcome.error, RankFailedError)
        assert rank == fault.rank or re.match(r"rank 1 \(pid \d+, \S+\) ended", str(outcome.error)), outcome.error


def test_a_rank_that_is_silent_is_named_with_the_experts() -> None:
    def call(links: Links) -> None:
        own = CallOfRank(ExpertCall(0, 0, 0), 1, (0, 0))
        RowExchange(links).next_call(own, "the rows of layers.0.mlp.experts")

    faults = [Fault(1, "hang", 0, "tokens")]
    errors = [str(outcome.error) for outcome in rank_outcomes(2, call, timeout_s=2.0, faults=faults)]
    assert re.match(
        r"rank 1 .*was silent for 2 s while rank 0 waited for the rows of layers.0.mlp.experts", errors[0]
    ), errors

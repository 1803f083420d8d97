"""A rank that ends within an exchange of rows ends the others, by an error that names it."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from divided_experts import Chosen, half_to_one, train_rank
from rank_processes import RankProcesses

from hf_lohan.experts import Lending
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


def kills_itself(links: Links, report: Callable[[object], None], folder: Path, at_call: int, balances: bool) -> None:
    """Kill rank 1 when it is about to return results, or to lend or borrow an expert, or to give a gradient."""
    calls = iter(range(at_call))

    def killing(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            if links.ranks.rank == 1 and next(calls, None) is None:
                report("is killed")
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args)

        return call

    for room, name in MAY_END_IN if balances else MAY_END_IN[:1]:
        setattr(room, name, killing(getattr(room, name)))
    train_rank(links, folder, Chosen("mixtral", half_to_one), **{"experts.balance": 1 if balances else False})


MAY_END_IN = [(RowExchange, "return_results"), *((Lending, name) for name in ("lend", "borrow", "give_gradient"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balances", "at_call"), [(False, 0), (False, 7), (False, 20), *((True, at_call) for at_call in range(0, 48, 4))]
)
def test_the_kill_of_a_rank_in_the_exchange_ends_the_others(
    fork_server: None, balances: bool, at_call: int, tmp_path: Path
) -> None:
    ranks = RankProcesses(3, partial(kills_itself, folder=tmp_path, at_call=at_call, balances=balances))
    try:
        ranks.assert_killed_and_named(1)
    finally:
        ranks.close()

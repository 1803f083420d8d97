"""A rank that ends within an exchange of rows ends the others, by an error that names it."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from divided_experts import Chosen, half_to_one, train_rank
from rank_processes import RankProcesses

from hf_lohan.experts import Lending
from hf_lohan.ranks import Channel, ExpertCall, Links, RowExchange
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks


def error_of(function: Callable[[], object]) -> tuple[str, float]:
    """Return the error of a rank, and the time at which it came. The error's traceback would keep threads alive."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic()
    return "", 0.0


@pytest.mark.parametrize("at_message", [3, 6, *(pytest.param(at, marks=pytest.mark.slow) for at in range(7, 60, 4))])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2)])
def test_a_rank_that_dies_in_the_exchange_ends_the_others(
    at_message: int, num_ranks: int, num_local: int, tmp_path: Path
) -> None:
    fault = Fault(1, "die", at_message, Channel.TOKENS)
    balance = 1 if at_message % 2 == 0 else False
    train = partial(train_rank, folder=tmp_path, make_model=Chosen("mixtral", half_to_one), balance_experts=balance)
    ends = run_ranks(num_ranks, lambda links: error_of(partial(train, links)), faults=[fault], num_local=num_local)
    for error, at_s in ends:
        assert re.match(r"RankFailedError: rank \d (\(pid \d+, \S+\) )?", error), error
        assert at_s - ends[fault.rank][1] < 5


def test_a_rank_that_is_silent_is_named_with_the_experts() -> None:
    def call(links: Links) -> None:
        exchange = RowExchange(links)
        links.barrier("all to listen")
        if links.ranks.rank == 0:
            exchange.next_call(ExpertCall(0, 0, 0), "the rows of layers.0.mlp.experts")
        time.sleep(2.0)

    errors = [str(outcome.error) for outcome in rank_outcomes(2, call, timeout_s=0.5)]
    assert re.match(
        r"rank 1 .*said nothing for 0.5 s while rank 0 waited for the rows of layers.0.mlp.experts", errors[0]
    ), errors


def kills_itself(links: Links, report: Callable[[object], None], folder: Path, at_call: int, balances: bool) -> None:
    """Kill rank 1 when it is about to return results, or to lend an expert, to give it back, or to give a gradient."""
    calls = iter(range(at_call))

    def killing(method: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any) -> None:
            if links.ranks.rank == 1 and next(calls, None) is None:
                report(time.monotonic())
                os.kill(os.getpid(), signal.SIGKILL)
            method(*args)

        return call

    for room, name in MAY_END_IN if balances else MAY_END_IN[:1]:
        setattr(room, name, killing(getattr(room, name)))
    train_rank(links, folder, Chosen("mixtral", half_to_one), balance_experts=1 if balances else False)


MAY_END_IN = [(RowExchange, "send_results"), *((Lending, name) for name in ("lend", "give_back", "send_gradient"))]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("balances", "at_call"), [(False, 0), (False, 7), (False, 20), *((True, at_call) for at_call in range(0, 60, 4))]
)
def test_the_kill_of_a_rank_in_the_exchange_ends_the_others(
    fork_server: None, balances: bool, at_call: int, tmp_path: Path
) -> None:
    ranks = RankProcesses(3, partial(kills_itself, folder=tmp_path, at_call=at_call, balances=balances))
    try:
        ranks.assert_killed_and_named(1)
    finally:
        ranks.close()

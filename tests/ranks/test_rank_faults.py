"""If a rank dies, fails or hangs, every other rank soon raises an error that names it and the wait."""

from __future__ import annotations

import re
import threading
from contextlib import suppress

import pytest

from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError, RankTimeoutError
from hf_lohan.ranks.transport import watch
from hf_lohan.testing.thread_ranks import Fault, Outcome, rank_outcomes, run_ranks


def many_steps(links: Links) -> str:
    for step in range(200):
        links.all_gather(f"the norm of step {step}", b"1")
    return "done"


def errors_of(outcomes: list[Outcome[str]], but: int) -> list[BaseException]:
    """Return the errors of all ranks but one."""
    found = [outcome.error for rank, outcome in enumerate(outcomes) if rank != but]
    assert all(error is not None for error in found)
    return [error for error in found if error is not None]


@pytest.mark.covering(2)
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("at_operation", [0, 1, 30])
def test_other_ranks_name_a_dead_rank(at_operation: int, num_ranks: int) -> None:
    outcomes = rank_outcomes(num_ranks, many_steps, faults=[Fault(1, "die", at_operation)], delays_seed=at_operation)
    last = f"({at_operation}|{at_operation - 1})"  # of a rank that had not ended the operation before
    for rank, error in zip([0, *range(2, num_ranks)], errors_of(outcomes, but=1), strict=True):
        assert isinstance(error, RankFailedError)
        told = rf"rank 1 \(pid \d+, \S+\) ended while rank {rank} waited for the norm of step {last}$"
        assert re.match(told, str(error)), error
        assert error.rank == 1


def test_a_rank_that_closes_has_told_all_others_of_a_failure() -> None:
    """Otherwise they name it, although it has ended because of another rank."""

    def fail(links: Links) -> str:
        if links.ranks.rank != 0:
            return many_steps(links)
        links.fail(RankFailedError("rank 7 ended", 7))
        links.close()
        return ""

    for error in errors_of(rank_outcomes(3, fail), but=0):
        assert isinstance(error, RankFailedError) and error.rank == 7, error


@pytest.mark.parametrize(("num_ranks", "connects_within_s"), [(2, 2.0), (3, 60.0)])
def test_a_rank_that_hangs_is_named_after_the_timeout_which_may_be_changed(
    num_ranks: int, connects_within_s: float
) -> None:
    def run(links: Links) -> str:
        links.watch.timeout_s = 2.0
        return many_steps(links)

    outcomes = rank_outcomes(num_ranks, run, faults=[Fault(1, "hang", 30)], timeout_s=connects_within_s)
    errors = errors_of(outcomes, but=1)
    assert any(isinstance(error, RankTimeoutError) for error in errors)
    for error in errors:
        assert isinstance(error, RankFailedError)
        assert re.match(r"rank 1 \(pid \d+, \S+\) was silent for 2 s while rank \d waited for the norm", str(error))
        assert error.rank == 1


def test_the_rank_that_hangs_is_named_even_behind_others_that_wait() -> None:
    """Rank 0 waits for rank 1, which waits for rank 2 in another lane."""

    is_named = threading.Event()

    def run(links: Links) -> str:
        pairs = [
            links.open(f"pair {first}", [first, first + 1], stops_compute=True)
            for first in (0, 1)
            if links.ranks.rank in (first, first + 1)
        ]
        links.barrier("the start")
        try:
            for pair in reversed(pairs):
                if links.ranks.rank == 2:
                    is_named.wait(60)
                pair.agree("what hangs")
        finally:
            if links.ranks.rank == 1:  # rank 2 would answer it if rank 0 alone knew the failure
                is_named.set()
        return "done"

    outcomes = rank_outcomes(3, run, timeout_s=2.0)
    for error in errors_of(outcomes, but=2):
        assert isinstance(error, RankFailedError) and error.rank == 2, error


def test_a_rank_whose_threads_serve_others_while_its_computation_hangs_is_named() -> None:
    is_over = threading.Event()

    def run(links: Links) -> str:
        lane = links.open("loads")

        def serve() -> None:
            while not is_over.is_set():
                try:
                    lane.agree("the next round")
                except RankFailedError:
                    return

        threading.Thread(target=serve).start()
        try:
            if links.ranks.rank == 1:
                is_over.wait(60)
            links.barrier("the next step")
        finally:
            is_over.set()
        return "done"

    outcomes = rank_outcomes(2, run, timeout_s=2.0)
    assert isinstance(outcomes[0].error, RankTimeoutError) and outcomes[0].error.rank == 1


def test_a_wait_for_the_own_threads_is_no_disagreement(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread beside the computation may read its drive for longer than ranks need to notice a circle."""
    monkeypatch.setattr(watch, "_CYCLE_S", 0.2)

    def run(links: Links) -> str:
        lane, is_late = links.open("loads"), links.ranks.rank == 1

        def load() -> None:
            if is_late:
                threading.Event().wait(0.8)
            lane.agree("a block")

        thread = threading.Thread(target=load)
        thread.start()
        with links.watch.waiting(lane.name):
            thread.join()
        links.barrier("the end")
        return "done"

    assert [outcome.result for outcome in rank_outcomes(2, run)] == ["done"] * 2


def test_two_lanes_that_wait_for_each_other_are_an_error_with_both_calls() -> None:
    def run(links: Links) -> str:
        saves = links.open("saves", stops_compute=True)
        if links.ranks.rank == 1:
            saves.barrier("a save")
        return many_steps(links)

    outcomes = rank_outcomes(2, run, timeout_s=1.0)
    assert any(isinstance(outcome.error, RanksDisagreeError) for outcome in outcomes)
    for outcome in outcomes:
        assert "'a save'" in str(outcome.error) and "'the norm of step 0'" in str(outcome.error)


def test_an_error_in_a_thread_beside_the_computation_fails_all_ranks() -> None:
    def fail(links: Links) -> str:
        links.barrier("the start")
        if links.ranks.rank == 1:
            threading.Thread(target=links.fail, args=(LookupError("no block 7"),)).start()
        return many_steps(links)

    outcomes = rank_outcomes(3, fail, delays_seed=1)
    assert isinstance(outcomes[1].error, LookupError)
    for error in errors_of(outcomes, but=1):
        assert re.match(r"rank 1 \(.*\) failed: LookupError: no block 7 while rank \d waited for", str(error))


def test_a_clean_end_fails_ranks_that_wait_for_the_rank() -> None:
    def leave(links: Links) -> str:
        links.barrier("the start")
        return "done" if links.ranks.rank == 1 else many_steps(links)

    outcomes = rank_outcomes(3, leave)
    assert outcomes[1].result == "done"
    for rank in (0, 2):
        told = r"rank 1 \(.*\) had ended its run while rank \d waited for the norm of step 0"
        assert re.match(told, str(outcomes[rank].error)), outcomes[rank].error


def test_all_ranks_name_the_first_failure() -> None:
    """Later failures that it causes are not named."""

    def pass_on(links: Links) -> str:
        links.barrier("the start")
        rank, num_ranks = links.ranks.rank, links.ranks.num_ranks
        if rank == num_ranks - 1:
            raise ValueError("a bad batch")
        try:
            return many_steps(links)
        except RankFailedError as error:
            raise RuntimeError("the trainer failed") from error

    for seed in range(3):
        outcomes = rank_outcomes(5, pass_on, delays_seed=seed)
        for error in errors_of(outcomes, but=4):
            cause = error.__cause__
            assert isinstance(cause, RankFailedError) and cause.rank == 4
            assert "rank 4" in str(cause).split("failed: ValueError: a bad batch")[0]


def test_a_failure_callback_is_called_without_a_wait() -> None:
    all_listen = threading.Barrier(3)

    def ask(links: Links) -> int:
        told: list[RankFailedError] = []
        is_told = threading.Event()
        links.add_failure_callback(lambda error: (told.append(error), is_told.set()))
        all_listen.wait()
        if links.ranks.rank == 0:
            raise ValueError("no")
        assert is_told.wait(60)
        assert str(told[0]).endswith(f"failed: ValueError: no while rank {links.ranks.rank} was running")
        return told[0].rank

    outcomes = rank_outcomes(3, ask)
    assert [outcome.result for outcome in outcomes[1:]] == [0, 0]


def test_the_end_of_another_rank_is_not_looked_into_after_the_own_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank would wait half a second for each of the others."""
    looked_into: list[int] = []
    monkeypatch.setattr(watch.Watch, "_note_end", lambda watch, rank: looked_into.append(rank))
    run_ranks(3, lambda links: links.barrier("the end"))
    assert not looked_into


def test_a_rank_that_tells_that_it_works_is_waited_for() -> None:
    def work(links: Links) -> str:
        links.barrier("the start")
        if links.ranks.rank == 0:
            for _ in range(15):
                links.watch.beat()
                threading.Event().wait(0.1)
        links.barrier("the end")
        return "done"

    assert [outcome.result for outcome in rank_outcomes(2, work, timeout_s=0.9)] == ["done"] * 2


@pytest.mark.parametrize("tells", ["idle", "needs"])
def test_a_wait_for_another_computation_beside_its_lane_is_a_disagreement(
    tells: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 waits for gradients that the computation of rank 1 must give, and rank 1 waits for it in a barrier. The
    thread of rank 1 is idle, or takes part and has nothing to give."""
    monkeypatch.setattr(watch, "_CYCLE_S", 0.2)

    def run(links: Links) -> str:
        lane, rank, is_over = links.open("gradients"), links.ranks.rank, threading.Event()

        def give() -> None:
            with suppress(RankFailedError, RanksDisagreeError):
                if rank == 0 or tells == "needs":
                    lane.agree("gradients")
                else:
                    with links.watch.idle(lane.name):
                        is_over.wait(60)

        threading.Thread(target=give, daemon=True).start()
        links.add_failure_callback(lambda _error: is_over.set())
        try:
            if rank == 1:
                links.barrier("a save")
            with links.watch.waiting(lane.name, needs=lambda: [1] if tells == "needs" else []):
                is_over.wait(60)
            links.raise_if_failed("waited for gradients")
        finally:
            is_over.set()
        return "done"

    outcomes = rank_outcomes(2, run)
    for outcome in outcomes:
        assert "rank 0 waits for 'gradients'" in str(outcome.error), outcome.error
        assert "rank 1 waits for 'a save'" in str(outcome.error)

"""One exchange per step decides the same on all ranks."""

from __future__ import annotations

from exchanged_gradients import Backwards, RankOfExchange

from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError, StepAgreement
from hf_lohan.ranks.transport.agreements import END_OF_STEP
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks


def test_all_ranks_get_the_measurements_of_each() -> None:
    def run(links: Links) -> list[bytes]:
        agreement = StepAgreement(links)
        measured = (bytes([links.ranks.rank]), b"" if links.ranks.rank else b"more")
        return [of_rank for own in measured for of_rank in agreement.apply_gradients(own)]

    assert run_ranks(3, run, delays_seed=1) == [[b"\0", b"\1", b"\2", b"more", b"", b""]] * 3


def test_the_next_step_is_committed_if_all_ranks_request_it() -> None:
    wishes = [(False, False), (True, False), (True, True), (False, True), (True, True)]

    def run(links: Links) -> list[bool | None]:
        agreement, found = StepAgreement(links), []
        found.append(agreement.commits_next)
        for of_ranks in wishes:
            agreement.request_commit(of_ranks[links.ranks.rank])
            agreement.apply_gradients(b"")
            found.append(agreement.commits_next)
        agreement.request_commit(False)
        agreement.drop_gradients()  # a step that is dropped changes nothing
        found.append(agreement.commits_next)
        return found

    assert run_ranks(2, run) == [[None, False, False, True, False, True, True]] * 2


def test_a_request_to_end_on_one_rank_ends_all_after_the_same_step() -> None:
    def run(links: Links) -> list[bool]:
        agreement, ends = StepAgreement(links), []
        for step in range(3):
            if (links.ranks.rank, step) == (1, 1):
                agreement.request_end()
            ends.append(agreement.ends_run)  # a request counts after the exchange
            agreement.apply_gradients(b"")
            ends.append(agreement.ends_run)
        return ends

    assert run_ranks(3, run) == [[False, False, False, True, True, True]] * 3


def test_a_single_rank_ends_on_request() -> None:
    with Links.alone() as links:
        agreement = StepAgreement(links)
        assert not agreement.ends_run
        agreement.request_end()
        assert agreement.ends_run


def test_a_rank_that_drops_a_step_of_another_is_named() -> None:
    def run(links: Links) -> None:
        agreement = StepAgreement(links)
        if links.ranks.rank == 1:
            agreement.drop_gradients()
        agreement.apply_gradients(b"")

    errors = [outcome.error for outcome in rank_outcomes(2, run)]
    assert any(isinstance(error, RanksDisagreeError) for error in errors)
    assert any("rank 0 applies the step's gradients, and rank 1 drops them" in str(error) for error in errors) or any(
        "rank 1 drops the step's gradients, and rank 0 applies them" in str(error) for error in errors
    )


def test_a_rank_in_another_exchange_is_named_while_others_wait_for_its_gradients() -> None:
    """The error is raised at once. Both ranks are healthy and would otherwise wait for each other."""
    backwards = Backwards(2, 2, seed=3, num_steps=1, share_without=0.0)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, backwards)
        try:
            if links.ranks.rank == 1:
                links.barrier("a checkpoint")
            rank.exchange.wait_until_complete(rank.exchange.end_backward(), before=END_OF_STEP)
        finally:
            rank.end()

    outcomes = rank_outcomes(2, run, timeout_s=20)
    told = "rank 0 is at 'the end of the step' where rank 1 is at 'a checkpoint'"
    assert isinstance(outcomes[0].error, RanksDisagreeError) and told in str(outcomes[0].error)
    assert isinstance(outcomes[1].error, RankFailedError) and told in str(outcomes[1].error)
    assert outcomes[0].took_s < 10

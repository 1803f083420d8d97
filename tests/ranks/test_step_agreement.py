"""One exchange per step decides the same on all ranks."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from exchanged_gradients import Backwards, RankOfExchange
from torch import Tensor
from training_ranks import rank_engine, weights_of
from transformers import PreTrainedModel

from hf_lohan.absent import gathered_parameters
from hf_lohan.engine import OffloadEngine
from hf_lohan.optim import OffloadAdamW
from hf_lohan.ranks import Links, RankFailedError, RanksDisagreeError, StepAgreement
from hf_lohan.ranks.transport import watch
from hf_lohan.testing.models import tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import Outcome, rank_outcomes, run_ranks


def test_all_ranks_get_the_measurements_of_each() -> None:
    def run(links: Links) -> list[bytes]:
        agreement = StepAgreement(links)
        measured = (bytes([links.ranks.rank]), b"" if links.ranks.rank else b"more")
        return [of_rank for own in measured for of_rank in agreement.apply_gradients(own)]

    assert run_ranks(3, run, delays_seed=1) == [[b"\0", b"\1", b"\2", b"more", b"", b""]] * 3


def test_the_next_step_is_committed_if_all_ranks_request_it() -> None:
    requests = [(False, False), (True, False), (True, True), (False, True), (True, True)]

    def run(links: Links) -> list[bool | None]:
        agreement, found = StepAgreement(links), []
        found.append(agreement.commits_next)
        for of_ranks in requests:
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


def step_by_ranks(*of_ranks: tuple[float, float | None]) -> list[BaseException | None]:
    """Let ranks take a step, each with its (learning rate, norm of the clip), and return their errors."""

    def run(links: Links) -> None:
        lr, max_norm = of_ranks[links.ranks.rank]
        agreement = StepAgreement(links)
        agreement.compare_settings(lambda: {"step": 7, "lr of param group 0": lr})
        agreement.apply_gradients(b"measured", max_norm)

    return [outcome.error for outcome in rank_outcomes(len(of_ranks), run)]


@pytest.mark.parametrize(
    ("of_rank_2", "expected"),
    [
        ((0.2, 1.0), "lr of param group 0 is 0.1 on rank 0 and 0.2 on rank 2; step 7 was not taken"),
        ((0.1, 2.0), "max_norm is 1.0 on rank 0 and 2.0 on rank 2; step 7 was not taken"),
        ((0.1, None), "max_norm is 1.0 on rank 0 and null on rank 2; step 7 was not taken"),
    ],
)
def test_a_rank_with_other_hyperparameters_is_named(of_rank_2: tuple[float, float | None], expected: str) -> None:
    errors = step_by_ranks((0.1, 1.0), (0.1, 1.0), of_rank_2)
    assert all(isinstance(error, RanksDisagreeError | RankFailedError) and expected in str(error) for error in errors)
    assert any(isinstance(error, RanksDisagreeError) for error in errors)


@pytest.fixture
def soon_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks notice early that they wait for each other."""
    monkeypatch.setattr(watch, "_CYCLE_S", 0.2)


def test_a_rank_in_another_exchange_is_named_while_others_wait_for_its_gradients(soon_noticed: None) -> None:
    """Both ranks are healthy and would otherwise wait for each other."""
    backwards = Backwards(2, 2, seed=3, num_steps=1, share_without=0.0)

    def run(links: Links) -> None:
        rank = RankOfExchange(links, backwards)
        try:
            if links.ranks.rank == 1:
                links.barrier("a checkpoint")
            rank.finish()
        finally:
            rank.end()

    outcomes = rank_outcomes(2, run, timeout_s=20)
    assert any(isinstance(outcome.error, RanksDisagreeError) for outcome in outcomes)
    for outcome in outcomes:
        assert "waits for 'gradients'" in str(outcome.error) and "waits for 'a checkpoint'" in str(outcome.error)


# Calls that only one rank makes.


def train_differently(
    folder: Path,
    between: Callable[[OffloadEngine, int, int], bool] = lambda engine, rank, step: True,
    *,
    num_steps: int = 3,
    zeroing_rank: int = -1,
    uses_head: Callable[[int], bool] = lambda step: True,
) -> Sequence[Outcome[list[Tensor]]]:
    """Train two ranks. They call `between` with the engine, rank and step when the norm is known, and step() if it
    returns True. ``zeroing_rank`` calls zero_grad(set_to_none=False)."""

    def run(links: Links) -> list[Tensor]:
        rank = links.ranks.rank
        with rank_engine(links, folder, lambda: tiny_model("llama")) as engine:
            optimizer = OffloadAdamW(engine.model.parameters(), lr=1e-3, engine=engine)
            for step in range(num_steps):
                output = engine.model(**tiny_batch(seed=rank + 2 * step), output_hidden_states=True)
                (output.loss if uses_head(step) else output.hidden_states[-1].square().mean()).backward()
                engine.clip_grad_norm(1.0)
                if between(engine, rank, step):
                    optimizer.step()
                optimizer.zero_grad(set_to_none=rank != zeroing_rank)
            return [*weights_of(engine).values()]

    return rank_outcomes(2, run, timeout_s=300.0)


def disagreement(outcomes: Sequence[Outcome[list[Tensor]]]) -> str:
    """Return what the error of all ranks says."""
    for outcome in outcomes:
        assert isinstance(outcome.error, RanksDisagreeError | RankFailedError), outcome.error
    texts = [str(outcome.error) for outcome in outcomes if isinstance(outcome.error, RanksDisagreeError)]
    assert texts, "no rank knows the cause"
    return texts[0]


@pytest.mark.slow
@pytest.mark.parametrize("zeroing_rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_gradients_that_one_rank_sets_to_zeros_change_no_number(zeroing_rank: int, tmp_path: Path) -> None:
    """With torch, that rank alone would move a weight that no rank uses. Here it names the weight, and ends the run."""
    expected = train_differently(tmp_path / "none", num_steps=3)
    found = train_differently(tmp_path / "zeros", num_steps=3, zeroing_rank=zeroing_rank)
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours.result, theirs.result))
    outcomes = train_differently(tmp_path / "unused", zeroing_rank=zeroing_rank, uses_head=lambda step: step < 2)
    error, other = outcomes[zeroing_rank].error, outcomes[1 - zeroing_rank].error
    assert isinstance(error, ValueError) and str(error).startswith("lm_head.weight (1 of ")
    assert isinstance(other, RankFailedError) and f"rank {zeroing_rank}" in str(other)


def change_lr(engine: OffloadEngine) -> None:
    assert engine.optimizer is not None
    for group in engine.optimizer.param_groups:
        group["lr"] *= 2


def test_a_learning_rate_that_one_rank_changes_ends_all_ranks(tmp_path: Path) -> None:
    """Each rank would update its shard with its own, in silence."""

    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        if (rank, step) == (1, 1):  # after the ranks compared those of this step
            change_lr(engine)
        return True

    told = disagreement(train_differently(tmp_path, between))
    assert re.match(r"lr of param group 0.* is 0.001 on rank 0 and 0.002 on rank 1; step 3 was not taken", told), told


def test_gradients_that_one_rank_drops_after_the_norm_is_agreed_end_all_ranks(tmp_path: Path) -> None:
    """Without the error, the other rank's step would count, and the ranks' weights would belong to different steps."""
    told = disagreement(train_differently(tmp_path, lambda engine, rank, step: (rank, step) != (1, 1)))
    assert "dropped the gradients of a step (zero_grad())" in told and "all ranks must take the same steps" in told


def test_gradients_that_all_ranks_drop_after_the_norm_is_agreed_change_nothing(tmp_path: Path) -> None:
    """All ranks may also change their learning rate after each norm."""

    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        change_lr(engine)
        return step < 2

    with_drop = train_differently(tmp_path / "dropped", between, num_steps=3)
    without = train_differently(tmp_path / "whole", between, num_steps=2)
    for outcome, other in zip(with_drop, without, strict=True):
        assert outcome.error is other.error is None
        assert all(map(torch.equal, outcome.result or [], other.result or []))


def change_head(engine: OffloadEngine, change: Callable[[], float]) -> None:
    """Drop the step and change the head."""
    engine.drop_gradients()
    with torch.no_grad(), gathered_parameters(engine.model.lm_head):
        engine.model.lm_head.weight += change()


def test_weights_that_ranks_change_differently_end_all_ranks(tmp_path: Path) -> None:
    """Each rank stores its shard, so the weights would be a mixture. Rank 0 changes nothing."""

    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        if step == 1:
            change_head(engine, lambda: float(rank))
        return step != 1

    told = disagreement(train_differently(tmp_path, between))
    assert re.search(r"lm_head\.weight differs between rank \d and rank \d at the end of gathered_", told)


def test_a_rank_that_raises_in_gathered_parameters_stops_the_change_on_all(tmp_path: Path) -> None:
    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        if step == 1:
            with contextlib.suppress(ZeroDivisionError):
                change_head(engine, lambda: 1 / (1 - rank))
        return step != 1

    told = disagreement(train_differently(tmp_path, between))
    assert "an exception ended gathered_parameters on rank 1 and not on rank 0" in told


def test_weights_that_only_one_rank_gathers_end_all_ranks(tmp_path: Path) -> None:
    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        if step == 1:
            engine.drop_gradients()
        if (rank, step) == (1, 1):
            change_head(engine, lambda: 1.0)
        return step != 1

    assert "look for a step, a callback or a save that only some" in disagreement(train_differently(tmp_path, between))


@pytest.mark.parametrize("backward", [False, True])
def test_a_forward_that_only_one_rank_runs_ends_all_ranks(backward: bool, soon_noticed: None, tmp_path: Path) -> None:
    """It would wait for a forward of the other rank, which waits for gradients of the next step."""

    def between(engine: OffloadEngine, rank: int, step: int) -> bool:
        if (rank, step) == (1, 1):
            engine.drop_gradients()
            loss = engine.model(**tiny_batch()).loss
            if backward:
                loss.backward()
        return step != 1

    told = disagreement(train_differently(tmp_path, between))
    assert re.search("the lengths of batches of a forward|must take the same steps|rank \\d drops them", told), told


@pytest.mark.parametrize("failing", [{0, 1}, {0}])
def test_a_backward_that_fails_before_its_first_gradient_leaves_the_next_step_whole(
    failing: set[int], tmp_path: Path
) -> None:
    """The ranks have already told each other which blocks get no gradient in this step."""

    def fail(gradient: Tensor) -> Tensor:
        raise ArithmeticError("a user's hook fails")

    def without_norm() -> PreTrainedModel:
        model = tiny_model("llama")
        model.model.norm.requires_grad_(False)
        return model

    def run(links: Links, fails: bool) -> list[Tensor]:
        with rank_engine(links, tmp_path / str(fails), without_norm) as engine:
            optimizer = OffloadAdamW(engine.model.parameters(), lr=1e-3, engine=engine)
            engine.model.config.num_hidden_layers = 1  # no backward reaches the other layer
            before_norm: list[Tensor] = []
            engine.model.model.norm.register_forward_pre_hook(lambda _, inputs: before_norm.append(inputs[0]))
            for step in range(2):
                batch = tiny_batch(seed=links.ranks.rank + 2 * step)
                if fails:
                    hidden = engine.model(**batch, output_hidden_states=True).hidden_states[-1]
                    if links.ranks.rank in failing:
                        before_norm[-1].register_hook(fail)
                    with pytest.raises(ArithmeticError) if links.ranks.rank in failing else contextlib.nullcontext():
                        hidden.square().mean().backward()
                    optimizer.zero_grad()
                engine.model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            return [*weights_of(engine).values()]

    expected, found = (run_ranks(2, partial(run, fails=fails)) for fails in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert all(map(torch.equal, ours, theirs))

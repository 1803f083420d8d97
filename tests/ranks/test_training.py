"""Several ranks, each with an engine and its part of the records, equal one torch process that accumulates the same
batches.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from equal_tensors import assert_same_tensors
from torch import Tensor
from training_ranks import (
    LR,
    AfterStep,
    Trained,
    assert_same_run,
    do_nothing,
    rank_engine,
    stock_steps,
    take_steps,
    weights_of,
)

from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.optim import OffloadAdamW
from hf_lohan.ranks import Links
from hf_lohan.testing.models import FAMILIES, tiny_batch, tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks

NUM_STEPS = 3


def train_stock(family: str, num_ranks: int, max_norm: float, accumulation: int = 1, **options: Any) -> Trained:
    """Train one process in memory with the batches of all ranks."""
    model = tiny_model(family).train()

    def loss_of(step: int, rank: int, micro: int) -> Tensor:
        return model(**tiny_batch(seed=seed_of(step, rank, micro))).loss

    return stock_steps(model, loss_of, NUM_STEPS, num_ranks, num_micro=accumulation, max_norm=max_norm, **options)[0]


def seed_of(step: int, rank: int, micro: int = 0) -> int:
    return 1000 * step + 10 * rank + micro


def train_rank(
    links: Links,
    folder: Path,
    family: str,
    max_norm: float,
    accumulation: int = 1,
    *,
    num_batches: int = 1,
    is_joint: bool = False,
    after_step: AfterStep = do_nothing,
    spoils: Callable[[int, int], bool] = lambda _step, _rank: False,
    chunk_tokens: int | None = None,
    **settings: Any,
) -> Trained:
    """Train one rank of several with an engine, or a single rank with the batches of `num_batches` ranks. `spoils(step,
    rank)`: whether the loss of a rank is not finite in a step.
    """
    num_micro = accumulation * num_batches
    holds = max_norm > 0 or num_micro > 1
    with rank_engine(links, folder, lambda: tiny_model(family), hold_gradients=holds, **settings) as engine:
        model = engine.model
        if chunk_tokens is not None:
            layers = {layer: f"model.layers.{number}" for number, layer in enumerate(model.model.layers)}
            run_layers_in_chunks(model, engine.activations, layers).cut(chunk_tokens)

        def loss_of(step: int, micro: int) -> Tensor:
            rank = links.ranks.rank + micro // accumulation
            loss = model(**tiny_batch(seed=seed_of(step, rank, micro % accumulation))).loss
            return loss * float("nan") if spoils(step, rank) else loss

        found = take_steps(
            engine, loss_of, NUM_STEPS, num_micro=num_micro, max_norm=max_norm, is_joint=is_joint, after_step=after_step
        )
        found.weights = weights_of(engine)
        return found


def check_ranks(
    num_ranks: int,
    expected: Trained,
    folder: Path,
    family: str = "llama",
    max_norm: float = 0.5,
    num_local: int | None = None,
    **options: Any,
) -> None:
    """Train ranks, and check that each has the losses, norms and weights of one process."""
    train = lambda links: train_rank(links, folder, family, max_norm, **options)  # noqa: E731
    for rank, ours in enumerate(run_ranks(num_ranks, train, num_local=num_local)):
        assert_same_run(ours, expected, rank, num_ranks)


@pytest.mark.covering(1)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("family", slow_but(("llama", "gpt2", "mixtral"), FAMILIES))
def test_two_ranks_train_as_one_process(family: str, max_norm: float, tmp_path: Path) -> None:
    check_ranks(2, train_stock(family, 2, max_norm), tmp_path, family, max_norm)


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_four_ranks_train_as_one_process(family: str, tmp_path: Path) -> None:
    check_ranks(4, train_stock(family, 4, 0.5), tmp_path, family)


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_local", [2, 1])
def test_nodes_sum_the_gradients_of_their_ranks_before_they_send_them(num_local: int, tmp_path: Path) -> None:
    expected = train_stock("llama", 2 * num_local, 0.5, ranks_per_sum=num_local)
    check_ranks(2 * num_local, expected, tmp_path, num_local=num_local)


@pytest.mark.covering(0)
@pytest.mark.parametrize(("family", "rounds"), [("llama", True), ("mixtral", False)])
def test_bfloat16_ranks_sum_in_float32_as_one_offloaded_process(family: str, rounds: bool, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"dtype": torch.bfloat16, "stochastic_rounding": rounds}
    alone = train_rank(Links.alone(), tmp_path / "alone", family, 0.5, num_batches=2, **settings)
    check_ranks(2, alone, tmp_path, family, **settings)


def test_two_ranks_in_chunks_equal_one_process_in_chunks(tmp_path: Path) -> None:
    alone = train_rank(Links.alone(), tmp_path / "alone", "llama", 0.5, num_batches=2, chunk_tokens=6)
    whole = train_rank(Links.alone(), tmp_path / "whole", "llama", 0.5, num_batches=2)
    assert any(not torch.equal(alone.weights[name], weight) for name, weight in whole.weights.items()), "not cut"
    check_ranks(2, alone, tmp_path, chunk_tokens=6)


@pytest.mark.parametrize("max_norm", [0.5, 100.0])
def test_guesses_of_the_norm_of_all_ranks_are_right_or_undone(max_norm: float, tmp_path: Path) -> None:
    applied: list[str | None] = []

    def note(engine: OffloadEngine, _step: int) -> None:
        applied.append(engine.last_step.applied)

    stock = train_stock("llama", 2, max_norm)
    check_ranks(2, stock, tmp_path, max_norm=max_norm, _clip="speculate", after_step=note)
    assert ("accepted" if max_norm == 100.0 else "redone") in applied


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_all_ranks_skip_a_step_that_is_not_finite_on_one(max_norm: float, tmp_path: Path) -> None:
    skipped: list[bool] = []

    def spoils(step: int, rank: int) -> bool:
        return (step, rank) == (1, 1)

    alone = train_rank(Links.alone(), tmp_path / "alone", "llama", max_norm, num_batches=2, spoils=spoils)
    trained = run_ranks(
        2,
        lambda links: train_rank(
            links,
            tmp_path,
            "llama",
            max_norm,
            spoils=spoils,
            after_step=lambda engine, _step: skipped.append(engine.step_was_skipped),
        ),
    )
    assert sum(skipped) == 2
    for ours in trained:
        assert_same_tensors(ours.weights, alone.weights)


@pytest.mark.parametrize("trains", [(True, False), (False, False)])
def test_a_step_trains_the_weights_that_have_a_gradient_on_any_rank(trains: Sequence[bool], tmp_path: Path) -> None:
    def loss_of(model: Any, rank: int) -> Tensor:
        output = model(**tiny_batch(seed=rank), output_hidden_states=True)
        return output.loss if trains[rank] else output.hidden_states[-1].mean()

    def only_the_head_trains() -> Any:
        model = tiny_model("llama").train()
        model.model.requires_grad_(False)
        model.enable_input_require_grads()
        return model

    def train(links: Links) -> Tensor:
        with rank_engine(links, tmp_path, only_the_head_trains) as engine:
            optimizer = OffloadAdamW(engine.model.lm_head.parameters(), lr=LR, engine=engine)
            loss_of(engine.model, links.ranks.rank).backward()
            optimizer.step()
            return engine.parameters.read_parameter("lm_head.weight")

    if not any(trains):
        outcomes = rank_outcomes(2, train)
        assert all("does not require grad" in str(outcome.error) for outcome in outcomes)
        return
    stock = only_the_head_trains()
    (loss_of(stock, 0) / 2).backward()
    torch.optim.AdamW(stock.lm_head.parameters(), lr=LR, fused=True).step()
    assert all(torch.equal(ours, stock.lm_head.weight) for ours in run_ranks(2, train))


def test_ranks_may_evaluate_together_between_steps(tmp_path: Path) -> None:
    def evaluate(engine: OffloadEngine, step: int) -> None:
        with torch.no_grad():
            engine.model(**tiny_batch(seed=7 + step))

    check_ranks(2, train_stock("llama", 2, 0.5), tmp_path, after_step=evaluate)


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_weights_are_frozen_and_thawed_on_all_ranks(max_norm: float, tmp_path: Path) -> None:
    def freeze(model: Any, step: int) -> None:
        for part in (model.model.embed_tokens, model.model.layers[0], model.model.layers[1].mlp):
            part.requires_grad_(step == 1)

    stock = train_stock("llama", 2, max_norm, after_step=freeze)
    freeze_ours = lambda engine, step: freeze(engine.model, step)  # noqa: E731
    check_ranks(2, stock, tmp_path, max_norm=max_norm, after_step=freeze_ours)


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
def test_a_forward_and_the_end_of_a_step_have_one_exchange_each(
    max_norm: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first decides whether the batch needs a plan, the second the norm, the end of backwards, a skip and the next
    commit."""
    done: dict[int, list[str]] = {0: [], 1: []}
    all_gather = Links.all_gather

    def recorded(links: Links, tag: str, payload: bytes = b"") -> list[bytes]:
        done[int(threading.current_thread().name.removeprefix("rank-"))].append(tag)
        return all_gather(links, tag, payload)

    def begin_steps(engine: OffloadEngine, step: int) -> None:
        if step == 0:
            done[engine.links.ranks.rank].clear()

    monkeypatch.setattr(Links, "all_gather", recorded)
    steps = run_ranks(
        2,
        lambda links: (
            train_rank(
                links,
                tmp_path,
                "llama",
                max_norm,
                2,
                spoils=lambda step, rank: (step, rank) == (2, 1),
                after_step=begin_steps,
                commit_every=2,
            )
            and list(done[links.ranks.rank])
        ),
    )
    of_a_step = [*["the lengths of batches of a forward"] * 2, "the end of the step"]
    for of_rank in steps:
        in_steps, after = of_rank[: 3 * (NUM_STEPS - 1)], of_rank[3 * (NUM_STEPS - 1) :]
        assert in_steps == of_a_step * (NUM_STEPS - 1)
        assert not set(of_a_step) & set(after), "all later exchanges read weights"


@pytest.mark.covering(0)
@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 10))])
def test_no_wait_is_missing_if_copies_run_late(seed: int, max_norm: float, tmp_path: Path) -> None:
    stock = train_stock("llama", 2, max_norm)

    # created here, because their threads outlive the ranks
    devices = [AsyncDevice(seed, max_delay_s=5e-4) for _ in range(2)]

    def train(links: Links) -> Trained:
        return train_rank(links, tmp_path, "llama", max_norm, device=devices[links.ranks.rank])

    for rank, ours in enumerate(run_ranks(2, train, delays_seed=seed)):
        assert_same_run(ours, stock, rank, 2)

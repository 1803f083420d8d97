"""Ranks that divide the experts among themselves equal one torch process that accumulates the ranks' batches."""

from __future__ import annotations

import itertools
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from divided_experts import (
    CHOICES,
    FAMILIES,
    NUM_STEPS,
    SETTINGS,
    Chosen,
    Trained,
    batch,
    check_equal,
    check_ranks,
    half_to_one,
    opened,
    scattered_owners,
    train_rank,
    train_stock,
)
from engines import resolved
from equal_tensors import assert_same_tensors
from expert_models import expert_model
from torch import nn
from trained_nodes import part_numel, quiet_bytes
from training_ranks import take_steps

from hf_lohan.config import OffloadConfig
from hf_lohan.costs import owned_experts
from hf_lohan.model import find_experts
from hf_lohan.model.experts import experts_as_stored
from hf_lohan.planning import lay_out
from hf_lohan.ranks import CallOfRank, ExpertCall, Links, Ranks, RowExchange
from hf_lohan.testing.models import tiny_model
from hf_lohan.testing.thread_ranks import rank_outcomes, run_ranks


@pytest.mark.parametrize("family", slow_but(("mixtral", "gpt_oss"), FAMILIES))
@pytest.mark.parametrize("parallel", slow_but(("node",), ("node", "world", "auto")))
def test_two_ranks_train_as_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    check_ranks(2, tmp_path, partial(expert_model, family), **{"experts.parallel": parallel})


@pytest.mark.covering(0)
@pytest.mark.parametrize("balance", [False, 1])
@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (2, 1), (4, 2)])
def test_any_rank_may_own_an_expert(num_ranks: int, num_local: int, balance: int, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    check_ranks(
        num_ranks,
        tmp_path,
        make_model,
        num_local=num_local,
        recompute=True,
        owners=scattered_owners(make_model, num_ranks),
        **{"experts.balance": balance},
    )


@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_the_norm_of_all_ranks_clips_all_experts(clip: str, tmp_path: Path) -> None:
    make_model = partial(expert_model, "mixtral")
    train = partial(train_rank, folder=tmp_path, make_model=make_model, max_norm=0.5, _clip=clip)
    trained = run_ranks(2, train)
    assert all(map(torch.equal, trained[0].norms, trained[1].norms)) and max(trained[0].norms) > 0.5
    check_equal(trained, train_stock(make_model, 2, norms=trained[0].norms, max_norm=0.5))


@pytest.mark.slow
@pytest.mark.parametrize(("num_ranks", "num_local"), [pytest.param(3, 3, marks=pytest.mark.slow), (4, 2)])
def test_ranks_that_kept_their_outputs_serve_a_recomputation(
    num_ranks: int, num_local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ExpertCall] = []
    next_call = RowExchange.next_call

    def noted(exchange: RowExchange, own: CallOfRank, what: str) -> tuple[ExpertCall, dict[int, CallOfRank]]:
        now, parts = next_call(exchange, own, what)
        if now != own.call:
            assert len(parts) == num_ranks - 1
            served.append(now)
        return now, parts

    monkeypatch.setattr(RowExchange, "next_call", noted)
    make_model = partial(expert_model, "mixtral")

    def train(links: Links) -> Trained:
        return train_rank(links, tmp_path, make_model, recompute=links.ranks.rank > 0)

    trained = run_ranks(num_ranks, train, num_local=num_local)
    assert [call.layer for call in served] == [3, 2, 1, 0] * NUM_STEPS and all(call.is_repeat for call in served)
    assert_same_tensors(trained[0].weights, trained[2].weights)
    again = run_ranks(
        num_ranks, lambda links: train_rank(links, tmp_path / "again", make_model, recompute=True), num_local=num_local
    )
    assert_same_tensors(trained[0].weights, again[0].weights)


def test_bfloat16_experts_train_as_in_one_offloaded_process(tmp_path: Path) -> None:
    make_model = partial(expert_model, "mixtral")
    settings: dict[str, Any] = {"dtype": torch.bfloat16}
    alone = train_rank(Links.alone(), tmp_path / "alone", make_model, accumulation=2, **settings)
    for ours in run_ranks(2, lambda links: train_rank(links, tmp_path, make_model, **settings)):
        assert_same_tensors(ours.weights, alone.weights)


@pytest.mark.covering(1)
@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_experts_without_tokens_take_the_step(choice: str, lazy: bool, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", CHOICES[choice])
    trained = check_ranks(2, tmp_path, make_model, recompute=True, **{"experts.lazy": lazy})
    assert any(ours.num_behind for ours in trained) == lazy


WAYS: dict[str, dict[str, Any]] = {
    **{choice: {"recompute": True} for choice in CHOICES},
    **{activations: {"recompute": True, "activations": activations} for activations in ("keep", "swap", "recompute")},
    **{f"joint {joint}": {"accumulation": 2, "is_joint": joint, "recompute": True} for joint in (False, True)},
}
QUICK = [("qwen3_moe", "keep"), ("mixtral", "joint False")]


@pytest.mark.parametrize("num_ranks", slow_but([2], [2, 4]))
@pytest.mark.parametrize("case", slow_but(QUICK, itertools.product(FAMILIES, WAYS)), ids=str)
def test_ranks_train_each_family_in_each_way(case: tuple[str, str], num_ranks: int, tmp_path: Path) -> None:
    family, way = case
    make_model = Chosen(family, CHOICES[way]) if way in CHOICES else partial(expert_model, family)
    check_ranks(num_ranks, tmp_path, make_model, num_local=2, **WAYS[way])


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_ranks", [3, 4])
def test_there_may_be_fewer_experts_than_ranks(num_ranks: int, tmp_path: Path) -> None:
    def make_model() -> Any:
        return tiny_model("mixtral", num_local_experts=2, intermediate_size=32).train()

    if num_ranks == 4:
        check_ranks(num_ranks, tmp_path, make_model, **{"experts.balance": 1})
        return
    trained = run_ranks(num_ranks, lambda links: train_rank(links, tmp_path, make_model))
    for ours in trained[1:]:
        assert_same_tensors(ours.weights, trained[0].weights)


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))])
def test_no_wait_is_missing_if_copies_run_late(seed: int, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    devices = [AsyncDevice(seed, max_delay_s=5e-4) for _ in range(2)]

    def train(links: Links) -> Trained:
        balance = 1 if seed % 2 else False
        return train_rank(links, tmp_path, make_model, device=devices[links.ranks.rank], **{"experts.balance": balance})

    trained = run_ranks(2, train, delays_seed=seed)
    assert (trained[0].rows is not None) == seed % 2
    check_equal(trained, train_stock(make_model, 2))


@pytest.mark.covering(0)
@pytest.mark.parametrize(("num_ranks", "num_local"), [pytest.param(2, 2, marks=pytest.mark.slow), (2, 1), (4, 2)])
def test_sent_bytes_follow_from_the_routing(num_ranks: int, num_local: int, tmp_path: Path) -> None:
    """A token's row goes once to each other rank of the node that owns an expert of it, and once to each other node,
    whose rank passes it on. Results come back for each choice."""
    make_model = partial(expert_model, "qwen3_moe", num_experts=16, num_experts_per_tok=8)
    nodes = [range(first, first + num_local) for first in range(0, num_ranks, num_local)]
    num_tokens: Counter[tuple[int, range]] = Counter()
    num_choices: Counter[tuple[int, range]] = Counter()

    def note(layer: int, rank: int, module: nn.Module, args: Any) -> None:
        owned = owned_experts(module.num_experts, layer, num_ranks)  # type: ignore[arg-type]
        for owners in {*(range(other, other + 1) for other in range(num_ranks)), *nodes}:
            is_there = torch.isin(args[1], torch.tensor([expert for owner in owners for expert in owned[owner]]))
            num_tokens[rank, owners] += int(is_there.any(dim=1).sum())
            num_choices[rank, owners] += int(is_there.sum())

    def train(links: Links) -> Trained:
        def make_noted() -> Any:
            model = make_model()
            for layer, of in enumerate(find_experts(model).values()):
                of.module.register_forward_pre_hook(partial(note, layer, links.ranks.rank))
            return model

        return train_rank(links, tmp_path, make_noted)

    trained = run_ranks(num_ranks, train, num_local=num_local)
    model = make_model()
    hidden = model.config.hidden_size

    def rows_bytes(rank: int, owners: range) -> int:
        tokens, choices = num_tokens[rank, owners], num_choices[rank, owners]
        return 4 * (tokens * hidden + choices) + 4 * (2 * tokens * hidden + 2 * choices)

    between_nodes = undivided = 0
    for rank in range(num_ranks):
        node = next(node for node in nodes if rank in node)
        neighbours = [range(other, other + 1) for other in node if other != rank]
        sent = sum(rows_bytes(rank, owner) for owner in neighbours)
        for other_node in nodes:
            if other_node != node:
                sent += rows_bytes(rank, other_node)
                between_nodes += num_tokens[rank, other_node]
                undivided += num_choices[rank, other_node]
                if num_local > 1:  # and what this rank passes on for its counterpart
                    sent += sum(rows_bytes(other_node[node.index(rank)], owner) for owner in neighbours)
        returned = sum(num_choices[other, range(rank, rank + 1)] for other in range(num_ranks) if other != rank)
        assert trained[rank].sent_bytes == sent + 4 * (returned * hidden + returned * (hidden + 1))
    if num_local < num_ranks:
        # With 8 choices of each token, a node gets about a quarter of what it would get if each choice had a row.
        assert between_nodes / undivided < 0.26
        assert (between_nodes + undivided) / (2 * undivided) < 0.64


@pytest.mark.covering(0)
@pytest.mark.parametrize("num_local", [1, 2])
def test_no_weight_or_gradient_of_an_expert_leaves_its_rank(num_local: int, tmp_path: Path) -> None:
    """The other lanes have the bytes of the blocks that all ranks share."""

    def train(links: Links) -> tuple[dict[str, int], dict[str, int]]:
        rank, before = links.ranks.rank, dict.fromkeys(links.sent_bytes, 0)
        with opened(links, tmp_path, partial(expert_model, "mixtral")) as engine:
            before |= links.sent_bytes
            take_steps(engine, lambda step, _: engine.model(**batch(step, rank)).loss, NUM_STEPS)
            sent = quiet_bytes(engine, links, before)
            shared = [block for block in engine.layout.blocks if block.owner is None]
            assert 0 < len(shared) < len(engine.layout.blocks)
            num_nodes = links.ranks.num_ranks // num_local
            chunks = [chunk for chunk in engine.layout.chunks() if chunk.block.owner is None and chunk.owner != rank]
            return sent, {
                "weights": 4 * (num_nodes - 1) * sum(part_numel(b, rank) * engine._ring.num_loads(b) for b in shared),
                "gradients": 4 * (num_nodes - 1) * NUM_STEPS * sum(chunk.numel for chunk in chunks),
            }

    for sent, expected in run_ranks(2, train, num_local=num_local):
        assert sent == expected


def test_ranks_in_different_calls_are_refused() -> None:
    def call(links: Links) -> None:
        own = ExpertCall(links.ranks.rank, 0, 0)
        RowExchange(links).next_call(CallOfRank(own, 1, (0, 0)), "rows")

    errors = [str(outcome.error) for outcome in rank_outcomes(2, call)]
    assert any(
        "the forward of the experts of layer 1" in error and "must run the same passes" in error for error in errors
    )


BAD_SETTINGS: list[tuple[str, dict[str, Any], int, str]] = [
    ("llama", {"experts.parallel": "world"}, 1, "experts.parallel: world is set, but LlamaForCausalLM has no experts"),
    ("llama", {"experts.parallel": "node"}, 2, "experts.parallel: node is set, but LlamaForCausalLM has no experts"),
    ("mixtral", {"experts.parallel": "node"}, 1, "experts.parallel: node is set with 2 nodes"),
    ("mixtral", {"experts.parallel": "world", "experts": "with_layer"}, 2, "experts.parallel: world gives each expert"),
    ("mixtral", {"experts.parallel": "none", "experts": "streamed"}, 2, "2 ranks and experts.parallel: none"),
    ("mixtral", {"experts.balance": 64, "experts": "with_layer"}, 2, "experts.balance: 64 is set, but each rank loads"),
    ("llama", {"experts.balance": 64}, 2, "experts.balance: 64 is set, but each rank loads all weights of a layer"),
]


@pytest.mark.parametrize(("family", "settings", "num_local", "message"), BAD_SETTINGS)
def test_settings_that_do_not_fit_are_refused(
    family: str, settings: dict[str, Any], num_local: int, message: str, tmp_path: Path
) -> None:
    config = resolved(tmp_path, **{**SETTINGS, "experts": "auto", **settings})
    with pytest.raises(ValueError, match=message):
        lay_out(tiny_model(family), config, working_dtype=None, hold_gradients=True, ranks=Ranks(0, 2, 0, num_local))
    assert not list(tmp_path.iterdir())


def test_a_rank_that_owns_no_expert_takes_their_form_from_the_other_stores(tmp_path: Path) -> None:
    """Its own store has no record of an expert, as if they were loaded with their layers."""
    make_model = partial(expert_model, "mixtral", num_local_experts=2, num_hidden_layers=1)

    def form(links: Links) -> tuple[bool, str]:
        with opened(links, tmp_path, make_model) as engine:
            owns_some = any(block.owner == links.ranks.rank for block in engine.layout.blocks)
            config = OffloadConfig.load(engine.config, experts="auto")
        return owns_some, experts_as_stored(engine.model, config, links).experts.load

    owners, forms = zip(*run_ranks(3, form), strict=True)
    assert sorted(owners) == [False, True, True]
    assert forms == ("streamed",) * 3

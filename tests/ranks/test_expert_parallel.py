"""Ranks that divide the experts among themselves equal one torch process that accumulates the ranks' batches."""

from __future__ import annotations

import os
import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from covering import slow_but
from engines import ONE_GENERATOR, open_engine, resolved
from expert_models import expert_model
from rank_processes import RankProcesses
from torch import Tensor, nn

from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.device import CpuDevice, Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.experts import BalancedRows, Lending
from hf_lohan.huggingface.attachment import (
    compute_expert,
    enable_checkpointing,
    enable_recompute,
    stream_experts,
)
from hf_lohan.model import find_experts
from hf_lohan.model.experts import experts_as_stored
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planner import owned_experts
from hf_lohan.planning import lay_out
from hf_lohan.planning.layout import resolved_here
from hf_lohan.ranks import CallOfRank, Channel, ExpertCall, Links, Ranks, RowExchange
from hf_lohan.testing.async_device import AsyncDevice
from hf_lohan.testing.models import VOCAB_SIZE, tiny_model
from hf_lohan.testing.thread_ranks import Fault, rank_outcomes, run_ranks

NUM_STEPS = 3
LR = 1e-2
SETTINGS: dict[str, Any] = {
    "cpu_memory": "16MiB",
    "gpu_memory": "1MiB",
    "io_threads": 1,
    "prefetch_blocks": 1,
    "activations": "recompute",
    "experts": "streamed",
}
MakeModel = Callable[[], Any]


@dataclass
class Trained:
    """The results of a run."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    states: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    """Bytes that the rank sent on the channel of tokens while it trained."""
    num_behind: int = 0
    """Number of the rank's experts that were behind at the end."""
    rows: BalancedRows | None = None
    """Rows by rank, if ranks balance their rows."""


def batch(step: int, rank: int, micro: int = 0) -> dict[str, Tensor]:
    """Return a batch whose length depends on the rank."""
    generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
    ids = torch.randint(5, VOCAB_SIZE, (2, 11 - 2 * rank), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train_stock(
    make_model: MakeModel,
    num_ranks: int,
    *,
    num_local: int = 8,
    accumulation: int = 1,
    norms: list[Tensor] | None = None,
    max_norm: float = 0.0,
    recompute: bool = False,
) -> Trained:
    """Train one process in memory with the batches of all ranks, and clip by ``norms``.

    Other gradients than those of experts are summed over micro-batches first, then over the ranks of a node, and then
    over nodes. For a single micro-batch and one node this is torch's order.
    """
    model = make_model()
    if recompute:
        enable_checkpointing(model)
    experts = {id(parameter) for of in find_experts(model).values() for parameter in of.parameters.values()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, fused=True)
    trained = Trained()
    is_simple = accumulation == 1 and num_ranks <= num_local
    for step in range(NUM_STEPS):
        found: dict[tuple[int, int], list[Tensor]] = {}
        for micro in range(accumulation):
            for rank in range(num_ranks):
                loss = model(**batch(step, rank, micro)).loss
                (loss / accumulation / num_ranks).backward()
                trained.losses.append(loss.detach())
                if not is_simple:
                    found[micro, rank] = [parameter.grad for parameter in model.parameters()]
                    model.zero_grad()
        if not is_simple:
            for index, parameter in enumerate(model.parameters()):
                of = {key: gradients[index] for key, gradients in found.items()}
                if id(parameter) in experts:
                    sums = [sum(of[micro, rank] for rank in range(num_ranks)) for micro in range(accumulation)]
                else:
                    of_ranks = [sum(of[micro, rank] for micro in range(accumulation)) for rank in range(num_ranks)]
                    sums = [sum(of_ranks[first : first + num_local]) for first in range(0, num_ranks, num_local)]
                parameter.grad = sum(sums)
        if norms is not None:
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norms[step])
        optimizer.step()
        optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        state = optimizer.state[parameter]
        trained.weights[name] = parameter.detach()
        trained.states[name] = state["exp_avg"], state["exp_avg_sq"]
        trained.counts[name] = int(state["step"])
    return trained


@contextmanager
def opened(
    links: Links,
    folder: Path,
    make_model: MakeModel,
    *,
    hold_gradients: bool = False,
    dtype: torch.dtype = torch.float32,
    device: Device | None = None,
    recompute: bool = False,
    **settings: Any,
) -> Iterator[OffloadEngine]:
    """Open the engine of one rank."""
    with ONE_GENERATOR:
        model = make_model()
    config = resolved(folder / f"rank-{links.ranks.rank}", **{**SETTINGS, **settings})
    layout = lay_out(model, config, working_dtype=dtype, hold_gradients=hold_gradients, ranks=links.ranks)
    engine = open_engine(model, layout, config, device, links, compute_expert=compute_expert)
    stream_experts(engine.experts)
    if recompute:
        enable_recompute(model, engine)
    try:
        yield engine
    finally:
        engine.close()


def train_rank(
    links: Links,
    folder: Path,
    make_model: MakeModel,
    *,
    max_norm: float = 0.0,
    accumulation: int = 1,
    is_joint: bool = False,
    after_step: Callable[[OffloadEngine, int], object] = lambda _engine, _step: None,
    **settings: Any,
) -> Trained:
    """Train one rank of several, or one process that accumulates the batches of all ranks."""
    rank, trained = links.ranks.rank, Trained()
    holds = max_norm > 0 or accumulation > 1
    with opened(links, folder, make_model, hold_gradients=holds, **settings) as engine:
        model = engine.model
        optimizer = OffloadAdamW(model.parameters(), lr=LR, weight_decay=0.1, engine=engine)

        def run_one(step: int, micro: int) -> None:
            loss = model(**(batch(step, rank, micro) if links.ranks.others else batch(step, micro))).loss
            trained.losses.append(loss.detach())
            if not engine.defer_backward(loss / accumulation):
                engine.announce_backward(is_final=micro == accumulation - 1)
                (loss / accumulation).backward()

        for step in range(NUM_STEPS):
            before = links.sent_bytes[Channel.TOKENS]
            calls = [partial(run_one, step, micro) for micro in range(accumulation)]
            if is_joint:
                engine.run_micro_batches(calls)
            else:
                for call in calls:
                    call()
            trained.sent_bytes += links.sent_bytes[Channel.TOKENS] - before
            if max_norm:
                trained.norms.append(engine.clip_grad_norm(max_norm))
            optimizer.step()
            optimizer.zero_grad()
            after_step(engine, step)
        trained.rows = engine.rows_by_rank()
        access = engine.parameters
        missed = engine.records.missed
        trained.num_behind = sum(missed.is_block_behind(block) for block in engine.layout.blocks)
        for name, parameter in model.named_parameters():
            trained.weights[name] = access.read_parameter(name)
            if parameter.requires_grad:
                trained.states[name] = access.read_flat(name, "exp_avg"), access.read_flat(name, "exp_avg_sq")
        for part in engine.parameter_slices:
            assert trained.counts.setdefault(part.name, engine.step_counts[part]) == engine.step_counts[part]
    return trained


def check_equal(trained: list[Trained], stock: Trained) -> None:
    for rank, ours in enumerate(trained):
        assert sorted(map(float, ours.losses)) == sorted(map(float, stock.losses[rank :: len(trained)]))
        assert ours.counts == stock.counts
        for name, weight in stock.weights.items():
            assert torch.equal(ours.weights[name], weight), name
            for mine, of_stock in zip(ours.states[name], stock.states[name], strict=True):
                assert torch.equal(mine, of_stock.flatten()), name


def check_ranks(
    num_ranks: int,
    folder: Path,
    make_model: MakeModel,
    *,
    num_local: int | None = None,
    accumulation: int = 1,
    recompute: bool = False,
    **settings: Any,
) -> list[Trained]:
    """Train ranks, and check that they equal one process."""
    stock = train_stock(
        make_model, num_ranks, num_local=num_local or num_ranks, accumulation=accumulation, recompute=recompute
    )
    train = partial(train_rank, folder=folder, make_model=make_model, accumulation=accumulation, recompute=recompute)
    trained = run_ranks(num_ranks, lambda links: train(links, **settings), num_local=num_local)
    check_equal(trained, stock)
    assert sum(ours.sent_bytes for ours in trained), "no row was sent"
    return trained


FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe"]


@pytest.mark.parametrize("family", slow_but(("mixtral", "gpt_oss"), FAMILIES))
@pytest.mark.parametrize("parallel", slow_but(("node",), ("node", "world", "auto")))
def test_two_ranks_train_as_one_process(family: str, parallel: str, tmp_path: Path) -> None:
    check_ranks(2, tmp_path, partial(expert_model, family), expert_parallel=parallel)


@pytest.mark.slow
@pytest.mark.parametrize("num_local", [1, 2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_four_ranks_train_as_one_process(family: str, num_local: int, tmp_path: Path) -> None:
    check_ranks(4, tmp_path, partial(expert_model, family), num_local=num_local, expert_parallel="world")


@pytest.mark.parametrize("is_joint", [False, True])
def test_micro_batches_add_to_the_sums_of_the_ranks(is_joint: bool, tmp_path: Path) -> None:
    check_ranks(2, tmp_path, partial(expert_model, "mixtral"), accumulation=2, is_joint=is_joint, recompute=True)


@pytest.mark.parametrize("clip", ["defer", "speculate"])
def test_the_norm_of_all_ranks_clips_all_experts(clip: str, tmp_path: Path) -> None:
    make_model = partial(expert_model, "mixtral")
    train = partial(train_rank, folder=tmp_path, make_model=make_model, max_norm=0.5, clip=clip)
    trained = run_ranks(2, train)
    assert all(map(torch.equal, trained[0].norms, trained[1].norms)) and max(trained[0].norms) > 0.5
    check_equal(trained, train_stock(make_model, 2, norms=trained[0].norms, max_norm=0.5))


@pytest.mark.parametrize("activations", ["keep", "swap", "recompute"])
def test_checkpointed_layers_train_as_one_process(activations: str, tmp_path: Path) -> None:
    check_ranks(2, tmp_path, partial(expert_model, "qwen3_moe"), recompute=True, activations=activations)


@pytest.mark.parametrize(("num_ranks", "num_local"), [(3, 3), (4, 2)])
def test_ranks_that_kept_their_outputs_serve_a_recomputation(
    num_ranks: int, num_local: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[ExpertCall] = []
    next_call = RowExchange.next_call

    def noted(exchange: RowExchange, own: ExpertCall, what: str) -> tuple[ExpertCall, list[int]]:
        now, ranks = next_call(exchange, own, what)
        if now != own:
            assert len(ranks) == num_ranks - 1
            served.append(now)
        return now, ranks

    monkeypatch.setattr(RowExchange, "next_call", noted)
    make_model = partial(expert_model, "mixtral")

    def train(links: Links) -> Trained:
        return train_rank(links, tmp_path, make_model, recompute=links.ranks.rank > 0)

    trained = run_ranks(num_ranks, train, num_local=num_local)
    assert [call.layer for call in served] == [3, 2, 1, 0] * NUM_STEPS and all(call.is_repeat for call in served)
    assert all(torch.equal(trained[0].weights[name], weight) for name, weight in trained[2].weights.items())
    again = run_ranks(
        num_ranks,
        lambda links: train_rank(links, tmp_path / "again", make_model, recompute=True),
        num_local=num_local,
    )
    assert all(torch.equal(trained[0].weights[name], weight) for name, weight in again[0].weights.items())


def test_bfloat16_experts_train_as_in_one_offloaded_process(tmp_path: Path) -> None:
    make_model = partial(expert_model, "mixtral")
    settings: dict[str, Any] = {"dtype": torch.bfloat16}
    alone = train_rank(Links.alone(), tmp_path / "alone", make_model, accumulation=2, **settings)
    for ours in run_ranks(2, lambda links: train_rank(links, tmp_path, make_model, **settings)):
        assert all(torch.equal(ours.weights[name], weight) for name, weight in alone.weights.items())


class Chosen:
    """Makes models whose routers choose experts by a function of their choice and the number of experts."""

    def __init__(self, family: str, choose: Callable[[Tensor, int], Tensor]) -> None:
        self._family = family
        self._choose = choose

    def __call__(self) -> Any:
        model = expert_model(self._family)
        for module in model.modules():
            if type(module).__name__.lower().endswith("topkrouter"):
                module.register_forward_hook(self._chosen)
        return model

    def _chosen(self, router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        *others, index = output
        return *others, self._choose(index, getattr(router, "num_experts", 0) or router.n_routed_experts)


def half_to_one(index: Tensor, num: int) -> Tensor:
    """Return choices of which half are of one expert, and the others of all experts in turn."""
    turns = torch.arange(index.numel(), device=index.device).view(index.shape)
    return torch.where(turns % 2 == 0, 1, turns // 2 % num)


CHOICES: dict[str, Callable[[Tensor, int], Tensor]] = {
    "all to one expert": lambda index, num: torch.full_like(index, num - 1),
    "half of the experts": lambda index, num: index % (num // 2),
    "none to one rank": lambda index, num: index % 1,
}


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("choice", CHOICES)
def test_experts_without_tokens_take_the_step(choice: str, lazy: bool, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", CHOICES[choice])
    trained = check_ranks(2, tmp_path, make_model, recompute=True, lazy_experts=lazy)
    assert any(ours.num_behind for ours in trained) == lazy


def check_balanced(trained: list[Trained]) -> BalancedRows:
    """Check that ranks moved rows, and that all know the same numbers. Returns them."""
    for ours in trained:
        assert ours.rows is not None and ours.rows == trained[0].rows
        assert ours.rows.most_computed < ours.rows.most_owned and sum(ours.rows.owned) == sum(ours.rows.computed)
    assert trained[0].rows is not None
    return trained[0].rows


@pytest.mark.parametrize("family", slow_but(("mixtral",), FAMILIES))
def test_ranks_of_a_node_share_the_rows_of_a_hot_expert(family: str, tmp_path: Path) -> None:
    rows = check_balanced(check_ranks(4, tmp_path, Chosen(family, half_to_one), recompute=True, balance_experts=1))
    mean = sum(rows.owned) / 4
    assert rows.most_owned / mean > 2 and rows.most_computed / mean <= 1.25, rows


def test_nodes_balance_their_rows_and_pass_them_on(tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    rows = check_balanced(check_ranks(4, tmp_path, make_model, num_local=2, recompute=True, balance_experts=1))
    for node in (slice(0, 2), slice(2, 4)):
        assert sum(rows.owned[node]) == sum(rows.computed[node])


@pytest.mark.slow
@pytest.mark.parametrize("num_local", [2, 4])
@pytest.mark.parametrize("least_rows", [1, 6])
@pytest.mark.parametrize("family", FAMILIES)
def test_ranks_that_balance_rows_train_as_one_process(
    family: str, least_rows: int, num_local: int, tmp_path: Path
) -> None:
    trained = check_ranks(4, tmp_path, partial(expert_model, family), num_local=num_local, balance_experts=least_rows)
    check_balanced(trained)


@pytest.mark.slow
@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("lazy", [False, True])
def test_balanced_rows_and_experts_without_tokens(choice: str, lazy: bool, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", CHOICES[choice])
    settings: dict[str, Any] = {"balance_experts": 1, "lazy_experts": lazy}
    trained = check_ranks(4, tmp_path, make_model, recompute=True, **settings)
    check_balanced(trained)
    assert any(ours.num_behind for ours in trained) == lazy


@pytest.mark.slow
@pytest.mark.parametrize("is_joint", [False, True])
def test_balanced_rows_of_micro_batches(is_joint: bool, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    settings: dict[str, Any] = {"balance_experts": 1, "accumulation": 2, "is_joint": is_joint}
    check_ranks(4, tmp_path, make_model, recompute=True, **settings)


@pytest.mark.slow
def test_balanced_rows_are_computed_again_for_some_ranks(tmp_path: Path) -> None:
    def train(links: Links) -> Trained:
        recompute = links.ranks.rank > 0
        return train_rank(links, tmp_path, Chosen("mixtral", half_to_one), recompute=recompute, balance_experts=1)

    check_equal(run_ranks(4, train), train_stock(Chosen("mixtral", half_to_one), 4))


@pytest.mark.slow
def test_balanced_rows_in_bfloat16(tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    settings: dict[str, Any] = {"dtype": torch.bfloat16}
    alone = train_rank(Links.alone(), tmp_path / "alone", make_model, accumulation=2, **settings)
    trained = run_ranks(2, lambda links: train_rank(links, tmp_path, make_model, balance_experts=1, **settings))
    check_balanced(trained)
    for ours in trained:
        assert all(torch.equal(ours.weights[name], weight) for name, weight in alone.weights.items())


@pytest.mark.slow
def test_ranks_lend_frozen_experts(tmp_path: Path) -> None:
    def make_model() -> Any:
        model = Chosen("mixtral", half_to_one)()
        for experts in find_experts(model).values():
            experts.module.requires_grad_(False)
        return model

    without = run_ranks(4, lambda links: train_rank(links, tmp_path / "without", make_model))
    trained = run_ranks(4, lambda links: train_rank(links, tmp_path, make_model, balance_experts=1))
    check_balanced(trained)
    for before, ours in zip(without, trained, strict=True):
        assert all(map(torch.equal, before.losses, ours.losses))
        assert all(torch.equal(ours.weights[name], weight) for name, weight in before.weights.items())


@pytest.mark.parametrize("num_ranks", [3, 4])
def test_there_may_be_fewer_experts_than_ranks(num_ranks: int, tmp_path: Path) -> None:
    def make_model() -> Any:
        return tiny_model("mixtral", num_local_experts=2, intermediate_size=32).train()

    if num_ranks == 4:
        check_ranks(num_ranks, tmp_path, make_model, balance_experts=1)
        return
    trained = run_ranks(num_ranks, lambda links: train_rank(links, tmp_path, make_model))
    for ours in trained[1:]:
        assert all(torch.equal(ours.weights[name], weight) for name, weight in trained[0].weights.items())


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 16))])
def test_no_wait_is_missing_if_copies_run_late(seed: int, tmp_path: Path) -> None:
    make_model = Chosen("mixtral", half_to_one)
    devices = [AsyncDevice(seed, max_delay_s=5e-4) for _ in range(2)]

    def train(links: Links) -> Trained:
        balance = 1 if seed % 2 else False
        return train_rank(links, tmp_path, make_model, device=devices[links.ranks.rank], balance_experts=balance)

    trained = run_ranks(2, train, delays_seed=seed)
    assert (trained[0].rows is not None) == seed % 2
    check_equal(trained, train_stock(make_model, 2))


@pytest.mark.parametrize(("num_ranks", "num_local"), [(2, 2), (2, 1), (4, 2)])
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
    hidden, num_calls = model.config.hidden_size, NUM_STEPS * len(find_experts(model))
    # Calls, and with nodes of several ranks the numbers of choices of each owner, in forward and backward.
    heads = 2 * num_calls * (16 - 16 // num_ranks) * 8
    heads += 2 * num_calls * (len(nodes) - 1) * num_local * 4 if num_local > 1 else 0

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
        assert trained[rank].sent_bytes == heads + sent + 4 * (returned * hidden + returned * (hidden + 1))
    if num_local < num_ranks:
        # With 8 choices of each token, a node gets about a quarter of what it would get if each choice had a row.
        assert between_nodes / undivided < 0.26
        assert (between_nodes + undivided) / (2 * undivided) < 0.64


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
        killed_s = ranks.report_of(1)
        ends = ranks.ends()
    finally:
        ranks.close()
    assert ends[1] is None
    for end in (ends[0], ends[2]):
        assert end is not None
        assert re.search(r"RankFailedError: rank 1 \(pid \d+, \S+\) ended", end.error), end.error
        assert end.at_s - killed_s < 5


def trains(links: Links, _report: Callable[[object], None], folder: Path) -> dict[str, bytes]:
    """Return the weights of a rank that balances rows."""
    trained = train_rank(links, folder, Chosen("mixtral", half_to_one), balance_experts=1)
    assert trained.rows is not None and trained.rows.most_computed < trained.rows.most_owned
    return {name: weight.numpy().tobytes() for name, weight in trained.weights.items()}


@pytest.mark.slow
def test_processes_that_balance_rows_train_as_one(fork_server: None, tmp_path: Path) -> None:
    ranks = RankProcesses(4, partial(trains, folder=tmp_path))
    try:
        ends = ranks.ends()
    finally:
        ranks.close()
    stock = train_stock(Chosen("mixtral", half_to_one), 4)
    expected = {name: weight.numpy().tobytes() for name, weight in stock.weights.items()}
    assert all(end is not None and not end.error and end.result == expected for end in ends), ends


def test_ranks_in_different_calls_are_refused() -> None:
    def call(links: Links) -> None:
        exchange = RowExchange(links)
        links.barrier("all to listen")
        own = ExpertCall(links.ranks.rank, 0, 0)
        exchange.send_call(1 - links.ranks.rank, CallOfRank(own, 1, (0, 0)))
        exchange.next_call(own, "rows")

    errors = [str(outcome.error) for outcome in rank_outcomes(2, call)]
    assert any(
        "the forward of the experts of layer 1" in error and "must run the same passes" in error for error in errors
    )


BAD_SETTINGS: list[tuple[str, dict[str, Any], int, str]] = [
    ("llama", {"expert_parallel": "world"}, 1, "expert_parallel: world is set, but LlamaForCausalLM has no experts"),
    ("llama", {"expert_parallel": "node"}, 2, "expert_parallel: node is set, but LlamaForCausalLM has no experts"),
    ("mixtral", {"expert_parallel": "node"}, 1, "expert_parallel: node is set with 2 nodes"),
    ("mixtral", {"expert_parallel": "world", "experts": "with_layer"}, 2, "expert_parallel: world gives each expert"),
    ("mixtral", {"expert_parallel": "none", "experts": "streamed"}, 2, "2 ranks and expert_parallel: none"),
    ("mixtral", {"balance_experts": 64, "experts": "with_layer"}, 2, "balance_experts: 64 is set, but each rank loads"),
    ("llama", {"balance_experts": 64}, 2, "balance_experts: 64 is set, but each rank loads all weights of a layer"),
]


@pytest.mark.parametrize(("family", "settings", "num_local", "message"), BAD_SETTINGS)
def test_settings_that_do_not_fit_are_refused(
    family: str, settings: dict[str, Any], num_local: int, message: str, tmp_path: Path
) -> None:
    config = resolved(tmp_path, **{**SETTINGS, "experts": "auto", **settings})
    with pytest.raises(ValueError, match=message):
        lay_out(tiny_model(family), config, working_dtype=None, hold_gradients=True, ranks=Ranks(0, 2, 0, num_local))
    assert not list(tmp_path.iterdir())


def test_ranks_with_other_settings_are_refused(tmp_path: Path) -> None:
    def resolve(links: Links) -> None:
        way = ("auto", "world")[links.ranks.rank]
        resolved_here(OffloadConfig.load({"expert_parallel": way}), CpuDevice(), tmp_path, links)

    for outcome in rank_outcomes(2, resolve):
        assert isinstance(outcome.error, ConfigError)
        assert "expert_parallel is 'auto' on rank 0 and 'world' on rank 1" in str(outcome.error)


def test_a_rank_that_owns_no_expert_takes_their_form_from_the_other_stores(tmp_path: Path) -> None:
    """Its own store has no record of an expert, as if they were loaded with their layers."""
    make_model = partial(expert_model, "mixtral", num_local_experts=2, num_hidden_layers=1)

    def form(links: Links) -> tuple[bool, str]:
        with opened(links, tmp_path, make_model) as engine:
            owns_some = any(block.owner == links.ranks.rank for block in engine.layout.blocks)
            config = replace(engine.config, experts="auto")
        return owns_some, experts_as_stored(engine.model, config, links).experts

    owners, forms = zip(*run_ranks(3, form), strict=True)
    assert sorted(owners) == [False, True, True]
    assert forms == ("streamed",) * 3

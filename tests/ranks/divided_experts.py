"""Trains ranks that divide the experts among themselves, and one torch process that accumulates the ranks' batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import training_ranks
from expert_models import expert_model
from torch import Tensor, nn
from training_ranks import AfterStep, do_nothing, rank_engine, take_steps, weights_of

from hf_lohan.engine import OffloadEngine
from hf_lohan.experts import BalancedRows
from hf_lohan.huggingface.offloaded_model import enable_checkpointing, enable_recompute
from hf_lohan.model import find_experts
from hf_lohan.ranks import Links
from hf_lohan.testing.models import VOCAB_SIZE
from hf_lohan.testing.thread_ranks import run_ranks

NUM_STEPS = 2
LR = 1e-2
SETTINGS: dict[str, Any] = {
    "cpu_memory": "16MiB",
    "gpu_memory": "1MiB",
    "_io_threads": 1,
    "prefetch_blocks": 1,
    "activations": "recompute",
    "experts": "streamed",
}
MakeModel = Callable[[], Any]


@dataclass
class Trained(training_ranks.Trained):
    states: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    """Bytes of rows that the rank sent while it trained."""
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
    links: Links, folder: Path, make_model: MakeModel, *, recompute: bool = False, **settings: Any
) -> Iterator[OffloadEngine]:
    """Open the engine of one rank."""
    with rank_engine(links, folder, make_model, **{"hold_gradients": False, **SETTINGS, **settings}) as engine:
        if recompute:
            enable_recompute(engine.model, engine)
        yield engine


def train_rank(
    links: Links,
    folder: Path,
    make_model: MakeModel,
    *,
    max_norm: float = 0.0,
    accumulation: int = 1,
    is_joint: bool = False,
    after_step: AfterStep = do_nothing,
    **settings: Any,
) -> Trained:
    """Train one rank of several, or one process that accumulates the batches of all ranks."""
    rank, trained, before = links.ranks.rank, Trained(), [0]
    holds = max_norm > 0 or accumulation > 1
    with opened(links, folder, make_model, hold_gradients=holds, **settings) as engine:

        def loss_of(step: int, micro: int) -> Tensor:
            if not micro:
                before[0] = links.sent_bytes["tokens"]
            return engine.model(**(batch(step, rank, micro) if links.ranks.others else batch(step, micro))).loss

        def count_rows(_engine: OffloadEngine, _step: int) -> None:
            trained.sent_bytes += links.sent_bytes["tokens"] - before[0]

        take_steps(
            engine,
            loss_of,
            NUM_STEPS,
            lr=LR,
            num_micro=accumulation,
            max_norm=max_norm,
            is_joint=is_joint,
            before_step=count_rows,
            after_step=after_step,
            into=trained,
        )
        trained.rows = engine.rows_by_rank()
        access, missed = engine.parameters, engine.records.missed
        trained.num_behind = sum(missed.is_block_behind(block) for block in engine.layout.blocks)
        trained.weights = weights_of(engine)
        for name, parameter in engine.model.named_parameters():
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


def scattered_owners(make_model: MakeModel, num_ranks: int) -> dict[str, int]:
    """Return owners by which no rank has a range of experts, and the last rank has all of the first layer."""
    found = find_experts(make_model()).items()
    return {
        f"{name}.{expert}": (3 * expert + layer) % num_ranks if layer else num_ranks - 1
        for layer, (name, of) in enumerate(found)
        for expert in range(of.num_experts)
    }


FAMILIES = ["mixtral", "qwen3_moe", "olmoe", "gpt_oss", "deepseek_v3", "granitemoe"]


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

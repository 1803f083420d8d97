"""Ranks that are threads and train with an engine each, and one process of torch with the batches of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from engines import ONE_GENERATOR, RANK_SETTINGS, open_engine, resolved
from equal_tensors import assert_same_tensors, same_bits
from torch import Tensor

from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.device import Device
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.offloaded_model import stream_experts
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.ranks import Links

LR = 1e-3
AfterStep = Callable[[Any, int], object]
"""Gets the engine, or the stock model, and the number of the step."""


def do_nothing(_trained: Any, _step: int) -> None:
    pass


@dataclass
class Trained:
    """The results of a run, or of one of its ranks."""

    losses: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)


def assert_same_run(ours: Any, expected: Any, rank: int = 0, num_ranks: int = 1) -> None:
    """Check that weights, norms and losses are bitwise equal. `rank` of `num_ranks`: whose losses ours are, if one
    process computed those of all ranks in turn."""
    assert_same_tensors(ours.weights, expected.weights)
    for found, wanted in ((ours.norms, expected.norms), (ours.losses, expected.losses[rank::num_ranks])):
        assert len(found) == len(wanted) and all(map(same_bits, found, wanted)), (found, wanted)


def assert_same_ranks(ours: list[Any], expected: list[Any]) -> None:
    for of_rank, wanted in zip(ours, expected, strict=True):
        assert_same_run(of_rank, wanted)


@contextmanager
def closing(engine: OffloadEngine, links: Links) -> Iterator[None]:
    """Close an engine. If its rank has failed, tell the others first, whom it would otherwise serve for 2 seconds."""
    try:
        yield
    except BaseException as error:
        links.fail(error)
        raise
    finally:
        engine.close()


@contextmanager
def rank_engine(
    links: Links,
    folder: Path,
    make_model: Callable[[], Any],
    *,
    dtype: torch.dtype = torch.float32,
    hold_gradients: bool = True,
    device: Device | None = None,
    owners: Mapping[str, int] | None = None,
    **settings: Any,
) -> Iterator[OffloadEngine]:
    """Open the engine of one rank. `owners`: the rank of each expert, by its block's name."""
    with ONE_GENERATOR:
        model = make_model().train()
    config = resolved(folder / f"rank-{links.ranks.rank}", **{**RANK_SETTINGS, **settings})
    layout = lay_out(
        model, config, working_dtype=dtype, hold_gradients=hold_gradients, ranks=links.ranks, owners=owners
    )
    engine = open_engine(model, layout, config, device, links, compute_expert=one_expert)
    stream_experts(engine.experts)
    with closing(engine, links):
        yield engine


def take_steps(
    engine: OffloadEngine,
    loss_of: Callable[[int, int], Tensor],
    num_steps: int,
    *,
    lr: float = LR,
    num_micro: int = 1,
    max_norm: float = 0.0,
    is_joint: bool = False,
    before_step: AfterStep = do_nothing,
    after_step: AfterStep = do_nothing,
    into: Any = None,
) -> Any:
    """Train with the losses of a step's micro-batches. Returns losses and norms, in `into` if it is given. `is_joint`:
    micro-batches run together."""
    found = Trained() if into is None else into
    optimizer = OffloadAdamW(engine.model.parameters(), lr=lr, weight_decay=0.1, engine=engine)

    def run(step: int, micro: int) -> None:
        loss = loss_of(step, micro)
        found.losses.append(loss.detach())
        if not engine.defer_backward(loss / num_micro):
            engine.announce_backward(is_final=micro == num_micro - 1)
            (loss / num_micro).backward()

    for step in range(num_steps):
        calls = [partial(run, step, micro) for micro in range(num_micro)]
        if is_joint:
            engine.run_micro_batches(calls)
        else:
            for call in calls:
                call()
        if max_norm:
            found.norms.append(engine.clip_grad_norm(max_norm))
        before_step(engine, step)
        optimizer.step()
        optimizer.zero_grad()
        after_step(engine, step)
    return found


def weights_of(engine: OffloadEngine) -> dict[str, Tensor]:
    return {name: engine.parameters.read_parameter(name) for name, _ in engine.model.named_parameters()}


def stock_steps(
    model: Any,
    loss_of: Callable[[int, int, int], Tensor],
    num_steps: int,
    num_ranks: int,
    *,
    num_micro: int = 1,
    ranks_per_sum: int = 0,
    lr: float = LR,
    max_norm: float = 0.0,
    after_step: AfterStep = do_nothing,
) -> tuple[Trained, torch.optim.Optimizer]:
    """Train one process in memory with the losses of a step, a rank and a micro-batch. It accumulates the gradients of
    all ranks, or those of `ranks_per_sum` ranks each, and then adds these sums."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1, fused=True)
    found = Trained()
    for step in range(num_steps):
        sums: list[list[Tensor | None]] = []
        for rank in range(num_ranks):
            for micro in range(num_micro):
                loss = loss_of(step, rank, micro)
                (loss / num_micro / num_ranks).backward()
                found.losses.append(loss.detach())
            if ranks_per_sum and (rank + 1) % ranks_per_sum == 0:
                sums.append([parameter.grad for parameter in model.parameters()])
                model.zero_grad()
        for parameter, *of_ranks in zip(model.parameters(), *sums, strict=True) if sums else ():
            given = [gradient for gradient in of_ranks if gradient is not None]
            parameter.grad = sum(given[1:], given[0]) if given else None
        if max_norm:
            found.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm))
        optimizer.step()
        optimizer.zero_grad()
        after_step(model, step)
    found.weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return found, optimizer

"""The engine counts the routing of a run for its plan."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from engines import TwinsFactory
from torch import Tensor, nn


def test_the_engine_knows_how_many_tokens_went_to_each_expert(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=False, hold_gradients=False, experts="streamed")
    stock = twins.models[0]
    counts: dict[str, Tensor] = defaultdict(lambda: torch.zeros(4, dtype=torch.long))

    def count(name: str, index: Tensor) -> None:
        counts[name] += torch.bincount(index.reshape(-1), minlength=4)

    def counting(name: str) -> Any:
        layer = name.rpartition(".mlp")[0]
        return lambda _router, _args, output: count(layer, output[-1])

    for name, module in stock.named_modules():
        if isinstance(module, nn.Module) and type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(counting(name))
    twins.train(2)
    names = {block.name for block in twins.engine.layout.blocks}
    routing = {block.name.rpartition(".mlp")[0]: of for block, of in twins.engine.expert_loader.routing()}
    assert routing.keys() == counts.keys() and routing.keys() <= names
    assert {name: counts[name].tolist() for name in routing} == routing

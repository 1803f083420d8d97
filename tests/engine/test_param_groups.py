"""Param groups that change between steps, and weights that are frozen and thawed, train as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import HELD_OR_ACTIVE, EngineFactory, TwinsFactory

from hf_lohan.huggingface.optimizers import rules_of, take_over
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_batch, tiny_model


def freeze(models: tuple[Any, Any], *prefixes: str, thaw: bool = False) -> None:
    for model in models:
        for name, parameter in model.named_parameters():
            if name.startswith(prefixes):
                parameter.requires_grad_(thaw)


@HELD_OR_ACTIVE
def test_weights_frozen_after_offloading_can_be_thawed(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    """With gradual unfreezing, a layer's first step is its first one with a gradient. Weights that are frozen again
    keep their states.
    """
    twins = make_twins("llama", hold_gradients=hold_gradients, optimizer=lambda p: torch.optim.AdamW(p, fused=True))
    max_norm = 0.5 if hold_gradients else 0.0
    freeze(twins.models, "model.embed", "model.layers")
    twins.train(2, max_norm=max_norm)
    untrained = {part.name for part, count in twins.engine.step_counts.items() if not count}
    assert {name for name in untrained if not name.startswith("model.norm")} >= {"model.layers.0.mlp.up_proj.weight"}
    freeze(twins.models, "model.layers.1", thaw=True)
    twins.train(2, first_seed=200, max_norm=max_norm)
    freeze(twins.models, "model.layers.0", "model.embed", thaw=True)
    freeze(twins.models, "lm_head")
    twins.train(2, first_seed=300, max_norm=max_norm)
    twins.assert_equal()


@HELD_OR_ACTIVE
def test_lazy_streamed_experts_can_be_frozen(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    settings: dict[str, Any] = {"experts": "streamed", "experts.lazy": True, "cpu_memory": "6MiB"}
    adamw = {"optimizer": lambda params: torch.optim.AdamW(params, fused=True)}
    twins = make_twins("qwen3_moe", hold_gradients=hold_gradients, **settings, **adamw)
    for step in range(4):
        freeze(twins.models, "model.layers.0.mlp", thaw=step % 2 == 1)
        twins.train(2, first_seed=100 * step)
    access = twins.engine.parameters
    for name, parameter in twins.stock.named_parameters():
        assert torch.equal(access.read_parameter(name), parameter), name


def test_thawed_parameters_are_added_to_the_optimizer_with_its_defaults(make_twins: TwinsFactory) -> None:
    """Lightning's `BaseFinetuning` does this. The optimizer has the head from the start."""
    models = [tiny_model("llama").train() for _ in range(2)]
    made = iter(models)
    twins = make_twins(model_factory=lambda: next(made))
    freeze(twins.models, "model.")
    optimizers = [torch.optim.AdamW(m.lm_head.parameters(), lr=3e-3, weight_decay=0.2, fused=True) for m in models]
    twins.stock_optimizer, (twins.optimizer, _) = optimizers[0], take_over([optimizers[1]], twins.engine)
    twins.train(2)
    freeze(twins.models, "model.layers.1", thaw=True)
    for optimizer, model in zip(optimizers, models, strict=True):  # the caller's optimizer
        optimizer.add_param_group({"params": list(model.model.layers[1].parameters())})
    twins.train(2, first_seed=200, max_norm=0.5)
    assert [group["lr"] for group in twins.optimizer.param_groups] == [3e-3, 3e-3]
    twins.assert_equal()


@HELD_OR_ACTIVE
def test_parameters_may_move_to_another_group(hold_gradients: bool, make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", hold_gradients=hold_gradients)
    twins.train(1)
    for optimizer in (twins.stock_optimizer, twins.optimizer):  # one group keeps the rest
        first = optimizer.param_groups[0]
        moved = [first["params"].pop() for _ in range(3)]
        optimizer.add_param_group({"params": moved, "lr": 0.0, "weight_decay": 0.0, "betas": (0.8, 0.95)})
    before = twins.engine.parameters.read_parameter("lm_head.weight").clone()
    twins.train(1, first_seed=200)
    assert torch.equal(twins.engine.parameters.read_parameter("lm_head.weight"), before)
    for optimizer in (twins.stock_optimizer, twins.optimizer):
        groups = optimizer.param_groups
        groups[0]["params"].append(groups[1]["params"].pop())
        optimizer.param_groups = [groups[1], groups[0]]
    twins.train(1, first_seed=300)
    twins.assert_equal()


def test_a_group_may_change_between_backward_and_its_step(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", _clip="speculate")
    twins.backward(1)
    for optimizer in (twins.stock_optimizer, twins.optimizer):
        optimizer.add_param_group({"params": [optimizer.param_groups[0]["params"].pop()], "lr": 0.0})
    twins.step()
    twins.assert_equal()


def test_muon_and_adamw_may_get_new_groups(build_engine: EngineFactory) -> None:
    """A new group has the defaults and the rule of its own optimizer."""
    models = [tiny_model("llama").train() for _ in range(2)]
    optimizers = []
    for model in models:
        matrices = hidden_matrices(model)
        rest = [p for p in model.parameters() if p not in matrices]
        optimizers.append([torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-3, fused=True)])
    engine = build_engine(models[1], rules=rules_of(optimizers[1]), cpu_memory="4MiB")
    _, ours = take_over(optimizers[1], engine)
    head = "lm_head.weight"
    for model, (muon, adamw) in zip(models, [optimizers[0], ours], strict=True):
        group = adamw.param_groups[0]["params"]
        group[:] = [parameter for parameter in group if parameter is not model.lm_head.weight]
        adamw.add_param_group({"params": [model.lm_head.weight], "weight_decay": 0.5})
        for seed in range(2):
            model(**tiny_batch(seed=seed)).loss.backward()
            for optimizer in (muon, adamw):
                optimizer.step()
            for optimizer in (muon, adamw):
                optimizer.zero_grad()
    assert torch.equal(engine.parameters.read_parameter(head), models[0].lm_head.weight)
    with pytest.raises(ValueError, match=r"a param group of Muon were offloaded for AdamW"):
        models[1].lm_head.weight.requires_grad_(True)
        ours[1].param_groups.pop()
        ours[0].add_param_group({"params": [models[1].lm_head.weight]})
    assert len(ours[0].param_groups) == 1

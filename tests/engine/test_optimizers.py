"""Every offloaded optimizer gives the weights and states of the torch optimizer, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_lohan.costs import BudgetError
from hf_lohan.huggingface.optimizers import rules_of, take_over
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_batch, tiny_model

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda params: torch.optim.Adam(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "SGD-nesterov": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_held_summed_and_clipped_gradients_equal_stock(
    make: Callable[[Any], torch.optim.Optimizer], make_twins: Any
) -> None:
    twins = make_twins(optimizer=make)
    for step in range(3):
        twins.engine.announce_backward(is_final=False)
        twins.backward(2 * step)
        twins.engine.announce_backward(is_final=True)
        twins.backward(2 * step + 1)
        twins.clip(0.5)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_updates_in_backward_equal_stock(make: Callable[[Any], torch.optim.Optimizer], make_twins: Any) -> None:
    twins = make_twins(optimizer=make, hold_gradients=False)
    twins.train(3)
    twins.assert_equal()


@pytest.mark.parametrize("max_norm", [0.3, 100.0], ids=["redone", "accepted"])
def test_speculative_updates_equal_stock(max_norm: float, make_twins: Any) -> None:
    twins = make_twins(optimizer=OPTIMIZERS["SGD-nesterov"], _clip="speculate")
    twins.train(4, max_norm=max_norm)
    assert twins.engine.clip_history.num_speculated >= 3
    assert (twins.engine.clip_history.num_redone >= 3) == (max_norm == 0.3)
    twins.assert_equal()


def test_exact_masters_of_bfloat16_weights_work_with_any_optimizer(build_engine: Any) -> None:
    """The masters equal float32 weights that are trained with the gradients of a bfloat16 model."""
    model, masters = tiny_model("llama").bfloat16().train(), tiny_model("llama").train()
    masters.load_state_dict(model.state_dict())
    working = tiny_model("llama").bfloat16().train()
    stock = OPTIMIZERS["SGD-nesterov"](masters.parameters())
    own = OPTIMIZERS["SGD-nesterov"](model.parameters())
    engine = build_engine(model, dtype=torch.bfloat16, rules=rules_of([own]))
    optimizer, _ = take_over([own], engine)
    for step in range(3):
        with torch.no_grad():
            for low, master in zip(working.parameters(), masters.parameters(), strict=True):
                low.copy_(master)
        working(**tiny_batch(seed=step)).loss.backward()
        for low, master in zip(working.parameters(), masters.parameters(), strict=True):
            master.grad, low.grad = low.grad.float(), None
        stock.step()
        model(**tiny_batch(seed=step)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    access = engine.parameters
    for (name, master), low in zip(masters.named_parameters(), working.parameters(), strict=True):
        found = access.read_flat(name, "momentum_buffer")
        assert torch.equal(found, stock.state[master]["momentum_buffer"].flatten()), name
        assert torch.equal(access.read_parameter(name), master.detach().bfloat16()), name
        assert low.dtype == torch.bfloat16


def test_another_optimizer_than_that_of_the_store_is_refused(build_engine: Any) -> None:
    model = tiny_model("llama")
    engine = build_engine(model)
    with pytest.raises(ValueError, match=r"SGD were offloaded for AdamW\(exp_avg, exp_avg_sq\); pass SGD when"):
        take_over([torch.optim.SGD(model.parameters())], engine)


def muon_and_adamw(model: Any) -> tuple[torch.optim.Optimizer, torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    rest = [p for p in model.parameters() if p not in matrices]
    ordered = [p for p in model.parameters() if p in matrices]
    return torch.optim.Muon(ordered, lr=0.02), torch.optim.AdamW(rest, lr=1e-3, fused=True)


def test_muon_and_adamw_must_step_together(build_engine: Any) -> None:
    model = tiny_model("llama").train()
    engine = build_engine(model, rules=rules_of(own := muon_and_adamw(model)), cpu_memory="4MiB")
    _, (muon, adamw) = take_over(own, engine)
    model(**tiny_batch()).loss.backward()
    muon.step()
    with pytest.raises(RuntimeError, match="take their steps together"):
        muon.step()
    adamw.zero_grad()
    with pytest.raises(RuntimeError, match=r"call step.* of each once"):
        muon.step()
    with pytest.raises(ValueError, match="a closure"):
        muon.step(lambda: None)


def test_a_budget_without_room_for_whole_matrices_is_refused_with_the_number(build_engine: Any) -> None:
    model = tiny_model("llama", hidden_size=256)
    rules = rules_of(muon_and_adamw(model))
    with pytest.raises(BudgetError, match=r"for a whole matrix of 131072 elements.*set cpu_memory to at") as refused:
        build_engine(model, rules=rules, cpu_memory="6MiB", gpu_memory="64MiB")
    enough = int(str(refused.value).rpartition(" ")[2])
    build_engine(model, rules=rules, cpu_memory=enough, gpu_memory="64MiB")

"""Micro-batches of one step that run together: exactness and transfers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from engines import TwinsFactory
from joint_steps import NUM_MICRO_BATCHES, train

from hf_lohan.engine import EngineEvents
from hf_lohan.model import ParamSlice
from hf_lohan.testing.models import tiny_model


def count_loads(twins: Any, work: Callable[[], object]) -> int:
    """Count the loads of weights into slots. Unlike the bytes read, the count does not depend on when updates are
    written."""
    engine = twins.engine
    engine.wait_for_updates()
    before = sum(engine._ring.num_loads(block) for block in engine.layout.blocks)
    work()
    engine.wait_for_updates()
    return sum(engine._ring.num_loads(block) for block in engine.layout.blocks) - before


@pytest.mark.parametrize("family", slow_but(["gpt2"], ["llama", "opt", "gpt2"]))
def test_weights_are_loaded_as_often_as_for_one_micro_batch(family: str, make_twins: TwinsFactory) -> None:
    """GPT-2 has two blocks outside its layers that use the same slot one after the other."""
    model_factory = partial(tiny_model, family, num_layers=4)
    twins = make_twins(model_factory=model_factory, recompute=True, _resident_records="none", activations="recompute")

    def alone() -> None:
        twins.backward(7)
        twins.clip(0.5)
        twins.step()

    def in_turn() -> None:
        for number in range(NUM_MICRO_BATCHES):
            twins.backward(number)
        twins.clip(0.5)
        twins.step()

    for step in range(2):
        train(twins, step)
    together = count_loads(twins, partial(train, twins, 2))
    alone()
    one = count_loads(twins, alone)
    in_turn()
    many = count_loads(twins, in_turn)
    assert together == one <= many - (NUM_MICRO_BATCHES - 1) * 4  # separate micro-batches each load all layers
    twins.assert_equal()


def test_a_gradient_moves_to_the_host_once(make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    twins = make_twins("opt", recompute=True)
    train(twins, 0)
    sent: list[str] = []
    arrivals = twins.engine._pass._parts.arrivals
    send = arrivals.send_gradient

    def noted(part: ParamSlice, gradient: torch.Tensor, **how: bool) -> None:
        sent.append(part.name)
        send(part, gradient, **how)

    monkeypatch.setattr(arrivals, "send_gradient", noted)
    train(twins, 1)
    assert sorted(sent) == sorted(name for name, _ in twins.stock.named_parameters())


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(
    "settings",
    [{"hold_gradients": False}, {"activations": "swap", "cpu_memory": "16MiB"}, {"_clip": "speculate"}],
    ids=["in_backward", "swap", "speculate"],
)
def test_late_copies_change_nothing(settings: dict[str, Any], seed: int, make_twins: TwinsFactory) -> None:
    family = ("llama", "opt")[seed]
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(family, recompute=True, device=device, **settings)
    for step in range(3):
        train(twins, step, max_norm=0.5 if twins.engine.layout.holds_gradients else 0.0)
    twins.assert_equal()
    assert device.num_races == 0


def test_swapped_activations_of_all_micro_batches_fit(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True, activations="swap", cpu_memory="64MiB")
    swapper = twins.engine.activations.swapper
    train(twins, 0)
    train(twins, 1)
    layers = twins.engine.planned_memory.trace.values()
    assert swapper.swapped_bytes == NUM_MICRO_BATCHES * sum(sum(layer.sizes().values()) for layer in layers)
    train(twins, 2)
    twins.assert_equal()


def test_a_step_with_more_micro_batches_is_planned_again(make_twins: TwinsFactory) -> None:
    """A resumed run may begin with the last batch of an epoch."""
    planned = []
    events = EngineEvents(plan=lambda shape, _layout: planned.append(shape.num_together))
    twins = make_twins("llama", recompute=True, activations="swap", cpu_memory="64MiB", events=events)
    twins.train(2)
    train(twins, 0)
    train(twins, 1)
    assert planned == [1, NUM_MICRO_BATCHES]
    twins.assert_equal()


def test_evaluations_and_single_micro_batches_may_come_between(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    for step in range(3):
        train(twins, step)
        with torch.no_grad():
            twins.losses(50 + step)
        twins.train(1, first_seed=60 + step, max_norm=0.5)
    twins.assert_equal()

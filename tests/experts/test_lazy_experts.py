"""Lazy experts equal stock's weights, moments and losses bit for bit, whenever they are read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from engines import Twins, TwinsFactory
from torch import Tensor, nn

LAZY: dict[str, Any] = {"experts": "streamed", "experts.lazy": True}


class Halves:
    """Forces the routing of both twins to one half of the experts. `first` selects the half."""

    def __init__(self, twins: Twins) -> None:
        self.first = 0
        for model in twins.models:
            for module in [*model.modules()]:
                if type(module).__name__.endswith("TopKRouter"):
                    module.register_forward_hook(self._moved)

    def _moved(self, router: nn.Module, _args: Any, output: tuple[Tensor, Tensor, Tensor]) -> Any:
        *others, index = output
        half = int(router.num_experts) // 2
        return *others, self.first * half + index % half


def behind(twins: Twins) -> int:
    """Return the number of experts that are behind."""
    missed = twins.engine.records.missed
    return sum(missed.is_block_behind(block) for block in twins.engine.layout.blocks)


def num_experts(twins: Twins) -> int:
    return sum(len(blocks) for blocks in twins.engine.layout.model_blocks.experts.values())


@pytest.mark.covering(0)
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
@pytest.mark.parametrize("hold_gradients", [False, True])
def test_experts_that_are_behind_equal_stock(make_twins: TwinsFactory, family: str, hold_gradients: bool) -> None:
    twins = make_twins(family, recompute=True, hold_gradients=hold_gradients, **LAZY)
    halves = Halves(twins)
    most_behind = 0
    for step in range(16):
        halves.first = step // 7 % 2
        for optimizer in (twins.stock_optimizer, twins.optimizer):
            for group in optimizer.param_groups:
                group["lr"] = 1e-2 / (1 + step)
        twins.backward(step)
        twins.step()
        most_behind = max(most_behind, behind(twins))
    assert most_behind >= num_experts(twins) // 2 and behind(twins)
    twins.assert_equal()
    assert behind(twins), "reading changed the store"


def test_evaluation_sees_experts_that_are_behind(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, **LAZY)
    halves = Halves(twins)
    twins.train(3)
    assert behind(twins)
    halves.first = 1
    with torch.no_grad():
        for model in twins.models:
            model.eval()
        twins.losses(5)
    assert behind(twins)


def test_a_later_micro_batch_needs_what_an_earlier_one_did_not(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, **LAZY)
    halves, counts = Halves(twins), []
    for step in range(6):
        for micro_batch in range(2):
            halves.first = micro_batch if step == 3 else 0
            twins.backward(10 * step + micro_batch, scale=0.5)
        twins.step()
        twins.engine.wait_for_updates()
        counts.append(behind(twins))
    assert counts[3] < counts[2] > 0 and counts[5] > 0
    twins.assert_equal()


def test_clipped_and_skipped_steps_equal_stock(make_twins: TwinsFactory) -> None:
    """Steps have right and undone guesses, and a gradient that is not finite."""
    twins = make_twins("mixtral", recompute=True, _clip="speculate", **LAZY)
    halves = Halves(twins)
    for step in range(8):
        halves.first = step // 3 % 2
        if step == 4:
            for loss in twins.losses(step):
                (loss * float("inf")).backward()
            twins.stock_optimizer.zero_grad()
            twins.optimizer.step()
            twins.optimizer.zero_grad()
            assert twins.engine.step_was_skipped
            continue
        twins.backward(step)
        norm = float(torch.nn.utils.get_total_norm([p.grad for p in twins.stock.parameters() if p.grad is not None]))
        if step in (2, 5):  # both halve the gradients
            coefficient = 0.5
            for parameter in twins.stock.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(coefficient)
            twins.engine.clip_grad_norm(float("inf"))
            twins.engine._step._clip_coefficient = coefficient
        else:
            twins.engine.clip_grad_norm(1e6 + norm)
        twins.step()
        assert behind(twins)
    twins.assert_equal()
    assert twins.engine.clip_history.num_redone >= 1


def test_overwritten_weights_take_their_missed_steps_first(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, **LAZY)
    Halves(twins)
    twins.train(3)
    before = behind(twins)
    name = next(name for name, parameter in twins.stock.named_parameters() if parameter.dim() == 3)
    weight = dict(twins.stock.named_parameters())[name]
    with torch.no_grad():
        weight.mul_(0.5)
    twins.engine.parameters.write_parameter(name, weight)
    twins.engine.forget_weights()
    assert 0 < behind(twins) < before
    twins.train(2, first_seed=200)
    twins.assert_equal()


@pytest.mark.covering(0)
@pytest.mark.parametrize("seed", slow_but(range(2), range(10)))
def test_late_copies_change_no_bit(make_twins: TwinsFactory, seed: int) -> None:
    """Updates in backward may borrow weights from slots, but not for experts that are behind."""
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(
        ("mixtral", "qwen3_moe")[seed % 2],
        recompute=True,
        hold_gradients=seed % 4 < 2,
        device=device,
        prefetch_blocks=1 + seed % 3,
        **LAZY,
    )
    halves = Halves(twins)
    for step in range(7):
        halves.first = step // 3 % 2
        twins.backward(step)
        twins.step()
    assert behind(twins)
    twins.assert_equal()
    assert device.num_races == 0

"""With streamed experts, weights, moments and losses equal stock to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import TwinsFactory

from hf_lohan.costs import SizeClass
from hf_lohan.testing.models import tiny_batch

STREAMED: dict[str, Any] = {"experts": "streamed", "hold_gradients": False}
FAMILIES = ["mixtral", "qwen3_moe"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("recompute", [False, True])
def test_training_equals_stock(make_twins: TwinsFactory, family: str, recompute: bool) -> None:
    twins = make_twins(family, recompute=recompute, **STREAMED)
    assert twins.engine.layout.plan.num_slots[SizeClass.EXPERT] >= 2
    twins.train(3)
    twins.assert_equal()


@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_of_several_backwards_are_summed(make_twins: TwinsFactory, family: str) -> None:
    twins = make_twins(family, recompute=True, experts="streamed")
    for step in range(2):
        for micro_batch in range(2):
            twins.backward(10 * step + micro_batch, scale=0.5)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize("hold_gradients", [True, False])
def test_joint_micro_batches_sum_as_in_turn(make_twins: TwinsFactory, hold_gradients: bool) -> None:
    """Gradients are summed on the host, or on the device if the host holds none."""
    twins = make_twins("qwen3_moe", recompute=True, experts="streamed", hold_gradients=hold_gradients)
    for step in range(2):
        batches = [tiny_batch(seed=10 * step + number) for number in range(3)]
        for batch in batches:
            (twins.stock(**batch).loss / 3).backward()

        def run(batch: dict[str, torch.Tensor]) -> None:
            twins.engine.defer_backward(twins.model(**batch).loss / 3)

        twins.engine.run_micro_batches([lambda batch=batch: run(batch) for batch in batches])
        twins.step()
    twins.assert_equal()


def test_the_norm_equals_stock_up_to_rounding(make_twins: TwinsFactory) -> None:
    twins = make_twins("mixtral", recompute=True, experts="streamed")
    twins.backward(1)
    expected = torch.nn.utils.clip_grad_norm_(twins.stock.parameters(), 1e9)
    assert torch.allclose(twins.engine.clip_grad_norm(1e9), expected, rtol=1e-5, atol=0)
    twins.step()
    twins.assert_equal()

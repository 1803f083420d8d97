"""Outputs of streamed experts are swapped on a device that runs copies late."""

from __future__ import annotations

import pytest
from async_device import AsyncDevice
from covering import slow_but
from engines import TwinsFactory
from expert_models import least_gpu_memory

from hf_lohan.costs import SizeClass
from hf_lohan.testing.models import tiny_model


@pytest.mark.parametrize("seed", slow_but((0, 1), range(10)))
def test_late_copies_change_no_bit(seed: int, make_twins: TwinsFactory) -> None:
    """With two slots, each slot is overwritten as soon as compute has released it. Gradients are held, or applied in
    backward.
    """
    family = ("mixtral", "qwen3_moe")[seed % 2]
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(
        family,
        recompute=True,
        device=device,
        experts="streamed",
        activations="swap",
        hold_gradients=seed % 4 > 1,
        gpu_memory=least_gpu_memory(tiny_model(family), activations="swap"),
    )
    assert twins.engine.layout.plan.num_slots[SizeClass.EXPERT] == 2
    twins.train(3)
    twins.assert_equal()
    assert twins.engine.activations.swapper.swapped_bytes > 0
    assert device.num_races == 0

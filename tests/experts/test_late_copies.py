"""Late copies change no bit with streamed experts, and no memory is read while it is written."""

from __future__ import annotations

import pytest
import torch
from async_device import AsyncDevice
from covering import slow_but
from engines import TwinsFactory
from expert_models import least_gpu_memory

from hf_lohan.costs import SizeClass
from hf_lohan.testing.models import tiny_model


@pytest.mark.parametrize("seed", slow_but((0, 1), range(10)))
def test_late_copies_change_no_bit(make_twins: TwinsFactory, seed: int) -> None:
    """Batches have many tokens, or few that use only some experts. Evaluations run between steps. Gradients are held
    for a norm, or applied in backward.
    """
    device = AsyncDevice(seed, max_delay_s=5e-4)
    twins = make_twins(
        ["mixtral", "qwen3_moe"][seed % 2],
        recompute=seed % 4 < 2,
        experts="streamed",
        hold_gradients=seed % 3 > 0,
        device=device,
        gpu_memory="288KiB",
    )
    plan = twins.engine.layout.plan
    assert 2 <= plan.num_slots[SizeClass.EXPERT] <= 4 and plan.num_expert_staging_buffers == 2
    for step in range(3):
        for micro_batch in range(2 if seed % 3 else 1):
            shape = {"batch_size": 1, "sequence_length": 4} if micro_batch != step % 2 else {}
            twins.backward(10 * step + micro_batch, **shape)
        twins.step()
        with torch.no_grad():
            twins.losses(100 + step, batch_size=1, sequence_length=3)
    twins.assert_equal()
    assert device.num_races == 0


@pytest.mark.parametrize("seed", slow_but((0, 1), range(10)))
def test_late_swaps_change_no_bit(seed: int, make_twins: TwinsFactory) -> None:
    """Outputs of experts are swapped. With two slots, each slot is overwritten as soon as compute has released it.
    Gradients are held, or applied in backward.
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

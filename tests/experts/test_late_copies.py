"""Late copies change no bit with streamed experts, and no memory is read while it is written."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from engines import TwinsFactory

from hf_lohan.costs import SizeClass

NUM_QUICK_SEEDS = 2


def seeds(number: int) -> list[Any]:
    return [pytest.param(seed, marks=[] if seed < NUM_QUICK_SEEDS else pytest.mark.slow) for seed in range(number)]


@pytest.mark.parametrize("seed", seeds(10))
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

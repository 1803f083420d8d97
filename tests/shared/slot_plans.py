"""A `PoolPlan` with slots and without buffers for updates."""

from __future__ import annotations

from collections.abc import Mapping

from hf_lohan.costs import PoolPlan, SizeClass


def plan_of_slots(
    num_slots: Mapping[SizeClass, int],
    slot_bytes: Mapping[SizeClass, int],
    *,
    chunk_numel: int,
    num_staging_buffers: int = 0,
) -> PoolPlan:
    return PoolPlan(
        chunk_numel=chunk_numel,
        num_staging_buffers=num_staging_buffers,
        num_state_buffers=0,
        num_gradient_buffers=0,
        num_arrival_buffers=0,
        gradients_per_buffer=1,
        num_recall_buffers=0,
        held_blocks=(),
        spilled_blocks=(),
        slot_bytes=dict.fromkeys(SizeClass, 0) | dict(slot_bytes),
        num_slots=dict.fromkeys(SizeClass, 0) | dict(num_slots),
    )

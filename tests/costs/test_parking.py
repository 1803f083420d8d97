"""Updates are parked where that makes the drives work through the whole step, and nowhere else."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
from decoder_shapes import GB, decoder, machine
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.costs import HardwareProfile, OffloadPlan, TrainingSetup, plan_offload
from hf_lohan.costs.parking import spread_share

MODEL = decoder(256, 12, 4, 512, 1000)


@given(st.lists(st.integers(1, 1000), min_size=1), st.floats(0, 1))
def test_each_prefix_has_at_most_the_share_and_lacks_less_than_a_chunk(numels: list[int], share: float) -> None:
    chosen = spread_share(numels, share)
    for sum_numel, sum_chosen in zip(
        accumulate(numels), accumulate(n * c for n, c in zip(numels, chosen, strict=True)), strict=True
    ):
        assert share * sum_numel - max(numels) - 1e-3 <= sum_chosen <= share * sum_numel * (1 + 1e-6) + 1e-3
    assert spread_share(numels, 0.0) == [False] * len(numels)
    assert spread_share(numels, 1.0) == [True] * len(numels)


def planned(hardware: HardwareProfile, **changes: Any) -> OffloadPlan:
    setup = TrainingSetup(
        **{
            "gpu_memory_bytes": GB,
            "cpu_memory_bytes": GB,
            "activations": "recompute",
            "parked_share": None,
            "hands_over": True,
            **changes,
        }
    )
    return plan_offload(MODEL, hardware, setup)


def of_regime(compute_over_drive: float) -> HardwareProfile:
    """Return a machine whose device computes so many times as long as the drives work."""
    fast = machine(flops_per_s=1e12, link_bytes_per_s=1e12, ssd_read_bytes_per_s=1e9, ssd_write_bytes_per_s=1e9)
    floors = planned(fast, parked_share=0.0).prediction.floor_by_resource_s
    flops_per_s = 1e12 * floors["compute"] / floors["ssd"] / compute_over_drive
    return replace(fast, device=replace(fast.device, flops_per_s=flops_per_s))


@pytest.mark.parametrize("clip", ["none", "speculate"])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_a_balanced_step_is_about_as_long_as_its_busiest_resource(clip: str, accumulation: int) -> None:
    hardware = of_regime(1.0)
    changes = {"clip": clip, "num_micro_batches": accumulation}
    usual, parked = planned(hardware, parked_share=0.0, **changes), planned(hardware, **changes)
    assert 0 < parked.parked_share < 1
    assert parked.prediction.step_s < 0.97 * usual.prediction.step_s
    if accumulation == 1:
        assert parked.prediction.step_s < 1.1 * max(parked.prediction.floor_by_resource_s.values())
        assert usual.prediction.step_s > 1.2 * max(usual.prediction.floor_by_resource_s.values())


def test_nothing_is_parked_where_that_saves_nothing() -> None:
    assert planned(of_regime(2.0), clip="none").parked_share == 0.0  # the backward hides all updates
    assert planned(of_regime(1.0), clip="defer").parked_share == 0.0  # all wait


def test_gradients_that_are_not_held_are_parked_where_ram_has_room() -> None:
    hardware, gradient_bytes = of_regime(1.0), MODEL.num_params * MODEL.param_itemsize
    much = planned(hardware, clip="none")
    share = much.parked_share / 2
    little = planned(hardware, clip="none", activation_cpu_bytes=int(share * gradient_bytes))
    assert 0 < little.parked_share <= share < much.parked_share
    assert little.prediction.tier_bytes["cpu"]["gradients"] == pytest.approx(share * gradient_bytes, abs=1)
    assert planned(hardware, clip="none", activation_cpu_bytes=0).parked_share == 0.0
    assert planned(hardware, clip="speculate", activation_cpu_bytes=0).parked_share > 0  # these are held in any case

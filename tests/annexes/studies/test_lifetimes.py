"""Lifetimes: shares in use, gaps over the end of the step, and what could leave the device between two uses."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from decoder_shapes import machine

from hf_lohan.annexes.studies.lifetimes import StepLifetimes, StepOperation, TensorLifetime, Weight, step_lifetimes


def test_gaps_and_shares() -> None:
    kept = TensorLifetime("w", "a", "param", 100, 0, 4, [1, 2], is_kept=True)
    short = TensorLifetime("x", "a", "activation", 50, 0, 3, [0, 2])
    step = StepLifetimes([1.0, 2.0, 3.0, 4.0], [kept, short])
    assert step.step_s == 10
    assert step.gaps_s(kept).tolist() == [0.0, 5.0]  # 4 s at the end, 1 s at the beginning
    assert step.gaps_s(short).tolist() == [2.0]
    assert step.memory_curve("activation").tolist() == [50, 50, 50, 0]
    used = 100 * (2 + 3) + 50 * (1 + 3)
    assert step.active_share() == pytest.approx(used / (100 * 10 + 50 * 6))


def test_bytes_can_leave_if_they_return_within_the_longest_gap() -> None:
    hardware = replace(machine(), h2d_bytes_per_s=100.0, d2h_bytes_per_s=50.0)
    tensors = [TensorLifetime(str(size), "a", "activation", size, 0, 3, [0, 2]) for size in (10, 60, 90)]
    summary = StepLifetimes([1.0, 2.0, 1.0], tensors).kinds(hardware)["activation"]
    # 60 bytes take 60 / 50 + 60 / 100 = 1.8 s, and 90 bytes 2.7 s
    assert summary.can_leave_share["link"] == pytest.approx((10 + 60) / 160)
    assert (summary.num_tensors, summary.num_bytes, summary.most_bytes) == (3, 160, 160)
    assert (summary.median_gap_s, summary.longest_gap_s) == (2.0, 2.0)


def test_an_update_of_each_block_follows_the_backward() -> None:
    hardware = machine()
    operations = [StepOperation(name, "a", 0, 8) for name in ("forward", "backward", "gradient")]
    gradient = TensorLifetime("w", "a", "gradient", 2, 2, 3, [2])
    weights = [
        Weight("w", "a", 2, 10, 2, [0, 1]),
        Weight("frozen", "a", 2, 0, 0, [0, 1]),
        Weight("unseen", "b", 2, 10, 2, []),
    ]
    step = step_lifetimes(operations, [gradient], weights, hardware)
    assert len(step.starts_s) == 5  # two blocks have updates
    of_kind = {kind: [one for one in step.tensors if one.kind == kind] for kind in ("param", "gradient", "state")}
    assert [one.uses for one in of_kind["param"]] == [[0, 1, 3], [0, 1], [4]]
    assert [(one.born, one.died, one.uses) for one in of_kind["gradient"]] == [(2, 4, [2, 3]), (4, 5, [4])]
    assert [one.uses for one in of_kind["state"]] == [[3], [4]]
    assert np.all(step.memory_curve("state") == 20)

"""Guessing pays where updates hide behind backward and few steps clip; where both ways take the same, nothing is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hf_lohan.planner import StepTimes, should_speculate
from hf_lohan.planner.clip_choice import deferred_step_s, speculative_step_s

seconds = st.floats(1e-3, 1e3)
step_times = st.builds(StepTimes, forward_s=seconds, backward_s=seconds, update_s=seconds)
clip_rates = st.floats(0.0, 1.0)


@pytest.mark.parametrize(
    ("forward_s", "backward_s", "update_s", "deferred_s", "speculative_s"),
    [
        (1.0, 2.0, 0.5, 3.0, 3.0),  # hidden either way
        (1.0, 2.0, 1.5, 3.5, 3.0),  # too long for the forward, not for the backward
        (1.0, 2.0, 4.0, 6.0, 5.0),  # too long for both
        (3.0, 2.0, 2.5, 5.0, 5.5),  # hidden under the forward only
    ],
)
def test_times_of_steps_that_do_not_clip(
    forward_s: float, backward_s: float, update_s: float, deferred_s: float, speculative_s: float
) -> None:
    times = StepTimes(forward_s, backward_s, update_s)
    assert deferred_step_s(times) == deferred_s
    assert speculative_step_s(times, clip_rate=0.0) == speculative_s
    assert should_speculate(times, clip_rate=0.0) == (speculative_s < deferred_s)


def test_the_clip_rate_decides_where_updates_are_long() -> None:
    times = StepTimes(forward_s=1.0, backward_s=2.0, update_s=4.0)
    # Clipping adds max(forward, update) - forward = 3 s to 5 s; deferring takes 6 s.
    assert speculative_step_s(times, clip_rate=1.0) == 8.0
    assert should_speculate(times, clip_rate=0.3)
    assert not should_speculate(times, clip_rate=0.4)


@given(step_times)
def test_where_every_step_clips_nothing_is_guessed(times: StepTimes) -> None:
    assert not should_speculate(times, clip_rate=1.0)


@given(step_times, clip_rates)
def test_where_updates_hide_under_the_forward_guessing_wins_nothing(times: StepTimes, clip_rate: float) -> None:
    hidden = StepTimes(times.forward_s, times.backward_s, update_s=min(times.update_s, times.forward_s))
    assert speculative_step_s(hidden, clip_rate) >= deferred_step_s(hidden) * (1 - 1e-12)


@given(step_times, clip_rates, clip_rates)
def test_more_clipping_never_makes_guessing_better(times: StepTimes, one_rate: float, other_rate: float) -> None:
    low, high = sorted((one_rate, other_rate))
    assert speculative_step_s(times, low) <= speculative_step_s(times, high) * (1 + 1e-12)
    if should_speculate(times, high):
        assert speculative_step_s(times, low) < deferred_step_s(times) * (1 + 1e-12)


def test_rounding_does_not_make_equal_times_unequal() -> None:
    times = StepTimes(forward_s=1.875, backward_s=1.875, update_s=1.0)
    assert not should_speculate(times, clip_rate=0.0006576084937899143)

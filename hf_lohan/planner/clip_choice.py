"""Two exact ways to clip by the global norm, and which of them a step should take."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTimes:
    """What the parts of a step take when nothing holds them up."""

    forward_s: float
    backward_s: float
    update_s: float
    """The optimizer pipeline over all chunks: read, AdamW, write."""


def deferred_step_s(times: StepTimes) -> float:
    """Updates wait for the norm and run under the next forward."""
    return max(times.forward_s, times.update_s) + times.backward_s


def speculative_step_s(times: StepTimes, clip_rate: float) -> float:
    """Updates run in backward, unscaled; of a fraction ``clip_rate`` of the steps they are done over, deferred."""
    in_backward_s = max(times.backward_s, times.update_s)
    done_over_s = max(times.forward_s, times.update_s) - times.forward_s
    return times.forward_s + in_backward_s + clip_rate * done_over_s


def should_speculate(times: StepTimes, clip_rate: float) -> bool:
    """Whether speculating is expected to be faster. Where both take the same, deferring moves fewer bytes."""
    return speculative_step_s(times, clip_rate) < deferred_step_s(times) * (1 - 1e-9)

"""Medians of samples, on a clock that only the runs advance."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, repeat

import pytest

from hf_lohan.hardware.rates import median_s


class FakeClock:
    """Each run takes the next of `durations_s`. The clock advances when the run is waited for."""

    def __init__(self, durations_s: Iterator[float]) -> None:
        self.now_s = 100.0
        self.num_runs = 0
        self._durations_s = durations_s
        self._pending_s = 0.0

    def run(self) -> None:
        self.num_runs += 1
        self._pending_s += next(self._durations_s)

    def synchronize(self) -> None:
        self.now_s += self._pending_s
        self._pending_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def measure(clock: FakeClock, budget_s: float) -> float:
    wait: Callable[[], None] = clock.synchronize
    return median_s(clock.run, wait, budget_s=budget_s, clock=clock)


def test_the_first_runs_and_one_slow_sample_do_not_count() -> None:
    clock = FakeClock(chain([9.0, 2.0], [2.0, 50.0, 2.0, 2.0, 2.0], repeat(2.0)))
    assert measure(clock, budget_s=66.0) == 2.0


def test_the_budget_is_kept() -> None:
    clock = FakeClock(repeat(1.0))
    assert measure(clock, budget_s=10.0) == 1.0
    assert clock.now_s == 110.0


def test_without_a_budget_one_sample_is_taken() -> None:
    clock = FakeClock(repeat(1.0))
    assert measure(clock, budget_s=0.0) == 1.0
    assert clock.num_runs == 3


def test_short_runs_are_timed_several_at_once() -> None:
    clock = FakeClock(repeat(1e-4))
    assert measure(clock, budget_s=0.0) == pytest.approx(1e-4)
    assert clock.num_runs - 2 == pytest.approx(50, abs=1)


def test_measuring_ends_if_the_clock_stands_still() -> None:
    clock = FakeClock(repeat(0.0))
    assert measure(clock, budget_s=1.0) == 0.0
    assert clock.num_runs == 2 + 25 * 1000

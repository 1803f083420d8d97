"""How long something takes: repeated, waited for, and the middle one of several samples."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

_SAMPLE_S = 0.005
"""Runs shorter than this are sampled several at a time: then neither the clock nor the waiting shows."""
_MAX_RUNS_PER_SAMPLE = 1000
_MAX_SAMPLES = 25


def median_s(
    run: Callable[[], object],
    synchronize: Callable[[], object],
    *,
    budget_s: float,
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Median seconds of one `run`, `synchronize` waiting for what it has started.

    Takes about `budget_s`, and more only where three runs take longer than that.
    """
    began_s = clock()
    run()  # kernels are loaded and memory is touched on first use
    synchronize()
    start_s = clock()
    run()
    synchronize()
    once_s = clock() - start_s
    num_runs = min(_MAX_RUNS_PER_SAMPLE, math.ceil(_SAMPLE_S / once_s)) if once_s > 0 else _MAX_RUNS_PER_SAMPLE
    samples_s: list[float] = []
    while not samples_s or (clock() - began_s < budget_s and len(samples_s) < _MAX_SAMPLES):
        start_s = clock()
        for _ in range(num_runs):
            run()
        synchronize()
        samples_s.append((clock() - start_s) / num_runs)
    return statistics.median(samples_s)

"""Choose the first case of a test, or a few cases that cover each value, or each pair of values, of its parameters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[tuple[str, str], ...]
"""The name and the `repr` of each parameter's value."""


def few_that_cover(cases: Sequence[Case], strength: int) -> set[Case]:
    """Return cases that contain every combination of `strength` values that occurs in `cases`.

    A case with more new combinations is chosen first. Among equals, a case with rarer values is chosen.
    """
    left = {values for case in cases for values in _together(case, strength)}
    chosen: set[Case] = set()
    num_chosen: Counter[tuple[str, str]] = Counter()
    while left:
        best = max(cases, key=lambda case: (len(left & _together(case, strength)), -sum(num_chosen[v] for v in case)))
        left -= _together(best, strength)
        num_chosen.update(best)
        chosen.add(best)
    return chosen


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Mark as slow the cases of tests marked `covering(strength)` that `few_that_cover` does not choose."""
    by_test: dict[str, list[tuple[Case, pytest.Item]]] = {}
    strengths: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("covering")
        if marker is None or item.get_closest_marker("slow"):
            continue
        test = item.nodeid.partition("[")[0]
        strengths[test] = marker.args[0]
        parameters = item.callspec.params  # type: ignore[attr-defined]
        by_test.setdefault(test, []).append(
            (tuple((name, repr(parameters[name])) for name in sorted(parameters)), item)
        )
    for test, cases in by_test.items():
        chosen = few_that_cover([case for case, _ in cases], strengths[test])
        for case, item in cases:
            if case not in chosen:
                item.add_marker(pytest.mark.slow)


def _together(case: Case, strength: int) -> set[Case]:
    return set(itertools.combinations(case, min(strength, len(case))))


def slow_but(quick: Collection[Any], values: Iterable[Any]) -> list[Any]:
    """Mark the values of a parameter as slow, except the quick ones."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]

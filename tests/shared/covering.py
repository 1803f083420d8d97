"""Of the many cases of one test, few that have each value, or each pair of values, of its parameters."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import pytest

Case = tuple[tuple[str, str], ...]
"""Which value each parameter has, as `repr` shows it."""


def few_that_cover(cases: Sequence[Case], strength: int) -> set[Case]:
    """Cases in which each `strength` values occur together that do so anywhere.

    The case with the most that is new comes first; of equals one whose values were had least, so that all get about
    as many cases.
    """
    left = {values for case in cases for values in _together(case, strength)}
    chosen: set[Case] = set()
    num_had: Counter[tuple[str, str]] = Counter()
    while left:
        best = max(cases, key=lambda case: (len(left & _together(case, strength)), -sum(num_had[v] for v in case)))
        left -= _together(best, strength)
        num_had.update(best)
        chosen.add(best)
    return chosen


def mark_others_slow(items: Iterable[pytest.Item]) -> None:
    """Tests marked `covering(strength)`: those cases that `few_that_cover` leaves out are slow."""
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
    """Values of a parameter, those that are not among the quick ones marked slow."""
    return [value if value in quick else pytest.param(value, marks=pytest.mark.slow) for value in values]

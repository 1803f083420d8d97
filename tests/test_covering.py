"""The cases that run by default of a test with many parameters."""

from __future__ import annotations

import itertools

import pytest
from covering import Case, few_that_cover

CASES: list[Case] = [
    (("device", device), ("family", family), ("norm", norm))
    for device, family, norm in itertools.product("ab", "abcde", "abc")
]


@pytest.mark.parametrize(("strength", "num_cases"), [(0, 1), (1, 5), (2, 15)])
def test_few_cases_cover_all_combinations(strength: int, num_cases: int) -> None:
    chosen = few_that_cover(CASES, strength)
    assert len(chosen) == num_cases
    for values in {values for case in CASES for values in itertools.combinations(case, strength)}:
        assert any(set(values) <= set(case) for case in chosen)

"""The cases that run by default of a test with many parameters."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import covering
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


def test_cases_are_spread_evenly_over_values() -> None:
    of_pairs = [(("clips", clips), ("read", read)) for clips in "ab" for read in "abcdef"]
    chosen = few_that_cover(of_pairs, 1)
    assert len(chosen) == 6
    assert sum(("clips", "a") in case for case in chosen) == 3


def test_a_strength_above_the_number_of_parameters_keeps_all() -> None:
    assert few_that_cover(CASES, 4) == set(CASES)


CONFTEST = """
import pytest
from covering import mark_others_slow

def pytest_configure(config):
    config.addinivalue_line("markers", "covering(strength): as in the suite")
    config.addinivalue_line("markers", "slow: left out")

@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    mark_others_slow(items)
"""
TESTS = """
import pytest

@pytest.mark.covering(1)
@pytest.mark.parametrize("x", [1, 2, 3])
@pytest.mark.parametrize("y", [1, 2])
def test_few(x, y): ...

@pytest.mark.parametrize("x", [1, 2, 3])
def test_all(x): ...
"""


@pytest.mark.parametrize(
    ("selection", "summary"),
    [
        (["-m", "not slow"], "6 passed, 3 deselected"),
        (["-m", "slow"], "3 passed, 6 deselected"),
        (["-m", "not slow", "test_it.py::test_few[1-3]"], "1 passed"),
    ],
)
def test_other_cases_are_slow(selection: list[str], summary: str, tmp_path: Path) -> None:
    """A case selected by its name runs."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    ran = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *selection],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(covering.__file__).parent), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
    )
    assert summary in ran.stdout, ran.stdout

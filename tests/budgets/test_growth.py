"""Memory does not grow during a run of many steps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from python_runs import run_python

SCRIPT = Path(__file__).with_name("train_many_steps.py")
MIB = 1024**2
NUM_STEPS, LOOK_EVERY = 240, 40
NUM_GROWN = NUM_STEPS - LOOK_EVERY
"""Steps after the first look, when everything that a run allocates once is allocated."""


@pytest.mark.slow
def test_no_growth_over_two_hundred_steps(tmp_path: Path) -> None:
    output = run_python(SCRIPT, tmp_path, NUM_STEPS, LOOK_EVERY).stdout
    line = next(line for line in output.splitlines() if line.startswith("RESULT "))
    first, *_, last = json.loads(line.removeprefix("RESULT "))
    print(first, last)
    assert last["step"] - first["step"] == NUM_GROWN
    # One list, dict or tensor kept for each step would exceed the first limit, one gradient of a layer the second.
    assert last["num_objects"] - first["num_objects"] < NUM_GROWN
    assert last["anonymous_bytes"] - first["anonymous_bytes"] < 4 * MIB

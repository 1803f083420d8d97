"""Memory does not grow during a run of many steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("train_many_steps.py")
MIB = 1024**2
NUM_STEPS, LOOK_EVERY = 240, 40
NUM_GROWN = NUM_STEPS - LOOK_EVERY
"""Steps after the first look, when everything that a run allocates once is allocated."""


@pytest.mark.slow
def test_no_growth_over_two_hundred_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), str(tmp_path), str(NUM_STEPS), str(LOOK_EVERY)]
    output = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert output.returncode == 0, output.stderr[-3000:]
    line = next(line for line in output.stdout.splitlines() if line.startswith("RESULT "))
    first, *_, last = json.loads(line.removeprefix("RESULT "))
    print(first, last)
    assert last["step"] - first["step"] == NUM_GROWN
    # One list, dict or tensor kept for each step would exceed the first limit, one gradient of a layer the second.
    assert last["num_objects"] - first["num_objects"] < NUM_GROWN
    assert last["anonymous_bytes"] - first["anonymous_bytes"] < 4 * MIB

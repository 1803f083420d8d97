"""Where the tests of exactness train: on the CPU, or with LOHAN_TEST_DEVICE=cuda on the double of tests/cuda_double.

A real GPU's kernels round otherwise than the CPU, on which AdamW runs. There the tolerances of these tests do not hold.
"""

from __future__ import annotations

import os

DEVICE = os.environ.get("LOHAN_TEST_DEVICE", "cpu")
USE_CPU = DEVICE == "cpu"

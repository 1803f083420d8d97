"""The device of the exactness tests: the CPU or, with LOHAN_TEST_DEVICE=cuda, the double of tests/cuda_double. The
tolerances of these tests do not hold on a real GPU, whose rounding differs from that of the CPU, which runs AdamW."""

from __future__ import annotations

import os

DEVICE = os.environ.get("LOHAN_TEST_DEVICE", "cpu")
USE_CPU = DEVICE == "cpu"

"""Limit every GPU to 24 GB, so that no test needs a larger one. Make the modules of this folder importable."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

DEVICE_BYTES = 24e9


@pytest.fixture(scope="session", autouse=True)
def limit_gpu_memory() -> None:
    if torch.cuda.is_available():
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, DEVICE_BYTES / total_bytes))


@pytest.fixture
def double() -> Any:
    """The double of the CUDA runtime. The test is skipped on a real GPU."""
    from doubled_device import find_double

    found = find_double()
    if found is None:
        pytest.skip("needs the CUDA double: bash scripts/development/cuda_double.sh")
    return found

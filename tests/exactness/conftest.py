"""Make the modules beside this file importable. To run these tests on the asynchronous device double:

LOHAN_TEST_ASYNC_SEED=7 python -m pytest tests/exactness
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

ASYNC_SEED = os.environ.get("LOHAN_TEST_ASYNC_SEED")


@pytest.fixture(autouse=True)
def async_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a seed is set, every engine that Trainer builds runs on the double."""
    if ASYNC_SEED is None:
        return
    from async_device import AsyncDevice

    from hf_lohan.huggingface import local_run

    monkeypatch.setattr(
        local_run, "device_for", lambda _, timeline: AsyncDevice(int(ASYNC_SEED), max_delay_s=2e-4, timeline=timeline)
    )

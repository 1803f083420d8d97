"""Import the fixtures of engines and twins, and make the modules beside this file importable."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from engines import build_engine, make_config, make_twins
from offloaded_models import forget_global_state

sys.path.insert(0, str(Path(__file__).parent))

__all__ = ["build_engine", "forget_global_state", "make_config", "make_twins"]


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Reference counts alone must free objects."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

"""The double of the CUDA runtime, for tests that ask it what happened. The only file here that knows its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_NAMES = ("cuda_double", "fakecuda")


def find_double() -> Any:
    """The double's module; None on a machine without it, so also where CUDA is real."""
    name = next((name for name in _NAMES if importlib.util.find_spec(name) is not None), None)
    return None if name is None else importlib.import_module(name)


@contextmanager
def pin_limit(double: Any, num_bytes: int) -> Iterator[None]:
    """Within, no more than this can be pinned in addition to what is pinned already."""
    if hasattr(double, "pin_limit"):
        with double.pin_limit(double.counts().get("pinned bytes now", 0) + num_bytes):
            yield
    elif "FAKECUDA_PIN_LIMIT" in os.environ:  # set for this process, where it cannot be set for a test
        yield
    else:
        import pytest

        pytest.skip("this double takes its limit when the process starts: FAKECUDA_PIN_LIMIT=1M")

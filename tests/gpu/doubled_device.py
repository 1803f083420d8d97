"""The double of the CUDA runtime, for tests that ask it what happened. The only file here that knows its name."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def find_double() -> Any:
    """The double's module; None where it is not what torch runs on, so also where CUDA is real."""
    try:
        double = importlib.import_module("cuda_double")
        double.counts()
    except (ImportError, OSError, AttributeError):  # not installed; no runtime of that name; another one's
        return None
    return double


@contextmanager
def pin_limit(double: Any, num_bytes: int) -> Iterator[None]:
    """Within, no more than this can be pinned in addition to what is pinned already."""
    gc.collect()  # else what an earlier test has pinned makes room meanwhile
    with double.pin_limit(double.counts().get("pinned bytes now", 0) + num_bytes):
        yield


def environment_of_double(**settings: int) -> dict[str, str]:
    """The variables by which another process gets a double of these settings: ``SEED=7``, ``DEVICES=2``, ..."""
    return {f"CUDA_DOUBLE_{name}": str(value) for name, value in settings.items()}

"""Access to the double of the CUDA runtime, whose module only this file imports."""

from __future__ import annotations

import gc
import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


def find_double() -> Any:
    """Return the double's module, or None if torch does not run on the double."""
    try:
        double = importlib.import_module("cuda_double")
        double.counts()
    except (ImportError, OSError, AttributeError):  # not installed, no CUDA runtime, or the real runtime
        return None
    return double


@contextmanager
def pin_limit(double: Any, num_bytes: int) -> Iterator[None]:
    """Context in which at most `num_bytes` more can be pinned."""
    gc.collect()  # unpins memory of earlier tests now, and not within the context
    with double.pin_limit(double.counts().get("pinned bytes now", 0) + num_bytes):
        yield


def environment_of_double(**settings: int) -> dict[str, str]:
    """Return environment variables that give another process's double these settings, such as `SEED=7`."""
    return {f"CUDA_DOUBLE_{name}": str(value) for name, value in settings.items()}

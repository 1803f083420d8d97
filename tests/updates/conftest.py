"""Define fixtures, and make the modules beside this file importable."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import build_engine, make_config, make_twins

sys.path.insert(0, str(Path(__file__).parent))

from pipeline_bench import Bench, Schedule

__all__ = ["build_engine", "make_bench", "make_config", "make_twins"]


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Return a function that makes `Bench`es, and close them at the end of the test."""
    benches: list[Bench] = []

    def make(schedule: Schedule = "optimized", **settings: Any) -> Bench:
        benches.append(Bench(schedule, **settings))
        return benches[-1]

    yield make
    for bench in benches:
        bench.pipeline.close()

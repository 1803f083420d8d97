"""Make the modules beside this file importable, and define fixtures that several files use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest
from gloo_devices import gloo_between_cpus

from hf_lohan.costs import cuts

sys.path.insert(0, str(Path(__file__).parent))  # started processes inherit it


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Ranks are forked from a process that has already imported torch."""
    from rank_processes import CONTEXT

    CONTEXT.set_forkserver_preload(["rank_processes"])
    # Python 3.11's fork server inherits our environment but not our `sys.path`, and ignores failed imports.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ensure_running()


@pytest.fixture
def cuts_small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank has a part of a table, which begins and ends within rows."""
    monkeypatch.setattr(cuts, "SMALL_NUMEL", 0)


@pytest.fixture
def over_gloo() -> Iterator[None]:
    """CPU devices send to each other."""
    with gloo_between_cpus():
        yield

"""What the tests of this room share lies beside them."""

from __future__ import annotations

import os
import sys
from multiprocessing.forkserver import ensure_running
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # also for processes that are started here


@pytest.fixture(scope="session")
def fork_server() -> None:
    """Ranks are forked from a process that has imported torch: they need not do that again."""
    from rank_processes import CONTEXT

    CONTEXT.set_forkserver_preload(["rank_processes"])
    # Python 3.11's fork server has our environment, not our `sys.path`, and is silent if it cannot import.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        ensure_running()

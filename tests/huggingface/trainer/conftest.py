"""The checkpoint that tests of TRL's trainers load."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import trl_runs

    return trl_runs.save_checkpoint(tmp_path_factory.mktemp("llama"))

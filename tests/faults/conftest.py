"""Make the modules of this folder importable and train each kind of run once without faults."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from processes import finish, start_fork_server
from runs import Outcome, Run, read_outcome


@pytest.fixture(scope="session", autouse=True)
def fork_server() -> None:
    start_fork_server(preload="runs")


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Run], Outcome]:
    """Return the outcome of a run without faults. Folders, RAM, commits and checkpoints do not change the outcome."""
    known: dict[Run, Outcome] = {}

    def outcome_of(run: Run) -> Outcome:
        folder = tmp_path_factory.mktemp("undisturbed")
        kind = replace(run, output_dir=Path(), beside=Path(), ssd=Run.ssd, cpu_memory=Run.cpu_memory)
        kind = replace(kind, commit_every=Run.commit_every, save_steps=Run.save_steps)
        if kind not in known:
            finish(replace(kind, output_dir=folder / "out", beside=folder))
            known[kind] = read_outcome(folder)
            assert len(known[kind].rows) == run.num_steps
        return known[kind]

    return outcome_of

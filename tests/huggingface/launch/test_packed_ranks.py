"""Two processes of `lohan launch` over a packed base equal one process that accumulates their batches, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import packed_by_ranks
import pytest
from equal_tensors import assert_same_tensors
from packed_by_ranks import KINDS, NF4
from python_runs import run_python
from safetensors.torch import load_file

pytest.importorskip("bitsandbytes")
SCRIPT = str(Path(__file__).parent / "packed_by_ranks.py")
LAUNCH = ["-m", "hf_lohan.cli", "launch", "--cpu", "--num_processes", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_script(folder: Path, what: str, kinds: Sequence[str], *, status: int | None = 0) -> str:
    launcher = [] if what == "alone" else LAUNCH
    return run_python(*launcher, SCRIPT, folder, what, *kinds, status=status, OMP_NUM_THREADS="1").stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints, and what one process trained."""
    folder = tmp_path_factory.mktemp("packed")
    packed_by_ranks.bases(folder / "bases")
    run_script(folder, "alone", KINDS)
    return folder


def log_of(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm")
    return [tuple(entry[name] for name in names) for entry in facts_of(folder)["log"] if "loss" in entry]


def facts_of(folder: Path) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads((folder / "facts.json").read_text())
    return facts


def assert_as_alone(ours: Path, alone: Path) -> None:
    assert len(log_of(alone)) == packed_by_ranks.NUM_STEPS and log_of(ours) == log_of(alone)
    for file in ("adapter_model.safetensors", "merged/model.safetensors"):
        found, expected = load_file(ours / file), load_file(alone / file)
        assert_same_tensors(found, expected)


def test_two_processes_train_save_and_merge_as_one(folder: Path) -> None:
    run_script(folder, "whole", KINDS)
    for kind in KINDS:
        assert_as_alone(folder / "whole" / kind, folder / "alone" / kind)
        assert facts_of(folder / "whole" / kind)["packs"]
    facts = facts_of(folder / "whole" / NF4)
    assert facts["shared_bytes"] < 0.3 * facts["dense_bytes"]


def test_two_processes_resume_over_a_packed_base_after_one_was_killed(folder: Path) -> None:
    stderr = run_script(folder, "killed", [NF4], status=None)
    assert "RankFailedError: rank 1 (pid" in stderr
    assert "holds the steps of a run over another base" in run_script(folder, "other", [NF4], status=None)
    run_script(folder, "rest", [NF4])
    assert_as_alone(folder / "rest" / NF4, folder / "alone" / NF4)

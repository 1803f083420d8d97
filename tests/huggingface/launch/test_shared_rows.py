"""Trainer in processes that share rows equals a stock process with whole rows, up to the order of sums."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from python_runs import run_python
from safetensors.torch import load_file

SCRIPT = str(Path(__file__).parent / "sequences_by_ranks.py")
CASES_OF_TWO = ("plain", "packed", "padded", "windowed", "clipped", "accumulated", "eager", "chunked")
CASES_OF_THREE = ("seven_heads",)

pytestmark = pytest.mark.slow  # each run starts processes


def launch(num_ranks: int, *arguments: object, status: int | None = 0) -> str:
    """Return what the processes write to stderr."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", num_ranks] if num_ranks > 1 else []
    return run_python(*launcher, SCRIPT, *arguments, status=status, timeout_s=500, OMP_NUM_THREADS="1").stderr


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    for num_ranks, cases in ((1, (*CASES_OF_TWO, *CASES_OF_THREE)), (2, CASES_OF_TWO), (3, CASES_OF_THREE)):
        assert "this run has no plan" not in launch(num_ranks, folder, *cases)
    return folder


def logged(folder: Path, case: str, name: str) -> list[float]:
    return [row[name] for row in json.loads((folder / case / "log.json").read_text()) if name in row]


@pytest.mark.parametrize("case", [*(f"{case}-2" for case in CASES_OF_TWO), *(f"{case}-3" for case in CASES_OF_THREE)])
def test_ranks_equal_one_process(folder: Path, case: str) -> None:
    stock = case.replace("-2", "-1").replace("-3", "-1")
    assert len(logged(folder, case, "loss")) == 6
    # Stock adds the losses of 508 tokens in float32, and the ranks those of some of them.
    assert logged(folder, case, "loss") == pytest.approx(logged(folder, stock, "loss"), rel=1e-6)
    assert logged(folder, case, "grad_norm") == pytest.approx(logged(folder, stock, "grad_norm"), rel=1e-5)
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in (case, stock))
    assert ours.keys() == theirs.keys()
    # AdamW divides by the gradient's size, which amplifies the rounding of an element whose gradient is near zero.
    tolerance = 1e-4 if case in ("eager-2", "chunked-2") else 2e-5
    changes = [(ours[name] - weight).abs() for name, weight in theirs.items()]
    assert max(float(change.max()) for change in changes) <= tolerance
    assert sum(int((change > 2e-5).sum()) for change in changes) <= 1


@pytest.mark.parametrize(("case", "num_tokens"), [("plain", 510), ("packed", 2 * 510), ("seven_heads", 3 * 170)])
def test_the_summary_has_the_planned_memory_of_shared_keys(folder: Path, case: str, num_tokens: int) -> None:
    """Ranks have at most 255 or 170 tokens of rows of 509, so that a token more is planned."""
    num_ranks = 3 if case == "seven_heads" else 2
    files = folder / f"run-{case}-{num_ranks}" / "lohan"
    plan, summary = (json.loads((files / f"{name}.json").read_text()) for name in ("plan", "summary"))
    key_numel = 2 * 7 * 8 if case == "seven_heads" else 2 * 2 * 16
    token_bytes = (2 * 4 + num_ranks * 4) * key_numel
    assert plan["tier_bytes"]["cpu"]["shared_keys"] == num_tokens * token_bytes
    num_rows = num_tokens // 510
    assert summary["peak_shared_key_bytes"] == num_rows * 509 * token_bytes


def test_evaluation_has_whole_rows(folder: Path) -> None:
    ours, theirs = (logged(folder, case, "eval_loss") for case in ("padded-2", "padded-1"))
    # Stock weights the losses of batches differently with several ranks.
    assert len(ours) == 2 and ours == pytest.approx(theirs, rel=5e-3)


def assert_ends_as_undisturbed(folder: Path, case: str) -> None:
    for name in ("loss", "grad_norm"):
        assert logged(folder, case, name)[-2:] == logged(folder, "clipped-2", name)[-2:]
    ours, whole = (load_file(folder / name / "model.safetensors") for name in (case, "clipped-2"))
    assert all(torch.equal(ours[name], weight) for name, weight in whole.items())


def test_a_killed_rank_ends_the_others_with_a_sentence_and_the_run_resumes(folder: Path) -> None:
    stderr = launch(2, folder, "killed", status=None)
    told = (
        r"RankFailedError: rank 1 \(pid \d+, \S+\) .* while rank 0 waited for the (gradients of the )?keys and values"
    )
    assert re.search(told, stderr), stderr
    launch(2, folder, "after_kill")
    assert_ends_as_undisturbed(folder, "after_kill-2")


def test_a_checkpoint_of_shared_rows_resumes_with_the_same_bits(folder: Path) -> None:
    launch(2, folder, "checkpoint")
    assert_ends_as_undisturbed(folder, "checkpoint-2")

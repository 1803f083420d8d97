"""Two processes train each family as stock does, with clipping, labels of several lengths, tied weights and a resume.
Micro-batches run one after the other or together.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

from hf_lohan.cli import app
from hf_lohan.testing.models import FAMILIES

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = str(Path(__file__).parent / "families_by_ranks.py")
RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def run_script(folder: Path, what: str, families: Sequence[str], *, num_ranks: int) -> None:
    launcher = [*RANKS, str(num_ranks)] if num_ranks > 1 else []
    subprocess.run(
        [sys.executable, *launcher, SCRIPT, str(folder), what, *families],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=800,
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return a function that runs the script once for all families and returns its folder."""
    folder = tmp_path_factory.mktemp("families")
    done = set[str]()

    def train_once(what: str) -> Path:
        if what not in done:
            run_script(folder, what, FAMILIES, num_ranks=1 if what == "stock" else 2)
            done.add(what)
        return folder / what

    return train_once


def steps(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(entry[name] for name in names) for entry in json.loads((folder / "log.json").read_text())[:-1]]


def assert_same(ours: Path, stock: Path, *, clips: bool = True) -> None:
    if clips:
        assert steps(ours) == steps(stock)
        assert any(norm > 0.5 for _, _, norm, _ in steps(ours)), "nothing is clipped"
    else:  # the norm of experts is not torch's
        assert [step[:2] for step in steps(ours)] == [step[:2] for step in steps(stock)]
    assert len(steps(ours)) == 6
    weights = load_file(stock / "model.safetensors")
    found = load_file(ours / "model.safetensors")
    assert found.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_that_resume_equal_one_process_that_accumulates(family: str, trained: Callable[[str], Path]) -> None:
    trained("first")
    assert_same(trained("rest") / family, trained("stock") / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_joint_micro_batches_of_two_ranks_equal_stock(family: str, trained: Callable[[str], Path]) -> None:
    """Each rank first adds its own micro-batches, as `DistributedDataParallel` does."""
    assert_same(trained("vertical") / family, trained("accumulated") / family)


@pytest.mark.parametrize("family", ["llama", "experts one by one"])
def test_a_run_resumes_with_one_four_and_two_ranks(family: str, tmp_path: Path) -> None:
    """Each part resumes from the last step of the previous part after `lohan reshard`."""
    run_script(tmp_path, "parts", [family], num_ranks=1)
    for last_step, num_ranks in {2: 2, 3: 1, 5: 4, 6: 2}.items():
        if last_step > 2:
            told = CliRunner().invoke(
                app, ["reshard", str(tmp_path / "cut"), "--ranks", str(num_ranks), "--remove-old"]
            )
            assert told.exit_code == 0, told.output
        run_script(tmp_path, f"until-{last_step}", [family], num_ranks=num_ranks)
    assert_same(tmp_path / "until-6" / family, tmp_path / "parts" / family, clips=family == "llama")

"""Two processes train each family as stock does: with clipping that bites, labels of several lengths and tied weights,
over a resume; one after the other and with micro-batches that pass each block together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from hf_lohan.testing.models import FAMILIES

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(Path(__file__).parent / "families_by_ranks.py")
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Trains all families as the script is told, once; the folder of what it leaves."""
    folder = tmp_path_factory.mktemp("families")
    done = set[str]()

    def train_once(what: str) -> Path:
        if what not in done:
            launcher = [] if what == "stock" else TWO_RANKS
            subprocess.run(
                [sys.executable, *launcher, SCRIPT, str(folder), what, *FAMILIES],
                env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
                check=True,
                timeout=800,
            )
            done.add(what)
        return folder / what

    return train_once


def steps(folder: Path) -> list[tuple[Any, ...]]:
    names = ("step", "loss", "grad_norm", "learning_rate")
    return [tuple(entry[name] for name in names) for entry in json.loads((folder / "log.json").read_text())[:-1]]


def assert_same(ours: Path, stock: Path) -> None:
    assert steps(ours) == steps(stock) and len(steps(ours)) == 6
    assert any(norm > 0.5 for _, _, norm, _ in steps(ours)), "nothing is clipped"
    weights = load_file(stock / "model.safetensors")
    found = load_file(ours / "model.safetensors")
    assert found.keys() == weights.keys()
    assert [name for name, weight in weights.items() if not torch.equal(found[name], weight)] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_that_go_on_train_as_one_process_accumulates(family: str, trained: Callable[[str], Path]) -> None:
    trained("first")
    assert_same(trained("rest") / family, trained("stock") / family)


@pytest.mark.parametrize("family", FAMILIES)
def test_micro_batches_of_two_ranks_together_train_as_those_of_stock(
    family: str, trained: Callable[[str], Path]
) -> None:
    """Each rank adds its own first, as `DistributedDataParallel` does."""
    assert_same(trained("vertical") / family, trained("accumulated") / family)

"""Two ranks equal two ranks of stock DDP, to the bit, in Trainer and in a loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import beside_ddp
import pytest
from equal_tensors import assert_same_tensors
from python_runs import run_python
from safetensors.torch import load_file

SCRIPT = Path(beside_ddp.__file__)


@pytest.mark.parametrize(
    "cases",
    [
        ("buffers_accumulated", beside_ddp.NO_SYNC),
        pytest.param(("buffers", "own_buffers"), marks=pytest.mark.slow),
    ],
    ids="-".join,
)
def test_ranks_equal_ddp(tmp_path: Path, cases: tuple[str, ...]) -> None:
    """Also of buffers that forwards change, which DDP takes from rank 0, and of metrics of each rank."""
    run_python(SCRIPT, tmp_path, *cases, OMP_NUM_THREADS="1")
    for case in cases:
        stock, ours = ([facts(tmp_path / case / side, rank) for rank in range(2)] for side in beside_ddp.SIDES)
        assert ours == stock, case
        assert stock[0]["scale"] != stock[1]["scale"], "each rank's last forward changed its own"
        of_stock, of_ours = (
            load_file(tmp_path / case / side / "model" / "model.safetensors") for side in beside_ddp.SIDES
        )
        assert_same_tensors(of_ours, of_stock)


def facts(folder: Path, rank: int) -> Any:
    return json.loads((folder / f"facts-{rank}.json").read_text())

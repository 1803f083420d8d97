"""Plans of ranks that share rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from hf_lohan.cli.plan_request import PlannedRun, PlanRequest, epoch_of, plan_run
from hf_lohan.planner import SizeClass
from hf_lohan.planning.shared_rows import key_numel, tokens_of_rank
from hf_lohan.testing.models import tiny_config

DESKTOP = str(Path(__file__).resolve().parents[2] / "configs/hardware/rtx4090_desktop.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama", max_position_embeddings=8192).save_pretrained(folder)
    return folder


def planned(folder: Path, num_ranks: int, **settings: int) -> PlannedRun:
    options = {"batch_size": 1, "sequence_length": 4097, "num_ranks": num_ranks, **settings}
    return plan_run(PlanRequest(model=str(folder), hardware=DESKTOP, **options))  # type: ignore[arg-type]


def test_ranks_divide_the_work_of_a_row(folder: Path) -> None:
    whole, shared = planned(folder, 2), planned(folder, 2, sequence_ranks=2)
    assert shared.shape.sequence_length == tokens_of_rank(4097, 2) == 2049
    layers = [
        next(block for block in run.profile.blocks if block.size_class is SizeClass.LAYER) for run in (whole, shared)
    ]
    assert layers[1].flops == pytest.approx(layers[0].flops / 2, rel=0.002)
    keys_bytes = 4098 * key_numel(tiny_config("llama")) * (whole.profile.param_itemsize + 4)
    traced = planned(folder, 2, sequence_length=2049).profile.layers[0].working_bytes
    assert layers[1].working_bytes == traced + keys_bytes
    assert layers[1].input_bytes * 4097 == layers[0].input_bytes * 2049


def test_what_cannot_be_planned_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="sequence_ranks: 2 does not divide the 3 ranks of each machine"):
        planned(folder, 3, sequence_ranks=2)
    with pytest.raises(ValueError, match="--lengths plans rows of one rank each, and sequence_ranks is 2"):
        epoch_of(planned(folder, 2, sequence_ranks=2), [4097])

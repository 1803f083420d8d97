"""Plans of ranks that share rows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from planned_models import one_plan_alone
from rich.console import Console
from transformers import DeepseekV3Config

from hf_lohan.cli.plan_report import print_plan
from hf_lohan.cli.plan_request import PlannedRun, PlanRequest, epoch_of, plan_run
from hf_lohan.costs import SizeClass
from hf_lohan.planning.shared_rows import key_numel, tokens_of_rank
from hf_lohan.testing.models import tiny_config
from hf_lohan.wording import format_bytes

DESKTOP = str(Path(__file__).resolve().parents[2] / "configs/hardware/rtx4090_desktop.yaml")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_config("llama", max_position_embeddings=8192).save_pretrained(folder)
    return folder


def planned(folder: Path, num_ranks: int, **settings: Any) -> PlannedRun:
    options = {"batch_size": 1, "sequence_length": 4097, "num_ranks": num_ranks, **settings}
    with one_plan_alone():
        return plan_run(PlanRequest(model=str(folder), hardware=DESKTOP, **options))


def test_ranks_divide_the_work_of_a_row(folder: Path) -> None:
    whole, shared = planned(folder, 2), planned(folder, 2, sequence_ranks=2)
    assert shared.shape.sequence_length == tokens_of_rank(4097, 2) == 2049
    layers = [
        next(block for block in run.profile.blocks if block.size_class is SizeClass.LAYER) for run in (whole, shared)
    ]
    assert layers[1].flops == pytest.approx(layers[0].flops / 2, rel=0.002)
    config = tiny_config("llama")
    key_numel = 2 * config.num_key_value_heads * config.hidden_size // config.num_attention_heads
    keys_bytes = 4098 * key_numel * (whole.profile.param_itemsize + 4)
    traced = planned(folder, 2, sequence_length=2049).profile.layers[0].working_bytes
    assert layers[1].working_bytes == traced + keys_bytes
    assert layers[1].input_bytes * 4097 == layers[0].input_bytes * 2049


def test_what_cannot_be_planned_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"ranks\.per_row: 2 does not divide the 3 ranks of each machine"):
        planned(folder, 3, sequence_ranks=2)
    with pytest.raises(ValueError, match=r"--lengths plans rows of one rank each, and ranks\.per_row is 2"):
        epoch_of(planned(folder, 2, sequence_ranks=2), [4097])


def test_the_shared_keys_are_planned_by_name_and_refused_if_cpu_memory_is_too_small(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = planned(folder, 2, sequence_ranks=2)
    numel = 4098 * 64
    keys_bytes = 2 * numel * shared.dtype.itemsize + 2 * 4 * numel
    in_ram = shared.plan.prediction.tier_bytes["cpu"]
    assert in_ram["shared_keys"] == keys_bytes
    assert sum(in_ram.values()) <= 2 * shared.setup.cpu_memory_bytes
    with one_plan_alone():
        print_plan(shared, Console(width=200))
    assert f"shared keys {format_bytes(keys_bytes)}" in capsys.readouterr().out

    settings = tmp_path / "small.yaml"
    settings.write_text("cpu_memory: 4MiB\n_resident_records: none\n")
    small = planned(folder, 2, sequence_ranks=2, batch_size=8, offload=str(settings))
    assert small.plan.refusal is not None
    advised = re.search(r"8 x 4098 tokens that 2 ranks share .* set cpu_memory to at least (\d+)", small.plan.refusal)
    assert advised is not None, small.plan.refusal
    settings.write_text(f"cpu_memory: {advised[1]}\n_resident_records: none\n")
    assert planned(folder, 2, sequence_ranks=2, batch_size=8, offload=str(settings)).plan.fits


def test_layers_that_chunks_cannot_show_have_the_keys_of_their_config(tmp_path: Path) -> None:
    tiny_config("mixtral").save_pretrained(tmp_path)
    numel = 4098 * key_numel(tiny_config("mixtral"))
    found = planned(tmp_path, 2, sequence_ranks=2, dtype="float32")
    assert found.plan.prediction.tier_bytes["cpu"]["shared_keys"] == 2 * numel * 4 + 2 * 4 * numel
    assert key_numel(None) == 0


def test_compressed_keys_count_as_expanded() -> None:
    """Ranks share the keys and values of each head, not the latent ones."""
    config = DeepseekV3Config()
    of_a_head = config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim
    assert key_numel(config) == config.num_attention_heads * of_a_head == 128 * 320

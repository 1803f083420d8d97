"""Models and machines for plans, and functions that run `lohan plan`."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml
from click.testing import Result
from transformers import AutoConfig, OPTConfig
from typer.testing import CliRunner

from hf_lohan.annexes.studies import Studies
from hf_lohan.cli import app, plan_changes, plan_report
from hf_lohan.cli.plan_request import plan_run
from hf_lohan.costs import OffloadPlan
from hf_lohan.hardware import MeasuringEffort
from hf_lohan.planning import LongestRow
from hf_lohan.testing.models import tiny_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PAPER = CONFIGS / "hardware" / "rtx4090_p5510.yaml"
DESKTOP = CONFIGS / "hardware" / "rtx4090_desktop.yaml"
LLAMA_8B = str(CONFIGS / "models" / "llama-3.1-8b")

TINY_EFFORT = MeasuringEffort(
    budget_s=0.0,
    scratch_bytes=1 << 20,
    io_buffer_bytes=1 << 18,
    copy_bytes=1 << 16,
    product_bytes=1 << 20,
    activation_bytes=1 << 16,
    update_numel=4096,
)
"""Measures hardware in milliseconds, with at most 1 MiB of each kind."""

runner = CliRunner()


def plan(
    model: str, *options: object, batch_size: int = 16, seq_len: int | None = 1024, with_changes: bool = False
) -> Result:
    """Run `lohan plan`, by default without the nearest changes and the longest row, which are up to ten more plans."""
    sizes = ["--batch-size", str(batch_size), *(["--seq-len", str(seq_len)] if seq_len is not None else [])]
    arguments = ["plan", "--model", model, *sizes, *map(str, options)]
    with contextlib.nullcontext() if with_changes else one_plan_alone():
        return runner.invoke(app, arguments)


def estimate(model: str, *options: object) -> Result:
    """Run `lohan estimate` without the nearest changes and the longest row."""
    with one_plan_alone():
        return runner.invoke(app, ["estimate", model, *map(str, options)])


@contextlib.contextmanager
def one_plan_alone() -> Iterator[None]:
    """Let `lohan plan` plan neither changes nor other rows, and try no other solvers, within this context."""

    choose_solver = Studies.choose_solver

    def one_solver(studies: Studies, planned: Any, *, compares: bool = False) -> OffloadPlan:
        return choose_solver(studies, planned)

    with (
        mock.patch.object(Studies, "choose_solver", one_solver),
        mock.patch.object(plan_changes, "nearest_changes", return_value=[]),
        mock.patch.object(plan_report, "nearest_changes", return_value=[]),
        mock.patch.object(plan_changes, "small_states", return_value=[]),
        mock.patch.object(plan_report, "small_states", return_value=[]),
        mock.patch.object(plan_changes, "longest_row_of", return_value=LongestRow(4096, is_longest_tried=False)),
        mock.patch.object(plan_report, "longest_row_of", return_value=LongestRow(4096, is_longest_tried=False)),
    ):
        yield


def planned(model: str, *options: object, **keywords: Any) -> dict[str, Any]:
    """The values that `lohan plan --json` prints."""
    result = plan(model, *options, "--json", **keywords)
    assert result.exit_code == 0, result.stderr
    values: dict[str, Any] = json.loads(result.stdout)
    return values


@pytest.fixture
def equal_requests_planned_once() -> Iterator[None]:
    """Compute each plan once, for tests that print a plan as JSON and as tables."""
    once = functools.cache(plan_run)
    with mock.patch.object(plan_report, "plan_run", once), mock.patch.object(plan_changes, "plan_run", once):
        yield


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    tiny_config("llama").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def model_13b(tmp_path: Path) -> str:
    """The model of the LoHan paper."""
    return _paper_model(tmp_path / "13b", num_layers=40)


@pytest.fixture
def model_of_4_layers(tmp_path: Path) -> str:
    """The first layers of `model_13b`, which are planned in a fraction of its time."""
    return _paper_model(tmp_path / "4_layers", num_layers=4)


def _paper_model(folder: Path, num_layers: int) -> str:
    OPTConfig(
        hidden_size=5120,
        word_embed_proj_dim=5120,
        num_hidden_layers=num_layers,
        num_attention_heads=40,
        ffn_dim=20480,
        vocab_size=50257,
        max_position_embeddings=2048,
    ).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def llama_of_4_layers(tmp_path: Path) -> str:
    """The first layers of `LLAMA_8B`."""
    AutoConfig.from_pretrained(LLAMA_8B, num_hidden_layers=4).save_pretrained(tmp_path / "llama_of_4_layers")
    return str(tmp_path / "llama_of_4_layers")


def hardware_file(path: Path, machine: Path = PAPER, **changes: Any) -> str:
    """Write a machine file, by default the paper's, with changes. A mapping changes only the keys it names."""
    values = yaml.safe_load(machine.read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(values))
    return str(path)


def drives(num: int, **changes: Any) -> list[dict[str, Any]]:
    """Return the drives of a hardware file: `num` of the paper's, with some changed keys."""
    return [{**yaml.safe_load(PAPER.read_text())["ssd"][0], "count": num, **changes}]

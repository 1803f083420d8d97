"""Models and machines to plan for: LoHan's and a tiny one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import OPTConfig
from typer.testing import CliRunner

from hf_lohan.testing.models import tiny_config

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
PAPER = CONFIGS / "hardware" / "rtx4090_p5510.yaml"

runner = CliRunner()


@pytest.fixture
def tiny(tmp_path: Path) -> str:
    tiny_config("llama").save_pretrained(tmp_path / "tiny")
    return str(tmp_path / "tiny")


@pytest.fixture
def model_13b(tmp_path: Path) -> str:
    """LoHan's."""
    OPTConfig(
        hidden_size=5120,
        word_embed_proj_dim=5120,
        num_hidden_layers=40,
        num_attention_heads=40,
        ffn_dim=20480,
        vocab_size=50257,
        max_position_embeddings=2048,
    ).save_pretrained(tmp_path / "13b")
    return str(tmp_path / "13b")


def hardware_file(path: Path, machine: Path = PAPER, **changes: Any) -> str:
    """A machine, the paper's by default, with some of its keys changed; a mapping changes only its own keys."""
    values = yaml.safe_load(machine.read_text())
    for key, value in changes.items():
        values[key] = {**values[key], **value} if isinstance(value, dict) else value
    path.write_text(yaml.safe_dump(values))
    return str(path)


def drives(num: int, **changes: Any) -> list[dict[str, Any]]:
    return [{**yaml.safe_load(PAPER.read_text())["ssd"][0], "count": num, **changes}]

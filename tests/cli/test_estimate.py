"""`lohan estimate`: a plan in a few lines."""

from __future__ import annotations

import json
from pathlib import Path

from planned_models import PAPER, drives, hardware_file, runner

from hf_lohan.cli import app
from hf_lohan.testing.models import tiny_config


def test_estimate_is_short(model_13b: str) -> None:
    result = runner.invoke(app, ["estimate", model_13b, "--hardware", str(PAPER), "--paper"])
    assert result.exit_code == 0, result.stderr
    assert "batch 8 x 2048 tokens" in result.stdout
    assert "fits      yes, offloaded, in " in result.stdout
    assert "Without offloading it does not fit" in result.stdout
    assert "gradient_accumulation_steps=" in result.stdout and "tokens/s, " in result.stdout
    assert "they last " in result.stdout and " x as long as if they were hidden" in result.stdout
    assert len(result.stdout.splitlines()) <= 12


def test_estimate_takes_as_many_tokens_as_the_model_can(tiny: str, tmp_path: Path) -> None:
    tiny_config("opt").save_pretrained(tmp_path / "short")
    result = runner.invoke(app, ["estimate", str(tmp_path / "short"), "--hardware", str(PAPER), "--json"])
    assert json.loads(result.stdout)["num_tokens"] == 8 * 128


def test_estimate_refuses_what_cannot_fit(model_13b: str, tmp_path: Path) -> None:
    hardware = hardware_file(tmp_path / "hardware.yaml", ssd=drives(1, capacity_bytes="90GB"))
    result = runner.invoke(app, ["estimate", model_13b, "--hardware", hardware])
    assert result.exit_code == 2
    assert "give the SSDs" in result.stderr

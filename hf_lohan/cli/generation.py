"""`lohan generate`: the text as it comes on stdout, and on stderr how fast it came and what held it up."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import typer

from hf_lohan.config import OffloadConfig
from hf_lohan.huggingface.text_generation import GenerationFigures, TextRequest, generate_text
from hf_lohan.wording import format_bytes, gb_per_s, percent, seconds, times

STORES = Path("lohan_generate")
"""In the working directory: a store for each model, if no path is given."""


def run_generate(model: str, request: TextRequest, offload: str, overrides: dict[str, Any]) -> None:
    """Generate and print. ``overrides`` are settings of the configuration; those that are None are not given. Raises
    ValueError or OSError for what the user has to change."""
    given = {name: value for name, value in overrides.items() if value is not None}
    config = OffloadConfig.load(offload, **given)
    figures = generate_text(model, request, config, write=_write, default_ssd_path=STORES / Path(model).resolve().name)
    typer.echo()
    for line in summary(figures):
        typer.echo(line, err=True)


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


def summary(figures: GenerationFigures) -> list[str]:
    """Lines for people."""
    tokens = times(figures.num_prompt_tokens, "token")
    lines = [f"ready after {seconds(figures.load_s)}; the prompt's {tokens} took {seconds(figures.first_pass_s)}"]
    if not figures.pass_s:
        return lines
    passes = times(figures.num_passes - 1, "further token")
    lines.append(f"{passes} at {1 / figures.pass_s:.3g} tokens/s ({seconds(figures.pass_s)} each)")
    if figures.num_expert_loads:
        share = percent(figures.num_experts_from_ram / figures.num_expert_loads)
        lines.append(f"experts were loaded {times(figures.num_expert_loads, 'time')}, {share} of them from RAM")
    if not figures.missing_bytes:
        return [*lines, "all weights stay on the device or in RAM: a token reads nothing from the drives"]
    lines.append(
        f"read a token: {format_bytes(figures.read_bytes)}; missing on the device and in RAM: "
        f"{format_bytes(figures.missing_bytes)}"
    )
    lines.append(
        f"the bound: {seconds(figures.bound_s)} a token, for these bytes at the {gb_per_s(figures.drive_bytes_per_s)} "
        f"that the drives were measured to read; reached {percent(figures.bound_s / figures.pass_s)} of it"
    )
    return lines

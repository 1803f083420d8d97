"""`lohan doctor`: checks this machine and prints advice."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict

import torch
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from hf_lohan.cli.verdicts import Check, Verdict, machine_checks, path_checks, rate_checks
from hf_lohan.config import OffloadConfig
from hf_lohan.costs import HardwareProfile
from hf_lohan.device import default_torch_device, device_for
from hf_lohan.hardware import (
    MatrixShape,
    cached_hardware,
    examine_machine,
    examine_path,
    with_gpu_link,
    write_hardware,
)
from hf_lohan.optim import master_format
from hf_lohan.planning.layout import resolved_here
from hf_lohan.report.run_data import STORE_FOLDER

SHAPES = (
    MatrixShape(4096, 4096, 4096, count=2),
    MatrixShape(4096, 4096, 1024, count=2),
    MatrixShape(4096, 4096, 14336, count=2),
    MatrixShape(4096, 14336, 4096),
)
"""The matrix products of a layer of Llama 3 8B. `lohan doctor` has no model, and measures with these shapes."""
DTYPE = torch.bfloat16
_STYLES = {Verdict.GOOD: "green", Verdict.COULD_BE_BETTER: "yellow", Verdict.BAD: "bold red", Verdict.NOT_KNOWN: "dim"}


def run_doctor(offload: str, *, as_json: bool, measure: bool, measure_again: bool, output: str | None) -> None:
    """Examine the machine, print the checks, and write the profile to the file `output` if it is not None. Raises
    ValueError or OSError for a bad config, or if there is no profile to write."""
    if output is not None and not measure:
        raise ValueError(f"--output {output} needs measured rates; remove --no-measure")
    with Console(stderr=True).status("measuring") if measure else nullcontext():
        checks, hardware = examine(offload, measure=measure, measure_again=measure_again)
    if as_json:
        facts = {
            "checks": [{**asdict(check), "verdict": check.verdict.value} for check in checks],
            "hardware": hardware.to_mapping() if hardware is not None else None,
        }
        typer.echo(json.dumps(facts, indent=2))
    else:
        print_tables(checks, Console())
    if output is not None:
        if hardware is None:
            raise ValueError(f"nothing was written to {output}: {checks[-1].value}")
        write_hardware(output, hardware)


def examine(offload: str, *, measure: bool, measure_again: bool = False) -> tuple[list[Check], HardwareProfile | None]:
    """Check this machine for a run with an offload config. Returns all checks, and the machine's profile if rates were
    measured. A failed measurement becomes a bad check, not an error.

    `measure` takes seconds, unless a profile is cached. `measure_again` ignores the cache. With `ssd: auto`, the drive
    of the working directory is checked. Raises ConfigError.
    """
    device = device_for(default_torch_device())
    config = resolved_here(OffloadConfig.load(offload), device, str(STORE_FOLDER))
    checks = machine_checks(examine_machine(config, device))
    for ssd in config.ssd:
        checks += path_checks(examine_path(ssd.path, ssd.capacity))
    hardware = None
    if measure:
        try:
            hardware = cached_hardware(config, device, matrix_shapes=SHAPES, dtype=DTYPE, measure_again=measure_again)
            hardware = with_gpu_link(hardware)
            form = master_format(DTYPE, config.moment_dtype)
            update_bytes = DTYPE.itemsize + form.state_bytes_per_param
            checks += rate_checks(hardware, str(DTYPE).removeprefix("torch."), update_bytes=update_bytes)
        except (OSError, ValueError) as error:
            advice = "fix the problems of the paths"
            checks.append(Check("measured rates", f"none: {error}", Verdict.BAD, advice))
    return checks, hardware


def print_tables(checks: Sequence[Check], console: Console) -> None:
    """Print one table for the machine, one for each path, and a summary."""
    subjects = dict.fromkeys(check.subject for check in checks)
    for subject in subjects:
        console.print(Text(subject or "this machine", style="bold"), soft_wrap=True)
        console.print(_table([check for check in checks if check.subject == subject]))
    num_bad = sum(check.verdict is Verdict.BAD for check in checks)
    num_better = sum(check.verdict is Verdict.COULD_BE_BETTER for check in checks)
    console.print(Text(f"{len(checks)} checks: {num_bad} bad, {num_better} could be better"))


def _table(checks: Sequence[Check]) -> Table:
    """Return a table with the advice below each value, because a separate column would be too narrow."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("check", no_wrap=True)
    table.add_column("verdict", no_wrap=True, width=max(len(verdict.value) for verdict in Verdict))
    table.add_column("found, and what to do", overflow="fold")
    for check in checks:
        style = _STYLES[check.verdict]
        value = Text(check.value)
        if check.advice:
            value.append(f"\n{check.advice}", style=style)
        table.add_row(Text(check.name), Text(check.verdict.value, style=style), value)
    return table

"""`lohan plan` and `lohan estimate`: plan, print, and refuse what cannot fit."""

from __future__ import annotations

import json
from collections.abc import Callable

import typer
from rich.console import Console

from hf_lohan.cli.plan_report import heading, print_plan, summary, without_offloading
from hf_lohan.cli.plan_request import PlannedRun, PlanRequest, plan_run
from hf_lohan.planner import BudgetError
from hf_lohan.wording import format_bytes, seconds

_LABEL_WIDTH = 10


def run_plan(request: PlanRequest, *, as_json: bool, plot: str | None) -> None:
    """Plan and print. Raises ValueError for bad values, and BudgetError, naming the smallest change that would help,
    if nothing fits; `as_json` prints what is known also then."""
    planned = _planned(request, print_plan, as_json=as_json)
    if plot is not None:
        from hf_lohan.cli.plan_plot import plot_plan

        plot_plan(planned, plot)


def run_estimate(request: PlanRequest, *, as_json: bool) -> None:
    """Print in a few lines whether it fits, how long a step is and what it needs. Raises as `run_plan`."""
    _planned(request, _print_estimate, as_json=as_json)


def _planned(request: PlanRequest, show: Callable[[PlannedRun, Console], None], *, as_json: bool) -> PlannedRun:
    try:
        planned = plan_run(request)
    except BudgetError as error:
        if as_json:
            typer.echo(json.dumps({"fits": False, "refusal": str(error)}, indent=2))
        raise
    if as_json:
        typer.echo(json.dumps(planned.plan.to_mapping(), indent=2))
    planned.plan.check()
    if not as_json:
        show(planned, Console())
    return planned


def _print_estimate(planned: PlannedRun, console: Console) -> None:
    step = planned.plan.prediction
    tiers = zip(("device memory", "RAM", "SSD"), step.tier_bytes.values(), strict=True)
    needs = [f"{format_bytes(sum(parts.values()))} of {name}" for name, parts in tiers]
    lines = {
        "forward": seconds(step.forward_s),
        "backward": seconds(step.backward_s),
        "fits": f"yes, offloaded, in {', '.join(needs)}",
        "writes": f"{format_bytes(step.ssd_write_bytes_per_step)} to the SSDs a step",
    }
    figures = [f"{label:<{_LABEL_WIDTH}}{text}" for label, text in lines.items()]
    for line in (heading(planned), summary(planned), *figures, without_offloading(planned)):
        console.print(line, soft_wrap=True)

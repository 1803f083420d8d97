"""Draws a plan: step time against swapped bytes (LoHan, Fig. 9b), and the busy time of each resource in one step."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_lohan.annexes.studies.lifetimes import TENSOR_KINDS, StepLifetimes, TensorKind
from hf_lohan.cli.plan_request import PlannedRun
from hf_lohan.cli.plan_resources import Resource, machine, resources_of
from hf_lohan.costs import sweep_swapped_bytes
from hf_lohan.costs.fitting import device_limit_bytes
from hf_lohan.wording import bottleneck_label, count, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FORWARD, _BACKWARD, _BOUND, _GRID, _TEXT = "#6ba3d6", "#a8d0ec", "#ef7a72", "#dddddd", "#333333"
_BYTES_PER_GB = 1e9
_KIND_COLORS: dict[TensorKind, str] = {
    "param": "#6ba3d6",
    "state": "#c3d9ea",
    "gradient": "#f2b56b",
    "activation": "#7cc08f",
    "intermediate": "#b59ad1",
}
_NUM_BINS = 40
_LABELLED_SHARE = 0.12
"""Bars shorter than this fraction of the step have no label."""


def plot_plan(planned: PlannedRun, path: str | Path, lifetimes: StepLifetimes | None = None) -> None:
    """Write the picture to `path`, in its suffix's format. Raises ValueError if matplotlib or the format is missing."""
    try:
        figure = draw_plan(planned, lifetimes)
    except ImportError:
        raise ValueError("--plot needs matplotlib; pip install 'hf-lohan[plot]'") from None
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:  # a suffix that matplotlib does not know
        raise ValueError(f"--plot {str(path)!r}: {error}") from None


def draw_plan(planned: PlannedRun, lifetimes: StepLifetimes | None = None) -> Figure:
    """Draw the plan. With ``lifetimes``, also draw memory over the step and a histogram of gaps below it."""
    from matplotlib.figure import Figure

    num_rows = 1 if lifetimes is None else 2
    figure = Figure(figsize=(12, 4.8 * num_rows), layout="constrained")
    axes = figure.subplots(num_rows, 2, width_ratios=(1, 1.15), squeeze=False)
    _sweep(axes[0, 0], planned)
    _lanes(axes[0, 1], planned)
    if lifetimes is not None:
        _gaps(axes[1, 0], lifetimes)
        _memory(axes[1, 1], lifetimes, planned)
    profile = planned.profile
    figure.suptitle(
        f"{planned.model_class}, {count(profile.num_params)} parameters, "
        f"{profile.batch_size} x {profile.sequence_length} tokens\n{machine(planned.hardware)}",
        fontsize=10,
        color=_TEXT,
        x=0.01,
        ha="left",
    )
    return figure


def _sweep(axes: Axes, planned: PlannedRun) -> None:
    # The plan's clipping mode and commit interval are fixed, so that only the swapped bytes change the step.
    setup = replace(planned.setup, clip=planned.plan.clip, commit_every_steps=planned.plan.commit_every_steps)
    plans = sweep_swapped_bytes(planned.profile, planned.hardware, setup)
    steps = [plan.prediction for plan in plans]
    swapped = [step.swapped_bytes / _BYTES_PER_GB for step in steps]
    best = planned.plan.prediction
    best_gb = best.swapped_bytes / _BYTES_PER_GB
    axes.set_title("What to swap, what to recompute", loc="left", fontsize=11, color=_TEXT, pad=26)
    if len(plans) == 1:
        axes.set_axis_off()
        text = f"Only one choice exists, which swaps {best_gb:.3g} GB."
        axes.text(0.5, 0.5, text, ha="center", color=_TEXT, transform=axes.transAxes)
        return
    for label, color, width in (("step", _TEXT, 2.2), ("forward", _FORWARD, 1.8), ("backward", _BACKWARD, 1.8)):
        values = [getattr(step, f"{label}_s") for step in steps]
        axes.plot(swapped, values, color=color, linewidth=width, label=label)
    label = f"the plan: {seconds(best.step_s)}"
    axes.plot([best_gb], [best.step_s], "o", color=_BOUND, markersize=9, zorder=3, label=label)
    # The legend is above the axes, because inside them it may cover a line.
    legend = axes.legend(
        loc="lower left",
        ncols=4,
        frameon=False,
        labelcolor="linecolor",
        handlelength=1.2,
        columnspacing=1.2,
        borderpad=0,
    )
    legend.set_bbox_to_anchor((0.0, 1.0), axes.transAxes)
    axes.set_ylim(bottom=0, top=1.05 * max(step.step_s for step in (*steps, best)))
    axes.set_xlabel("activations swapped (GB)")
    axes.set_ylabel("predicted seconds")
    _clean(axes, grid="both")


def _lanes(axes: Axes, planned: PlannedRun) -> None:
    step = planned.plan.prediction
    resources = resources_of(planned)
    for row, resource in enumerate(resources):
        _bars(axes, row, resource, planned)
    for phase_s, label_s, alignment, name in (
        (step.forward_s, 0.0, "left", "forward"),
        (step.backward_s, step.step_s, "right", "backward"),
    ):
        label = axes.text(label_s, -0.8, f" {name} {seconds(phase_s)} ", ha=alignment, va="center")
        label.set(color=_TEXT, weight="bold", backgroundcolor="white")
    for end_s in (step.forward_s, step.step_s):
        axes.axvline(end_s, color=_TEXT, linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(resources)), [resource.label for resource in resources])
    axes.set_ylim(len(resources) - 0.4, -1.2)
    axes.set_xlim(0, 1.02 * step.step_s)
    axes.set_xlabel("seconds")
    title = f"Busy time of each resource in one step, bound by {bottleneck_label(step.bottleneck)} (red)"
    axes.set_title(title, loc="left", fontsize=11, color=_TEXT, pad=26)
    _clean(axes, grid="x")


def _bars(axes: Axes, row: int, resource: Resource, planned: PlannedRun) -> None:
    """Draw the work of one resource, from the beginning of each phase. If there are several kinds, each has a label."""
    step = planned.plan.prediction
    phases = (
        ([work.forward_s for work in resource.work], 0.0, step.forward_bottleneck, _FORWARD),
        ([work.backward_s for work in resource.work], step.forward_s, step.backward_bottleneck, _BACKWARD),
    )
    for busy_s, start_s, bound_by, color in phases:
        color = _BOUND if bound_by in resource.bottlenecks else color
        for number, (work, work_s) in enumerate(zip(resource.work, busy_s, strict=True)):
            if not work_s:
                continue
            opacity = 1 - 0.35 * (number % 2)
            axes.barh(row, work_s, left=start_s, height=0.62, color=color, alpha=opacity, edgecolor="white")
            if len(resource.work) > 1 and work_s > _LABELLED_SHARE * step.step_s:
                axes.text(start_s + work_s / 2, row, work.label, ha="center", va="center", color=_TEXT, fontsize=9)
            start_s += work_s


def _memory(axes: Axes, lifetimes: StepLifetimes, planned: PlannedRun) -> None:
    """Draw the bytes of each kind that exist during the step, and the device's memory as a line."""
    curves = {kind: lifetimes.memory_curve(kind) / _BYTES_PER_GB for kind in TENSOR_KINDS}
    shown = {kind: curve for kind, curve in curves.items() if curve.any()}
    colors = [_KIND_COLORS[kind] for kind in shown]
    axes.stackplot(lifetimes.starts_s, *shown.values(), labels=list(shown), colors=colors, linewidth=0)
    memory_gb = device_limit_bytes(planned.hardware, planned.setup) / _BYTES_PER_GB
    axes.axhline(memory_gb, color=_BOUND, linewidth=1.5, label=f"the device: {memory_gb:.3g} GB")
    axes.set_title("All tensors of one micro-batch and an update, if none left", loc="left", fontsize=11, color=_TEXT)
    axes.set_xlabel("seconds of computing")
    axes.set_ylabel("GB")
    axes.set_xlim(0, lifetimes.step_s)
    axes.legend(loc="upper left", fontsize=8, framealpha=0.9)
    _clean(axes, grid="y")


def _gaps(axes: Axes, lifetimes: StepLifetimes) -> None:
    """Draw a histogram of the lengths of gaps between two uses of a tensor, for each kind."""
    by_kind: dict[TensorKind, list[float]] = {kind: [] for kind in TENSOR_KINDS}
    for tensor in lifetimes.tensors:
        by_kind[tensor.kind] += [float(gap) for gap in lifetimes.gaps_s(tensor) if gap > 0]
    shown = {kind: gaps for kind, gaps in by_kind.items() if gaps}
    axes.set_title("Time between two uses of a tensor", loc="left", fontsize=11, color=_TEXT)
    if shown:
        shortest, longest = (math.log10(of(map(of, shown.values()))) for of in (min, max))
        bins = [10 ** (shortest + (longest - shortest) * edge / _NUM_BINS) for edge in range(_NUM_BINS + 1)]
        colors = [_KIND_COLORS[kind] for kind in shown]
        axes.hist(list(shown.values()), bins=bins, stacked=True, label=list(shown), color=colors)
        axes.set_xscale("log")
        axes.legend(loc="upper right", fontsize=8, framealpha=0.9)
    axes.set_xlabel("seconds")
    axes.set_ylabel("gaps")
    _clean(axes, grid="y")


def _clean(axes: Axes, *, grid: Any) -> None:
    axes.grid(axis=grid, color=_GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(colors=_TEXT)

"""The charts of a report, each from one run's findings to an SVG."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeAlias

from hf_lohan.config import format_bytes
from hf_lohan.report.findings import Findings, Wait
from hf_lohan.report.lanes import LANES
from hf_lohan.report.svg import (
    BLUE,
    FULL_WIDTH,
    GREEN,
    HALF_WIDTH,
    MUTED,
    ORANGE,
    PURPLE,
    TEAL,
    TEXT,
    new_figure,
    plain_axes,
    to_svg,
)
from hf_lohan.report.wording import percent, seconds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MAX_POINTS = 500
"""In a line; beyond that a point is the median of some steps."""
_MAX_BARS = 7
"""As many as there may be lanes, so that two charts side by side are equally high."""
_TOO_SHORT = 0.005
"""Of the longest bar."""
_FAR_ABOVE = 3.0
"""A limit that is further above the data is not drawn: the data would be flat."""


def step_time_chart(findings: Findings) -> str:
    """Step time over steps, with plan and floor. What is far above the rest is marked at the upper edge."""
    figure = new_figure(FULL_WIDTH, 2.9)
    axes = plain_axes(figure)
    steps, times_s = findings.values("step_s")
    levels = [(findings.floor[1], "floor", GREEN)] if findings.floor else []
    levels += [(findings.predicted_s, "planned", ORANGE)] if findings.predicted_s else []
    levels += [(findings.corrected_s, "planned again", "#b3702f")] if findings.corrected_s else []
    top = 1.3 * max(_quantile(findings.step_times_s, 0.98), *(level for level, _, _ in levels), 0.0)
    _line(axes, steps, times_s, BLUE, band=True)
    beyond = [step for step, time_s in zip(steps, times_s, strict=True) if time_s > top]
    if beyond:
        axes.plot(beyond, [0.985 * top] * len(beyond), "^", color=BLUE, markersize=5, clip_on=False)
    for level_s, _, color in levels:
        axes.axhline(level_s, color=color, linewidth=1.4, linestyle=(0, (5, 3)))
    _label_levels(axes, [(level_s, f"{name} {seconds(level_s)}", color) for level_s, name, color in levels], top)
    axes.set_ylim(0, top)
    _steps_axis(axes, steps)
    axes.set_ylabel("seconds a step")
    return to_svg(figure, "time", "step time over steps")


def lanes_chart(findings: Findings) -> str:
    """Busy share of each lane."""
    works = findings.lanes
    bars = [
        (LANES[work.lane].label, work.share, f"{percent(work.share)}, {seconds(work.busy_s)}", LANES[work.lane].color)
        for work in works
    ]
    return _bars(bars, "lanes", "busy share of each lane", axis_label="share of a step's time", are_shares=True)


def waits_chart(findings: Findings) -> str:
    """Stalls by cause, those of the computing thread first."""
    longest = sorted(findings.waits, key=lambda wait: -wait.seconds)[:_MAX_BARS]
    waits = [wait for wait in findings.waits if wait in longest and wait.seconds > _TOO_SHORT * longest[0].seconds]
    unit_s, unit = _time_unit(longest[0].seconds)
    bars = [(_wait_label(wait), wait.seconds / unit_s, seconds(wait.seconds), LANES[wait.lane].color) for wait in waits]
    return _bars(bars, "waits", "time waited in a step, by cause", axis_label=f"{unit} a step")


def _wait_label(wait: Wait) -> str:
    """ "computing: weights"."""
    return f"{LANES[wait.lane].label.split()[0]}: {wait.cause}"


def memory_chart(findings: Findings) -> str:
    """What the process held, and below it, on a scale of their own, the host pools and the device slots."""
    figure = new_figure(HALF_WIDTH, 3.1)
    above, below = figure.subplots(2, 1, sharex=True)
    config, steps = findings.run.config, [step for step in findings.steps if "cpu_pool_bytes" in step]
    pools: list[float] = [sum(step["cpu_pool_bytes"].values()) for step in steps]
    numbers = [step["step"] for step in steps]
    _memory_lines(above, [("the whole process", BLUE, *findings.values("anon_rss_bytes"), None)])
    lines: list[MemoryLine] = [
        ("host buffers and copies", GREEN, numbers, pools, config.get("cpu_memory")),
        ("device slots", PURPLE, *findings.values("device_slots_bytes"), config.get("gpu_memory")),
    ]
    _memory_lines(below, lines)
    _steps_axis(below, findings.values("step_s")[0])
    return to_svg(figure, "memory", "memory over steps")


MemoryLine: TypeAlias = "tuple[str, str, list[int], list[float], int | None]"
"""Label, color, steps, bytes, and how many were allowed."""


def _memory_lines(axes: Axes, lines: Sequence[MemoryLine]) -> None:
    axes.patch.set_alpha(0)
    most = max((max(held) for _, _, _, held, _ in lines if held), default=0.0)
    unit_bytes, unit = _unit(most)
    for label, color, numbers, held, limit in lines:
        if not held:
            continue
        is_drawn = isinstance(limit, int) and limit < _FAR_ABOVE * most
        _line(axes, numbers, [value / unit_bytes for value in held], color, label=label)
        if is_drawn and limit is not None:
            axes.axhline(limit / unit_bytes, color=color, linewidth=1.1, linestyle=(0, (2, 2)), label="allowed")
    axes.set_ylim(bottom=0)
    axes.set_ylabel(unit)
    _legend(axes)


def bytes_chart(findings: Findings) -> str:
    """Bytes read and written in each step."""
    figure = new_figure(HALF_WIDTH, 3.1)
    axes = plain_axes(figure)
    lines = [("read", TEAL, "ssd_read_bytes"), ("written", ORANGE, "ssd_write_bytes")]
    most = max((max(findings.values(name)[1], default=0) for _, _, name in lines), default=0)
    unit_bytes, unit = _unit(most)
    for label, color, name in lines:
        steps, moved = findings.values(name)
        _line(axes, steps, [value / unit_bytes for value in moved], color, label=label)
    axes.set_ylim(bottom=0)
    _steps_axis(axes, findings.values("step_s")[0])
    axes.set_ylabel(f"{unit} a step")
    _legend(axes)
    return to_svg(figure, "bytes", "bytes read and written in each step")


def loss_chart(findings: Findings) -> str:
    """Loss and gradient norm as they were logged."""
    figure = new_figure(FULL_WIDTH, 2.6)
    names = [("loss", "loss", BLUE), ("grad_norm", "gradient norm", PURPLE)]
    shown = [entry for entry in names if findings.values(entry[0])[0]]
    for axes, (name, label, color) in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        axes.patch.set_alpha(0)
        steps, values = findings.values(name)
        _line(axes, steps, values, color, marker="o" if len(steps) < 40 else "", label=label)
        eval_steps, eval_losses = findings.values("eval_loss")
        if name == "loss" and eval_steps:
            axes.plot(eval_steps, eval_losses, "D-", color=ORANGE, markersize=4, linewidth=1, label="held-out loss")
            _legend(axes)
        if name == "grad_norm":
            axes.set_ylim(bottom=0)
        _steps_axis(axes, findings.values("step_s")[0])
        axes.set_ylabel(label)
    return to_svg(figure, "loss", "loss and gradient norm over steps")


Bar = tuple[str, float, str, str]
"""Label, value, the value in words, color."""


def _bars(bars: Sequence[Bar], name: str, description: str, *, axis_label: str, are_shares: bool = False) -> str:
    figure = new_figure(HALF_WIDTH, 0.75 + 0.27 * _MAX_BARS)
    axes = plain_axes(figure)
    longest = max(value for _, value, _, _ in bars)
    for row, (_, value, words, color) in enumerate(bars):
        axes.barh(row, value, height=0.62, color=color)
        axes.annotate(words, (value, row), (4, 0), textcoords="offset points", va="center", color=TEXT, fontsize=8.5)
    axes.set_yticks(range(len(bars)), [label for label, _, _, _ in bars])
    axes.tick_params(axis="y", labelcolor=TEXT, length=0)
    axes.set_ylim(_MAX_BARS - 0.4, -0.6)
    axes.set_xlim(0, 1.28 * (max(1.0, longest) if are_shares else longest))
    if are_shares:
        ticks = [0.0, 0.25, 0.5, 0.75, 1.0]
        axes.set_xticks(ticks, [percent(tick) for tick in ticks])
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(axis_label)
    return to_svg(figure, name, description)


def _line(
    axes: Axes,
    steps: Sequence[int],
    values: Sequence[float],
    color: str,
    *,
    band: bool = False,
    label: str = "",
    marker: str = "",
) -> None:
    """Of many steps, medians; with ``band`` also the range."""
    size = -(-len(steps) // _MAX_POINTS)
    groups = [values[start : start + size] for start in range(0, len(values), max(1, size))]
    middles = [steps[min(len(steps) - 1, number * size + size // 2)] for number in range(len(groups))]
    if band and size > 1:
        low, high = _each(groups, min), _each(groups, max)
        axes.fill_between(middles, low, high, color=color, alpha=0.25, linewidth=0)
    axes.plot(
        middles,
        _each(groups, statistics.median),
        color=color,
        linewidth=1.4,
        label=label,
        marker=marker,
        markersize=3.5,
    )


def _each(groups: Sequence[Sequence[float]], figure: Callable[[Sequence[float]], float]) -> list[float]:
    return [figure(group) for group in groups]


def _label_levels(axes: Axes, levels: Sequence[tuple[float, str, str]], top: float) -> None:
    """At the right edge, moved apart where they would lie on each other."""
    least, below = 0.085 * top, float("-inf")
    for level, text, color in sorted(levels):
        below = max(level, below + least)
        axes.annotate(
            text,
            (1.0, below),
            xycoords=("axes fraction", "data"),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            color=color,
            fontsize=9,
            annotation_clip=False,
        )


def _steps_axis(axes: Axes, steps: Sequence[int]) -> None:
    from matplotlib.ticker import MaxNLocator

    margin = max(0.5, 0.01 * (steps[-1] - steps[0]))
    axes.set_xlim(steps[0] - margin, steps[-1] + margin)
    axes.xaxis.set_major_locator(MaxNLocator(nbins="auto", integer=True))
    axes.set_xlabel("step")


def _legend(axes: Axes) -> None:
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=4,
        borderaxespad=0.2,
        columnspacing=1.2,
        labelcolor=MUTED,
        handlelength=1.4,
    )


def _quantile(values: Sequence[float], fraction: float) -> float:
    return sorted(values)[min(len(values) - 1, int(fraction * len(values)))]


def _time_unit(value_s: float) -> tuple[float, str]:
    """As `wording.seconds` chooses it."""
    return (0.001, "milliseconds") if value_s < 1 else (1.0, "seconds")


def _unit(num_bytes: float) -> tuple[int, str]:
    """A unit in which the number has few digits."""
    unit = format_bytes(num_bytes).split()[-1]
    return 1024 ** ("B", "KiB", "MiB", "GiB", "TiB", "PiB").index(unit), unit

"""The charts of a report. Each function makes one SVG from a run's findings."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TypeAlias

from hf_lohan.report.findings import SHOWN_LANES, Findings, StepPicture
from hf_lohan.report.svg import FULL_WIDTH, HALF_WIDTH, Panel, svg
from hf_lohan.wording import BINARY_UNITS, format_bytes, percent, seconds

BLUE, ORANGE, GREEN, PURPLE, TEAL, BROWN = "#4a86cf", "#df8a3c", "#4fa378", "#9a7bd0", "#3fa3ad", "#b3702f"
_MAX_POINTS = 500
"""Maximum number of points in a line. With more steps, each point is the median of several steps."""
_MAX_BARS = 7
"""Maximum number of bars. It is the number of working lanes, so that adjacent charts have the same height."""
_TOO_SHORT = 0.005
"""Bars shorter than this fraction of the longest bar are left out."""
_FAR_ABOVE = 3.0
"""A limit larger than this multiple of the data is not drawn, because it would flatten the data."""
_HALF_HEIGHT = 310
_SHADES = (1.0, 0.6, 0.35, 0.2)
"""Opacity of each kind of task in a lane. The kind with the longest time is first."""
_MAX_KINDS = 3
"""Maximum number of kinds of tasks in the legend of a lane."""


def step_time_chart(findings: Findings) -> str:
    """Draw the time of each step, and lines for the plan and the floor. Outliers are marked at the upper edge."""
    steps, times_s = findings.values("step_s")
    levels = [(findings.floor[1], "floor", GREEN)] if findings.floor else []
    levels += [(findings.predicted_s, "planned", ORANGE)] if findings.predicted_s else []
    levels += [(findings.corrected_s, "planned again", BROWN)] if findings.corrected_s else []
    typical = sorted(findings.step_times_s)[min(len(findings.later) - 1, int(0.98 * len(findings.later)))]
    top = 1.3 * max(typical, *(level for level, _, _ in levels), 0.0)
    panel = Panel(60, 30, FULL_WIDTH - 150, 240, x=_steps_range(findings), y=(0.0, top))
    panel.x_axis("step", whole=True)
    panel.y_axis("seconds a step")
    _line(panel, steps, times_s, BLUE, band=True)
    for step, time_s in zip(steps, times_s, strict=True):
        if time_s > top:
            x, y = panel.place(step, top)
            panel.parts.append(f'<path d="M{x - 4:.1f},{y + 3:.1f}h8l-4,-7z" fill="{BLUE}"/>')
    lowest = panel.bottom + 15.0
    for level_s, name, color in sorted(levels):
        panel.level(level_s, color)
        lowest = min(panel.place(0.0, level_s)[1], lowest - 15.0)  # keep the labels apart
        panel.text(panel.right + 6, lowest, f"{name} {seconds(level_s)}", color=color)
    return svg("step time over steps", FULL_WIDTH, 280, [panel])


def lanes_chart(findings: Findings) -> str:
    bars: list[Bar] = []
    for work in findings.lanes:
        lane = SHOWN_LANES[work.lane]
        bars.append((lane.label, work.share, f"{percent(work.share)}, {seconds(work.busy_s)}", lane.color))
    marks = [(share, percent(share)) for share in (0.0, 0.25, 0.5, 0.75, 1.0)]
    return _bars(bars, "busy share of each lane", axis_label="share of a step's time", marks=marks)


def waits_chart(findings: Findings) -> str:
    """Draw waits by cause. Waits of the computing thread are first."""
    longest = sorted(findings.waits, key=lambda wait: -wait.seconds)[:_MAX_BARS]
    waits = [wait for wait in findings.waits if wait in longest and wait.seconds > _TOO_SHORT * longest[0].seconds]
    unit_s, unit = _time_unit(longest[0].seconds)
    bars: list[Bar] = []
    for wait in waits:
        lane = SHOWN_LANES[wait.lane]
        label = f"{lane.label.split()[0]}: {wait.cause}"  # "computing: weights"
        bars.append((label, wait.seconds / unit_s, seconds(wait.seconds), lane.color))
    return _bars(bars, "time waited in a step, by cause", axis_label=f"{unit} a step")


Series: TypeAlias = "tuple[str, str, list[int], list[float], int | None]"
"""Label, color, step numbers, bytes and allowed bytes."""


def memory_chart(findings: Findings) -> str:
    """Draw the process's memory. Below it, draw the host pools and the device slots with their own scale."""
    config, steps = findings.run.config, [step for step in findings.steps if "cpu_pool_bytes" in step]
    pools: list[float] = [sum(step["cpu_pool_bytes"].values()) for step in steps]
    process: Series = ("the whole process", BLUE, *findings.values("anon_rss_bytes"), None)
    below: list[Series] = [
        ("host buffers and copies", GREEN, [step["step"] for step in steps], pools, config.get("cpu_memory")),
        ("device slots", PURPLE, *findings.values("device_slots_bytes"), config.get("gpu_memory")),
    ]
    panels = [_bytes_panel(findings, [process], 30, 125), _bytes_panel(findings, below, 170, 270)]
    panels[-1].x_axis("step", whole=True)
    return svg("memory over steps", HALF_WIDTH, _HALF_HEIGHT, panels)


def bytes_chart(findings: Findings) -> str:
    series: list[Series] = [
        ("read", TEAL, *findings.values("ssd_read_bytes"), None),
        ("written", ORANGE, *findings.values("ssd_write_bytes"), None),
    ]
    panel = _bytes_panel(findings, series, 30, 270)
    panel.x_axis("step", whole=True)
    return svg("bytes read and written in each step", HALF_WIDTH, _HALF_HEIGHT, [panel])


def _bytes_panel(findings: Findings, series: Sequence[Series], top: float, bottom: float) -> Panel:
    most = max((max(held) for _, _, _, held, _ in series if held), default=0.0)
    unit = format_bytes(most).split()[-1]
    unit_bytes = 1024 ** BINARY_UNITS.index(unit)
    allowed = [limit if isinstance(limit, int) and limit < _FAR_ABOVE * most else 0 for *_, limit in series]
    panel = Panel(
        60, top, HALF_WIDTH - 10, bottom, x=_steps_range(findings), y=(0.0, 1.05 * max(most, *allowed) / unit_bytes)
    )
    panel.y_axis(unit)
    legend = []
    for (label, color, steps, held, _), limit in zip(series, allowed, strict=True):
        if held:
            _line(panel, steps, [value / unit_bytes for value in held], color)
            legend.append((label, color))
        if held and limit:
            panel.level(limit / unit_bytes, color)
    panel.legend([*legend, *([("dashed: allowed", "none")] if any(allowed) else [])])
    return panel


def loss_chart(findings: Findings) -> str:
    names = [("loss", "loss", BLUE), ("grad_norm", "gradient norm", PURPLE)]
    shown = [entry for entry in names if findings.values(entry[0])[0]]
    panels = []
    for number, (name, label, color) in enumerate(shown):
        steps, values = findings.values(name)
        others = findings.values("eval_loss") if name == "loss" else ([], [])
        low, high = min(*values, *others[1], values[0]), max(*values, *others[1], values[0])
        margin = 0.06 * (high - low) or 0.5
        low = 0.0 if name == "grad_norm" else low - margin
        width = FULL_WIDTH / len(shown)
        panel = Panel(
            60 + number * width, 30, (number + 1) * width - 10, 210, x=_steps_range(findings), y=(low, high + margin)
        )
        panel.x_axis("step", whole=True)
        panel.y_axis("")
        _line(panel, steps, values, color, dots=len(steps) < 40)
        if others[0]:
            panel.line(others[0], others[1], ORANGE, dots=True)
        panel.legend([(label, color), *([("held-out loss", ORANGE)] if others[0] else [])])
        panels.append(panel)
    return svg("loss and gradient norm over steps", FULL_WIDTH, 250, panels)


def step_chart(picture: StepPicture) -> str:
    """Draw one step, with a row for each lane and a bar for each task."""
    lanes = [lane for lane in SHOWN_LANES if any(kind[0] == lane for kind in picture.spans)]
    unit_s, unit = _time_unit(picture.step_s)
    row_height = 40.0
    bottom = 10 + row_height * len(lanes)
    panel = Panel(160, 10, FULL_WIDTH - 150, bottom, x=(0.0, picture.step_s / unit_s), y=(0.0, 1.0))
    panel.x_axis(f"{unit} from the end of the previous step")
    for lane, middle in zip(lanes, panel.rows([SHOWN_LANES[lane].label for lane in lanes], row_height), strict=True):
        kinds = [(name, spans) for (of_lane, name), spans in picture.spans.items() if of_lane == lane]
        for number, (name, spans) in enumerate(kinds):
            color, shade = SHOWN_LANES[lane].color, _SHADES[min(number, len(_SHADES) - 1)]
            for begin, end in spans:
                panel.bar(begin / unit_s, end / unit_s, middle, 28, color, opacity=shade)
            if number < _MAX_KINDS:
                beside = middle + 12 * (number - (min(len(kinds), _MAX_KINDS) - 1) / 2)
                square = f'x="{panel.right + 6:.1f}" y="{beside - 4:.1f}" width="7" height="7"'
                panel.parts.append(f'<rect {square} fill="{color}" opacity="{shade:g}"/>')
                panel.text(panel.right + 18, beside, name, css="small")
    return svg(f"what each lane did in step {picture.step}", FULL_WIDTH, int(bottom) + 40, [panel])


Bar = tuple[str, float, str, str]
"""Label, value, value as text, and color."""


def _bars(bars: Sequence[Bar], description: str, *, axis_label: str, marks: Sequence[tuple[float, str]] = ()) -> str:
    row_height = 27.0
    longest = max(*(value for _, value, _, _ in bars), *(mark for mark, _ in marks), bars[0][1])
    bottom = 10 + row_height * _MAX_BARS
    panel = Panel(190, 10, HALF_WIDTH - 10, bottom, x=(0.0, 1.5 * longest), y=(0.0, 1.0))
    panel.x_axis(axis_label, marks=marks)
    middles = panel.rows([label for label, _, _, _ in bars], row_height)
    for (_, value, words, color), middle in zip(bars, middles, strict=True):
        panel.bar(0.0, value, middle, 17, color)
        panel.text(panel.place(value, 0.0)[0] + 4, middle, words, css="strong")
    return svg(description, HALF_WIDTH, int(bottom) + 40, [panel])


def _line(
    panel: Panel, steps: Sequence[int], values: Sequence[float], color: str, *, band: bool = False, dots: bool = False
) -> None:
    """Draw values. Many values are drawn as medians of groups. ``band`` also draws the range of each group."""
    size = max(1, -(-len(steps) // _MAX_POINTS))
    groups = [values[start : start + size] for start in range(0, len(values), size)]
    middles = [steps[min(len(steps) - 1, number * size + size // 2)] for number in range(len(groups))]
    if band and size > 1:
        panel.band(middles, [min(group) for group in groups], [max(group) for group in groups], color)
    panel.line(middles, [statistics.median(group) for group in groups], color, dots=dots)


def _steps_range(findings: Findings) -> tuple[float, float]:
    steps, _ = findings.values("step_s")
    margin = max(0.5, 0.01 * (steps[-1] - steps[0]))
    return steps[0] - margin, steps[-1] + margin


def _time_unit(value_s: float) -> tuple[float, str]:
    """Return the scale and name of the unit that `wording.seconds` uses."""
    return (0.001, "milliseconds") if value_s < 1 else (1.0, "seconds")

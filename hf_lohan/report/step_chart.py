"""One step as a Gantt chart: a row a lane, a bar for what ran when."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hf_lohan.report.lanes import LANES
from hf_lohan.report.step_picture import StepPicture
from hf_lohan.report.svg import FULL_WIDTH, MUTED, TEXT, new_figure, plain_axes, to_svg

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SHADES = (1.0, 0.6, 0.35, 0.2)
"""Of a lane's color, for its kinds of tasks, the longest first."""
_MAX_KINDS = 3
"""In the legend beside a lane."""


def step_chart(picture: StepPicture) -> str:
    """All lanes in which something ran."""
    lanes = [lane for lane in LANES if any(kind[0] == lane for kind in picture.spans)]
    unit_s, unit = (0.001, "milliseconds") if picture.step_s < 1 else (1.0, "seconds")
    figure = new_figure(FULL_WIDTH, 0.75 + 0.4 * len(lanes))
    axes = plain_axes(figure)
    for row, lane in enumerate(lanes):
        kinds = [(name, spans) for (of_lane, name), spans in picture.spans.items() if of_lane == lane]
        for number, (name, spans) in enumerate(kinds):
            color, shade = LANES[lane].color, _SHADES[min(number, len(_SHADES) - 1)]
            bars = [(begin / unit_s, (end - begin) / unit_s) for begin, end in spans]
            axes.broken_barh(bars, (row - 0.36, 0.72), facecolor=color, alpha=shade, linewidth=0)
            if number < _MAX_KINDS:
                middle = row + 0.29 * (number - (min(len(kinds), _MAX_KINDS) - 1) / 2)
                _legend(axes, middle, name, color, shade)
    axes.set_yticks(range(len(lanes)), [LANES[lane].label for lane in lanes])
    axes.tick_params(axis="y", labelcolor=TEXT, length=0)
    axes.set_ylim(len(lanes) - 0.4, -0.6)
    axes.set_xlim(0, picture.step_s / unit_s)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(f"{unit} from the end of the step before")
    return to_svg(figure, "step", f"what each lane did in step {picture.step}")


def _legend(axes: Axes, middle: float, name: str, color: str, shade: float) -> None:
    """A line beside the lane's row."""
    place: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points", "va": "center"}
    axes.annotate("\u25a0", (1, middle), xytext=(6, 0), color=color, alpha=shade, fontsize=7, **place)
    axes.annotate(name, (1, middle), xytext=(15, 0), color=MUTED, fontsize=7, **place)

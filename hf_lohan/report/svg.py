"""Charts as SVG that takes its colors and its font from the page it stands in."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TEXT, MUTED, GRID, PAPER = "#010101", "#020202", "#030303", "#040404"
"""Stand for the page's colors, light or dark."""
BLUE, ORANGE, GREEN, RED, PURPLE, TEAL, GRAY = (
    *("#4a86cf", "#df8a3c", "#4fa378", "#d8605b", "#9a7bd0", "#3fa3ad", "#8d949e"),
)
FULL_WIDTH, HALF_WIDTH = 10.6, 5.2
"""Inches: with them letters are as large in a wide chart as in a narrow one."""
_VARIABLES = {TEXT: "var(--text)", MUTED: "var(--muted)", GRID: "var(--grid)", PAPER: "var(--card)"}
_FONT = re.compile(r"'DejaVu Sans'[^;\"]*")
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "lohan",
    "font.family": "sans-serif",
    "font.size": 9.0,
    "text.color": TEXT,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": GRID,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.6,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "path.simplify": True,
    "path.simplify_threshold": 0.5,
}


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Charts that are made and written within look alike. Raises ValueError where matplotlib is missing."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("lohan report needs matplotlib; pip install 'hf-lohan[plot]'") from None
    with matplotlib.rc_context(_STYLE):  # type: ignore[arg-type]
        yield


def new_figure(width: float, height: float) -> Figure:
    """Inches."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_alpha(0)
    return figure


def plain_axes(figure: Figure, **options: Any) -> Axes:
    """The only axes of a figure."""
    axes = figure.subplots(**options)
    axes.patch.set_alpha(0)
    return axes  # type: ignore[no-any-return]


def to_svg(figure: Figure, name: str, description: str) -> str:
    """An `svg` element for a page; ``name`` makes its ids its own."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'(?<=\s)(width|height)="[\d.]+pt"', "", text, count=2)
    text = re.sub(r'(id="|url\(#|xlink:href="#)', rf"\g<1>{name}-", text)
    text = _FONT.sub("var(--font)", text)
    for color, variable in _VARIABLES.items():
        text = text.replace(color, variable)
    return text.replace("<svg", f'<svg role="img" aria-label="{description}"', 1).strip()

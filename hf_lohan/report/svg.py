"""Draws axes, lines and bars as SVG elements. CSS classes in `page.html` set the style of text, grid and font."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

FULL_WIDTH, HALF_WIDTH = 1030, 500
"""Widths of charts in pixels. Text has the same size in wide and narrow charts."""
_LETTER_WIDTH = 6.4
"""Approximate width in pixels of a letter in the page's 12-pixel font, to place legends."""


def svg(description: str, width: int, height: int, panels: Sequence[Panel]) -> str:
    parts = "".join(part for panel in panels for part in panel.parts)
    size = f'viewBox="0 0 {width} {height}" style="--width:{width}px"'
    return f'<svg {size} role="img" aria-label="{escape(description)}">{parts}</svg>'


class Panel:
    """One pair of axes in a rectangle of pixels."""

    def __init__(
        self, left: float, top: float, right: float, bottom: float, *, x: tuple[float, float], y: tuple[float, float]
    ) -> None:
        self.left, self.top, self.right, self.bottom = left, top, right, bottom
        self._x, self._y = x, y
        self.parts: list[str] = []

    def place(self, x: float, y: float) -> tuple[float, float]:
        """Return a point in pixels. `y` is clipped to the range of the axis."""
        (x_low, x_high), (y_low, y_high) = self._x, self._y
        height = min(1.0, max(0.0, (y - y_low) / ((y_high - y_low) or 1.0)))
        across = (x - x_low) / ((x_high - x_low) or 1.0)
        return self.left + across * (self.right - self.left), self.bottom - height * (self.bottom - self.top)

    def text(self, x: float, y: float, words: str, *, anchor: str = "start", css: str = "", color: str = "") -> None:
        """Add text at (x, y) in pixels, centered vertically."""
        look = f'text-anchor="{anchor}" class="{css}" style="{f"fill:{color}" if color else ""}"'
        self.parts.append(f'<text x="{x:.1f}" y="{y + 4:.1f}" {look}>{escape(words)}</text>')

    def x_axis(self, label: str, *, whole: bool = False, marks: Sequence[tuple[float, str]] = ()) -> None:
        """Add grid, figures and label. `marks` are (value, text) pairs that replace the round figures."""
        low, high = self._x
        for tick, words in marks or [(tick, f"{tick:,.12g}") for tick in ticks(low, high, 8, whole=whole)]:
            at, _ = self.place(tick, 0.0)
            self._grid(at, self.top, at, self.bottom)
            self.text(at, self.bottom + 13, words, anchor="middle")
        self._grid(self.left, self.bottom, self.right, self.bottom)
        self.text((self.left + self.right) / 2, self.bottom + 31, label, anchor="middle")

    def y_axis(self, label: str) -> None:
        """Add grid and figures, with the label above them."""
        for tick in ticks(*self._y, max(2, int((self.bottom - self.top) / 30))):
            _, at = self.place(0.0, tick)
            self._grid(self.left, at, self.right, at)
            self.text(self.left - 6, at, f"{tick:,.12g}", anchor="end")
        self.text(self.left - 6, self.top - 13, label, anchor="end" if len(label) < 7 else "middle")

    def rows(self, labels: Sequence[str], row_height: float) -> list[float]:
        """Add labels at the left, one below the other. Return the y coordinates of their middles in pixels."""
        middles = [self.top + row_height * (row + 0.5) for row in range(len(labels))]
        for label, middle in zip(labels, middles, strict=True):
            self.text(self.left - 6, middle, label, anchor="end", css="strong")
        return middles

    def line(self, xs: Sequence[float], ys: Sequence[float], color: str, *, dots: bool = False) -> None:
        """Add a line through all points. `dots` marks each point."""
        places = [self.place(x, y) for x, y in zip(xs, ys, strict=True)]
        self.parts.append(f'<polyline points="{_points(places)}" fill="none" stroke="{color}" stroke-width="1.6"/>')
        if dots or len(places) == 1:
            self.parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.5" fill="{color}"/>' for x, y in places]

    def band(self, xs: Sequence[float], lows: Sequence[float], highs: Sequence[float], color: str) -> None:
        above = [self.place(x, y) for x, y in zip(xs, highs, strict=True)]
        below = [self.place(x, y) for x, y in zip(xs, lows, strict=True)]
        self.parts.append(f'<polygon points="{_points([*above, *below[::-1]])}" fill="{color}" opacity="0.25"/>')

    def level(self, y: float, color: str) -> None:
        _, at = self.place(0.0, y)
        place = f'x1="{self.left:.1f}" y1="{at:.1f}" x2="{self.right:.1f}" y2="{at:.1f}"'
        self.parts.append(f'<line {place} stroke="{color}" stroke-width="1.4" stroke-dasharray="6 4"/>')

    def bar(self, begin: float, end: float, middle: float, height: float, color: str, *, opacity: float = 1.0) -> None:
        """Add a bar from `begin` to `end` on the x axis. `middle` and `height` are in pixels."""
        (left, _), (right, _) = self.place(begin, 0.0), self.place(end, 0.0)
        size = f'width="{max(0.2, right - left):.1f}" height="{height:.1f}"'
        place = f'x="{left:.1f}" y="{middle - height / 2:.1f}"'
        self.parts.append(f'<rect {place} {size} fill="{color}" opacity="{opacity:g}"/>')

    def legend(self, entries: Sequence[tuple[str, str]]) -> None:
        """Add (label, color) entries in a row above the rectangle."""
        at, above = self.left + 14, self.top - 13
        for label, color in entries:
            self.parts.append(f'<rect x="{at:.1f}" y="{above - 1.5:.1f}" width="14" height="3" fill="{color}"/>')
            self.text(at + 19, above, label)
            at += 33 + _LETTER_WIDTH * len(label)

    def _grid(self, x1: float, y1: float, x2: float, y2: float) -> None:
        self.parts.append(f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="grid"/>')


def ticks(low: float, high: float, most: int, *, whole: bool = False) -> list[float]:
    """Return up to about `most` round figures from `low` to `high`."""
    if not high > low:
        return [low]
    size = 10.0 ** math.floor(math.log10((high - low) / most))
    size = next(size * factor for factor in (1, 2, 5, 10) if (high - low) / (size * factor) <= most)
    if whole:
        size = max(1.0, round(size))
    return [number * size for number in range(math.ceil(low / size - 1e-9), math.floor(high / size + 1e-9) + 1)]


def _points(places: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in places)

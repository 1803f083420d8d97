"""Which elements of a chunk are updated, and with which hyperparameters."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a chunk with equal hyperparameters and an equal step number (the one being taken)."""

    start: int
    stop: int
    group: Hashable
    """What its rule makes of a param group (`UpdateRule.settings_of`)."""
    step: int
    shape: tuple[int, ...] | None = None
    """Of the one parameter that it is, for rules that need parameters whole."""


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What of the segments lies in elements [start, stop), counted from `start`."""
    clipped = (
        replace(segment, start=max(segment.start, start) - start, stop=min(segment.stop, stop) - start)
        for segment in segments
    )
    return [segment for segment in clipped if segment.start < segment.stop]

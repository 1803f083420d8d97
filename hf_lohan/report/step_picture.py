"""One typical step of a trace: what each lane did when, and how much of it was hidden behind computing."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hf_lohan.report.run_data import TracedTask
from hf_lohan.timeline import COMPUTE, LANES, SSD_READ, SSD_WRITE

_STEP = "step"
_FINEST = 1 / 1500
"""Of the step: gaps that are narrower are not drawn."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class StepPicture:
    """Times count from the step's begin."""

    step: int
    step_s: float
    spans: dict[tuple[str, str], list[Span]]
    """By lane and kind of task, in the lanes' order, the longest kind first; those that overlap or nearly touch are
    one."""
    ssd_hidden_share: float | None
    """Of the time in which the SSDs were busy, the part in which something was computed."""


def picture_of(trace: Sequence[TracedTask]) -> StepPicture | None:
    """Of the step in the later half whose time is nearest to the median; None without a whole step."""
    steps = [task for task in trace if task.lane == _STEP]
    later = steps[len(steps) // 2 :]
    if not later:
        return None
    median_s = statistics.median(step.ended_s - step.began_s for step in later)
    chosen = min(later, key=lambda step: abs(step.ended_s - step.began_s - median_s))
    inside = [
        task for task in trace if task.lane in LANES and task.ended_s > chosen.began_s and task.began_s < chosen.ended_s
    ]
    step_s = chosen.ended_s - chosen.began_s

    def spans(tasks: Iterable[TracedTask], gap_s: float = 0.0) -> list[Span]:
        return merged(
            ((max(0.0, task.began_s - chosen.began_s), min(step_s, task.ended_s - chosen.began_s)) for task in tasks),
            gap_s,
        )

    kinds = {(task.lane, task.name): 0.0 for task in inside}
    for task in inside:
        kinds[task.lane, task.name] += task.ended_s - task.began_s
    ssd = spans(task for task in inside if task.lane in (SSD_READ, SSD_WRITE))
    compute = spans(task for task in inside if task.lane == COMPUTE)
    ssd_s = sum(end - begin for begin, end in ssd)
    return StepPicture(
        step=int(chosen.name),
        step_s=step_s,
        spans={
            kind: spans((task for task in inside if (task.lane, task.name) == kind), step_s * _FINEST)
            for kind in sorted(kinds, key=lambda kind: (LANES.index(kind[0]), -kinds[kind]))
        },
        ssd_hidden_share=overlap_s(ssd, compute) / ssd_s if ssd_s else None,
    )


def merged(spans: Iterable[Span], gap_s: float = 0.0) -> list[Span]:
    """Their union; spans with at most ``gap_s`` between them are one."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1] + gap_s:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def overlap_s(left: Sequence[Span], right: Sequence[Span]) -> float:
    """How long both are busy. Each is in order, and its spans do not overlap."""
    total_s, index = 0.0, 0
    for begin, end in left:
        while index < len(right) and right[index][1] <= begin:
            index += 1
        for other_begin, other_end in right[index:]:
            if other_begin >= end:
                break
            total_s += min(end, other_end) - max(begin, other_begin)
    return total_s

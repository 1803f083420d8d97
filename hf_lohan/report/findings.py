"""What a run's numbers say: of its steps after the first few, and of one typical step, task by task."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hf_lohan.report.run_data import RunData, TracedTask
from hf_lohan.timeline import (
    COMPUTE,
    COMPUTE_WAITS,
    CPU_OPTIMIZER,
    D2H,
    H2D,
    LOADS_WAIT,
    SSD_READ,
    SSD_WRITE,
    UPDATES_WAIT,
)

NUM_FIRST_STEPS = 5
"""They are watched, planned and corrected, so they are slower."""
_WAITS_INSIDE_COMPUTE = ("a gradient buffer", "activations", "activations to leave")
_RANK_LANES = ("control", "weights", "gradients")
_DAY_S = 86400.0

Step = Mapping[str, Any]
_STEP = "step"
_FINEST = 1 / 1500
"""Of the step: gaps that are narrower are not drawn."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ShownLane:
    label: str
    color: str
    waits: bool = False
    """It is time that a thread waited, not work of a resource."""


LANES = {
    COMPUTE: ShownLane("computing", "#4a86cf"),
    H2D: ShownLane("copies to the device", "#9a7bd0"),
    D2H: ShownLane("copies from the device", "#b79be0"),
    SSD_READ: ShownLane("SSD reading", "#3fa3ad"),
    SSD_WRITE: ShownLane("SSD writing", "#2f7f88"),
    CPU_OPTIMIZER: ShownLane("optimizer on the CPU", "#4fa378"),
    COMPUTE_WAITS: ShownLane("computing waits", "#d8605b", waits=True),
    LOADS_WAIT: ShownLane("loading waits", "#b9a18f", waits=True),
    UPDATES_WAIT: ShownLane("updating waits", "#8d949e", waits=True),
}
WORK_LANES = tuple(name for name, lane in LANES.items() if not lane.waits)
WAIT_LANES = tuple(name for name, lane in LANES.items() if lane.waits)


@dataclass(frozen=True, slots=True)
class LaneWork:
    lane: str
    busy_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Wait:
    """What one thread waited for in a step, on average."""

    lane: str
    cause: str
    seconds: float


class Findings:
    """Computed from a run when asked for. What cannot be known is None, or empty."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.summary = run.summary
        num_first = min(NUM_FIRST_STEPS, len(run.steps) // 2)
        self.steps = run.steps
        self.later = run.steps[num_first:]
        """The steps that figures are about."""

    # Time.

    @cached_property
    def step_s(self) -> float | None:
        """The median."""
        if self.later:
            return statistics.median(self.step_times_s)
        return self.summary.get("step_s") or None

    @cached_property
    def step_times_s(self) -> list[float]:
        """Of the later steps, from end to end."""
        return [step["step_s"] for step in self.later]

    @property
    def tokens_per_s(self) -> float | None:
        tokens = sum(step.get("num_tokens", 0) for step in self.later)
        return tokens / sum(self.step_times_s) if tokens else self.summary.get("tokens_per_s") or None

    @property
    def predicted_s(self) -> float | None:
        """By the first plan."""
        return self.summary.get("predicted_step_s")

    @property
    def corrected_s(self) -> float | None:
        """By the plan that was followed in the end; None if it is the first."""
        corrected = self.summary.get("corrected_step_s")
        return corrected if corrected != self.predicted_s else None

    @property
    def floor(self) -> tuple[str, float] | None:
        """The resource, in the planner's words, that alone would take longest for a step, and how long."""
        floors: Mapping[str, float] = self.summary.get("floor_by_resource_s") or {}
        return max(floors.items(), key=lambda item: item[1]) if floors else None

    @property
    def shares_cpu(self) -> bool:
        return bool((self.summary.get("hardware") or {}).get("kind") == "cpu")

    # Lanes.

    @cached_property
    def lanes(self) -> list[LaneWork]:
        works = [LaneWork(lane, *self._busy(lane)) for lane in WORK_LANES]
        return [work for work in works if work.busy_s > 0]

    def _busy(self, lane: str) -> tuple[float, float]:
        busy_s = self._mean(_nested("busy_s", lane))
        if lane == COMPUTE and self.shares_cpu:
            # A block's compute is timed as a whole; where the computing thread computes itself, it waits meanwhile.
            busy_s -= sum(w.seconds for w in self.waits if w.lane == COMPUTE_WAITS and w.cause in _WAITS_INSIDE_COMPUTE)
        busy_s = max(0.0, busy_s)
        return busy_s, busy_s / self._mean(lambda step: step["step_s"]) if self.later else 0.0

    @cached_property
    def waits(self) -> list[Wait]:
        """By lane, the longest first."""
        causes = {
            (lane, cause)
            for step in self.later
            for lane in WAIT_LANES
            for cause in step.get("waits_s", {}).get(lane, ())
        }
        waits = [Wait(lane, cause, self._mean(_nested("waits_s", lane, cause))) for lane, cause in causes]
        lengths = (wait for wait in waits if wait.seconds > 0)
        return sorted(lengths, key=lambda wait: (WAIT_LANES.index(wait.lane), -wait.seconds))

    @property
    def between_s(self) -> float:
        """From a step's end to the next one's begin, on average: data, logging, saving, evaluating."""
        return self._mean(lambda step: step.get("between_s", 0.0))

    # Bytes.

    def mean_of(self, name: str) -> float | None:
        """A figure's mean over the later steps; None where no step has it."""
        return self._mean(lambda step: step.get(name, 0.0)) if any(name in step for step in self.later) else None

    @property
    def sent_bytes(self) -> dict[str, float]:
        """What this rank sent to others in a later step, by lane, on average. Empty where there is one rank."""
        sent = [step["sent_bytes"] for step in self.later if "sent_bytes" in step]
        lanes = [lane for lane in _RANK_LANES if any(lane in of_step for of_step in sent)]
        return {lane: statistics.fmean(of_step.get(lane, 0) for of_step in sent) for lane in lanes}

    @property
    def written_bytes(self) -> float | None:
        if not self.steps:
            return self.summary.get("ssd_write_bytes")
        parts = [part for step in self.steps for part in (step, step.get("before", {}), step.get("after", {}))]
        return float(sum(part.get("ssd_write_bytes", 0) for part in parts))

    @property
    def written_bytes_per_day(self) -> float | None:
        """If it went on like this."""
        written = self.mean_of("ssd_write_bytes")
        return written / self._mean(lambda step: step["step_s"]) * _DAY_S if written is not None else None

    # Outcomes.

    def values(self, name: str) -> tuple[list[int], list[float]]:
        found = [step for step in self.steps if step.get(name) is not None]
        return [step["step"] for step in found], [step[name] for step in found]

    def _mean(self, value: Callable[[Step], float]) -> float:
        return sum(map(value, self.later)) / len(self.later) if self.later else 0.0


def _nested(*names: str) -> Callable[[Step], float]:
    def value(step: Step) -> float:
        inner: Any = step
        for name in names:
            inner = inner.get(name, {})
        return inner or 0.0

    return value


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
            for kind in sorted(kinds, key=lambda kind: (list(LANES).index(kind[0]), -kinds[kind]))
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

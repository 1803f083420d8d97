"""Computes the figures of a report: means over the later steps of a run, and the tasks of one typical step."""

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
"""The figures leave out this number of first steps, in which the run still measures and plans."""
_WAITS_INSIDE_COMPUTE = ("a gradient buffer", "activations", "activations to leave")
_RANK_LANES = ("control", "weights", "gradients", "tokens")
_DAY_S = 86400.0

StepLine = Mapping[str, Any]
_STEP = "step"
_FINEST = 1 / 1500
"""Gaps shorter than this fraction of the step are not drawn."""

Span = tuple[float, float]


@dataclass(frozen=True, slots=True)
class ShownLane:
    label: str
    color: str
    waits: bool = False
    """Whether the lane is the waiting time of a thread and not the work of a resource."""


SHOWN_LANES = {
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
WORK_LANES = tuple(name for name, lane in SHOWN_LANES.items() if not lane.waits)
WAIT_LANES = tuple(name for name, lane in SHOWN_LANES.items() if lane.waits)


@dataclass(frozen=True, slots=True)
class LaneWork:
    lane: str
    busy_s: float
    share: float


@dataclass(frozen=True, slots=True)
class Wait:
    """Mean time that one thread waits for one cause in a step."""

    lane: str
    cause: str
    seconds: float


class Findings:
    """Figures of a run, which are computed on demand. Unknown figures are None or empty."""

    def __init__(self, run: RunData) -> None:
        self.run = run
        self.summary = run.summary
        num_first = min(NUM_FIRST_STEPS, len(run.steps) // 2)
        self.steps = run.steps
        self.later = run.steps[num_first:]
        """The steps that the figures describe."""

    # Time.

    @cached_property
    def step_s(self) -> float | None:
        """The median step time."""
        if self.later:
            return statistics.median(self.step_times_s)
        return self.summary.get("step_s") or None

    @cached_property
    def step_times_s(self) -> list[float]:
        """Times of the later steps, each from the end of the previous step."""
        return [step["step_s"] for step in self.later]

    @property
    def tokens_per_s(self) -> float | None:
        tokens = sum(step.get("num_tokens", 0) for step in self.later)
        return tokens / sum(self.step_times_s) if tokens else self.summary.get("tokens_per_s") or None

    @property
    def predicted_s(self) -> float | None:
        """Step time of the first plan."""
        return self.summary.get("predicted_step_s")

    @property
    def corrected_s(self) -> float | None:
        """Step time of the last plan. None if there was only one plan."""
        corrected = self.summary.get("corrected_step_s")
        return corrected if corrected != self.predicted_s else None

    @property
    def floor(self) -> tuple[str, float] | None:
        """(name, seconds) of the resource that needs the longest time for a step. The name is the planner's."""
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
            # On a CPU device, the time of a block's compute includes waits of the computing thread.
            busy_s -= sum(w.seconds for w in self.waits if w.lane == COMPUTE_WAITS and w.cause in _WAITS_INSIDE_COMPUTE)
        busy_s = max(0.0, busy_s)
        return busy_s, busy_s / self._mean(lambda step: step["step_s"]) if self.later else 0.0

    @cached_property
    def waits(self) -> list[Wait]:
        """Waits, sorted by lane. In each lane the longest wait is first."""
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
        """Mean seconds between two steps, for data, logging, saving and evaluating."""
        return self._mean(lambda step: step.get("between_s", 0.0))

    @cached_property
    def waits_for_ranks(self) -> list[tuple[int, float]]:
        """(rank, fraction) for each rank: the fraction of a step in which another rank waited for it, averaged over the
        other ranks. The largest fraction is first. Empty for a single rank."""
        first = self.later[0]["step"] if self.later else 0
        shares: dict[int, list[float]] = {}
        for steps in (self.later, *self.run.steps_of_others):
            later = [step for step in steps if step["step"] >= first and step.get("waited_s")]
            for rank in later[0]["waited_s"] if later else ():
                waited_s = sum(step["waited_s"].get(rank, 0.0) for step in later)
                shares.setdefault(int(rank), []).append(waited_s / sum(step["step_s"] for step in later))
        return sorted(((rank, statistics.fmean(of)) for rank, of in shares.items()), key=lambda item: -item[1])

    # Bytes.

    def mean_of(self, name: str) -> float | None:
        """Return the mean of a figure over the later steps, or None if no step has it."""
        return self._mean(lambda step: step.get(name, 0.0)) if any(name in step for step in self.later) else None

    @property
    def sent_bytes(self) -> dict[str, float]:
        """Mean bytes that this rank sent in a step, by lane. Empty for one rank."""
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
        """Bytes that the run would write in a day, at the rate of the later steps."""
        written = self.mean_of("ssd_write_bytes")
        return written / self._mean(lambda step: step["step_s"]) * _DAY_S if written is not None else None

    # Outcomes.

    def values(self, name: str) -> tuple[list[int], list[float]]:
        """Return step numbers and values of all steps that have the figure."""
        steps = [step for step in self.steps if step.get(name) is not None]
        return [step["step"] for step in steps], [step[name] for step in steps]

    def _mean(self, value: Callable[[StepLine], float]) -> float:
        return sum(map(value, self.later)) / len(self.later) if self.later else 0.0


def _nested(*names: str) -> Callable[[StepLine], float]:
    def value(step: StepLine) -> float:
        inner: Any = step
        for name in names:
            inner = inner.get(name, {})
        return inner or 0.0

    return value


@dataclass(frozen=True, slots=True)
class StepPicture:
    """The tasks of one step. Times are relative to its beginning."""

    step: int
    step_s: float
    spans: dict[tuple[str, str], list[Span]]
    """Maps (lane, task name) to (begin, end) spans. In each lane the name with the longest time is first. Overlapping
    and adjacent spans are merged."""
    ssd_hidden_share: float | None
    """Fraction of the SSDs' busy time during which the device computed."""


def picture_of(trace: Sequence[TracedTask]) -> StepPicture | None:
    """Return the step nearest to the median time in the second half of the trace, or None without a complete step."""
    steps = [task for task in trace if task.lane == _STEP]
    later = steps[len(steps) // 2 :]
    if not later:
        return None
    median_s = statistics.median(step.ended_s - step.began_s for step in later)
    chosen = min(later, key=lambda step: abs(step.ended_s - step.began_s - median_s))
    step_s = chosen.ended_s - chosen.began_s
    during = (task for task in trace if task.ended_s > chosen.began_s and task.began_s < chosen.ended_s)
    inside = [task for task in during if task.lane in SHOWN_LANES]

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
            for kind in sorted(kinds, key=lambda kind: (list(SHOWN_LANES).index(kind[0]), -kinds[kind]))
        },
        ssd_hidden_share=overlap_s(ssd, compute) / ssd_s if ssd_s else None,
    )


def merged(spans: Iterable[Span], gap_s: float = 0.0) -> list[Span]:
    """Return the union of the spans. Gaps of at most ``gap_s`` are closed."""
    union: list[Span] = []
    for begin, end in sorted(spans):
        if union and begin <= union[-1][1] + gap_s:
            union[-1] = union[-1][0], max(union[-1][1], end)
        else:
            union.append((begin, end))
    return union


def overlap_s(left: Sequence[Span], right: Sequence[Span]) -> float:
    """Return the seconds in which spans of both sequences overlap. Each is sorted, and has no overlaps in itself."""
    total_s, index = 0.0, 0
    for begin, end in left:
        while index < len(right) and right[index][1] <= begin:
            index += 1
        for other_begin, other_end in right[index:]:
            if other_begin >= end:
                break
            total_s += min(end, other_end) - max(begin, other_begin)
    return total_s

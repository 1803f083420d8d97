"""Counts busy seconds and bytes of each lane, and records every task if a trace was requested.

A lane is a resource: compute, a copy direction, a drive direction, the optimizer, or a thread that waits. Each task
takes a lock and reads the clock twice. Perfetto (ui.perfetto.dev) and chrome://tracing open a trace, which is JSON.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

logger = logging.getLogger(__name__)

COMPUTE = "compute"
H2D = "h2d"
D2H = "d2h"
SSD_READ = "ssd read"
SSD_WRITE = "ssd write"
CPU_OPTIMIZER = "cpu optimizer"
COMPUTE_WAITS = "compute waits"
"""Waits of the computing thread. A task's name is the cause of the wait."""
UPDATES_WAIT = "updates wait"
LOADS_WAIT = "loads wait"
LANES = (COMPUTE, H2D, D2H, SSD_READ, SSD_WRITE, CPU_OPTIMIZER, COMPUTE_WAITS, UPDATES_WAIT, LOADS_WAIT)

MAX_TASKS = 400_000
"""Maximum number of tasks in a trace: the tasks of a few hundred steps of a large model."""
_PID = 1
_STEPS_ROW = 1_000_000
"""Thread number of the row with the steps. Lanes are numbered from 1."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work, with times of `time.perf_counter`."""

    lane: str
    name: str
    block: str
    began_s: float
    ended_s: float
    num_bytes: int
    thread: str


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """The work of one lane since the timeline began."""

    busy_s: float = 0.0
    """Seconds in which at least one task ran."""
    num_bytes: int = 0
    num_tasks: int = 0
    task_s: Mapping[str, float] = field(default_factory=dict)
    """Sum of seconds by task name."""


class _LaneCounter:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy_s = 0.0
        self.num_bytes = 0
        self.num_tasks = 0
        self.num_running = 0
        self.busy_since_s = 0.0
        self.task_s: dict[str, float] = {}

    def begin_task(self) -> float:
        with self.lock:
            now_s = time.perf_counter()
            if self.num_running == 0:
                self.busy_since_s = now_s
            self.num_running += 1
            return now_s

    def end_task(self, name: str, began_s: float, num_bytes: int) -> float:
        with self.lock:
            now_s = time.perf_counter()
            self.num_running -= 1
            if self.num_running == 0:
                self.busy_s += now_s - self.busy_since_s
            self._count(name, now_s - began_s, num_bytes)
            return now_s

    def add_task(self, name: str, seconds: float, num_bytes: int) -> None:
        with self.lock:
            self.busy_s += seconds
            self._count(name, seconds, num_bytes)

    def _count(self, name: str, seconds: float, num_bytes: int) -> None:
        self.num_bytes += num_bytes
        self.num_tasks += 1
        self.task_s[name] = self.task_s.get(name, 0.0) + seconds

    def totals(self) -> LaneTotals:
        with self.lock:
            running_s = time.perf_counter() - self.busy_since_s if self.num_running else 0.0
            return LaneTotals(self.busy_s + running_s, self.num_bytes, self.num_tasks, dict(self.task_s))


class Timeline:
    """The lanes of one run. Any thread may add tasks. Tasks of one lane may overlap."""

    def __init__(self, *, is_tracing: bool = False) -> None:
        self.began_s = time.perf_counter()
        self._counters = {lane: _LaneCounter() for lane in LANES}
        self._drives = _LaneCounter()
        self._tasks: list[Task] | None = [] if is_tracing else None

    @property
    def is_tracing(self) -> bool:
        return self._tasks is not None

    @property
    def tasks(self) -> list[Task]:
        return list(self._tasks or ())

    @contextmanager
    def task(self, lane: str, name: str, *, block: str = "", num_bytes: int = 0) -> Iterator[None]:
        """Count the body of this context as a task of ``lane``. ``block`` is the task's subject."""
        counter = self._counters[lane]
        began_s = counter.begin_task()
        uses_drives = lane in (SSD_READ, SSD_WRITE)
        if uses_drives:
            self._drives.begin_task()
        try:
            yield
        finally:
            ended_s = counter.end_task(name, began_s, num_bytes)
            if uses_drives:
                self._drives.end_task(name, began_s, num_bytes)
            self._keep(lane, name, block, began_s, ended_s, num_bytes)

    def add_task(
        self, lane: str, name: str, began_s: float, ended_s: float, *, block: str = "", num_bytes: int = 0
    ) -> None:
        """Count a finished task that did not overlap another task of its lane."""
        self._counters[lane].add_task(name, ended_s - began_s, num_bytes)
        self._keep(lane, name, block, began_s, ended_s, num_bytes)

    @property
    def drives_busy_s(self) -> float:
        """Seconds in which at least one read or write ran."""
        return self._drives.totals().busy_s

    @property
    def drives_bytes(self) -> int:
        """Bytes read and written so far."""
        return self._drives.totals().num_bytes

    def totals(self) -> dict[str, LaneTotals]:
        return {lane: counter.totals() for lane, counter in self._counters.items()}

    def _keep(self, lane: str, name: str, block: str, began_s: float, ended_s: float, num_bytes: int) -> None:
        tasks = self._tasks
        if tasks is None or len(tasks) >= MAX_TASKS:
            return
        tasks.append(Task(lane, name, block, began_s, ended_s, num_bytes, threading.current_thread().name))
        if len(tasks) == MAX_TASKS:
            logger.warning("the trace is full with %d tasks; later tasks are counted but not traced", MAX_TASKS)


def trace_events(
    tasks: Iterable[Task], *, began_s: float, steps: Iterable[tuple[int, float, float]] = ()
) -> Iterator[dict[str, Any]]:
    """Yield the `traceEvents` of a trace, in microseconds from ``began_s``. The first row has ``steps`` (number, begin,
    end). A lane has further rows for overlapping tasks, because the format allows only nested tasks in one row."""
    rows: dict[tuple[str, int], int] = {}
    yield _metadata("process_name", 0, {"name": "hf_lohan"})
    yield _metadata("thread_name", _STEPS_ROW, {"name": "steps"})
    yield _metadata("thread_sort_index", _STEPS_ROW, {"sort_index": -1})
    for step, begin_s, end_s in steps:
        yield _event(_STEPS_ROW, f"step {step}", "step", begin_s - began_s, end_s - began_s, {"step": step})
    by_lane: dict[str, list[Task]] = {lane: [] for lane in LANES}
    for task in tasks:
        by_lane[task.lane].append(task)
    for lane, of_lane in by_lane.items():
        ends_s: list[float] = []
        for task in sorted(of_lane, key=lambda task: (task.began_s, -task.ended_s)):
            row = next((row for row, end_s in enumerate(ends_s) if end_s <= task.began_s), len(ends_s))
            ends_s[row : row + 1] = [task.ended_s]
            args = {"block": task.block, "bytes": task.num_bytes, "thread": task.thread}
            thread = rows.setdefault((lane, row), len(rows) + 1)
            name = f"{task.name} {task.block}".rstrip()
            yield _event(thread, name, lane, task.began_s - began_s, task.ended_s - began_s, args)
    for (lane, row), thread in rows.items():
        yield _metadata("thread_name", thread, {"name": lane if row == 0 else f"{lane} ({row + 1})"})
        yield _metadata("thread_sort_index", thread, {"sort_index": LANES.index(lane) * 100 + row})


def _event(thread: int, name: str, kind: str, begin_s: float, end_s: float, args: dict[str, Any]) -> dict[str, Any]:
    times = {"ts": begin_s * 1e6, "dur": (end_s - begin_s) * 1e6}
    return {"ph": "X", "pid": _PID, "tid": thread, "name": name, "cat": kind, **times, "args": args}


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": thread, "name": name, "args": args}

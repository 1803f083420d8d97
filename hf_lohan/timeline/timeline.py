"""Tasks by lane: counted always, kept one by one while tracing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType

logger = logging.getLogger(__name__)

COMPUTE = "compute"
H2D = "h2d"
D2H = "d2h"
SSD_READ = "ssd read"
SSD_WRITE = "ssd write"
CPU_OPTIMIZER = "cpu optimizer"
COMPUTE_WAITS = "compute waits"
"""What the computing thread waits for; the names of its tasks are the causes."""
UPDATES_WAIT = "updates wait"
"""What the optimizer's thread waits for."""
LOADS_WAIT = "loads wait"
"""What the thread that brings weights waits for."""
LANES = (COMPUTE, H2D, D2H, SSD_READ, SSD_WRITE, CPU_OPTIMIZER, COMPUTE_WAITS, UPDATES_WAIT, LOADS_WAIT)

MAX_TASKS = 400_000
"""A trace keeps the first so many: some hundred steps of a large model."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work. Times are `time.perf_counter`'s."""

    lane: str
    name: str
    block: str
    began_s: float
    ended_s: float
    num_bytes: int
    thread: str


@dataclass(frozen=True, slots=True)
class LaneTotals:
    """Of one lane since the timeline began."""

    busy_s: float = 0.0
    """Seconds in which at least one task ran."""
    num_bytes: int = 0
    num_tasks: int = 0
    task_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds of all tasks together, by name."""


class _LaneCounter:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.busy_s = 0.0
        self.num_bytes = 0
        self.num_tasks = 0
        self.num_running = 0
        self.busy_since_s = 0.0
        self.task_s: dict[str, float] = {}

    def begin(self) -> float:
        with self.lock:
            now_s = time.perf_counter()
            if self.num_running == 0:
                self.busy_since_s = now_s
            self.num_running += 1
            return now_s

    def end(self, name: str, began_s: float, num_bytes: int) -> float:
        with self.lock:
            now_s = time.perf_counter()
            self.num_running -= 1
            if self.num_running == 0:
                self.busy_s += now_s - self.busy_since_s
            self._count(name, now_s - began_s, num_bytes)
            return now_s

    def add(self, name: str, seconds: float, num_bytes: int) -> None:
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


class _Running:
    """A task that is under way while the context is open."""

    __slots__ = ("_began_s", "_block", "_counter", "_lane", "_name", "_num_bytes", "_timeline")

    def __init__(self, timeline: Timeline, lane: str, name: str, block: str, num_bytes: int) -> None:
        self._timeline = timeline
        self._counter = timeline._counters[lane]
        self._lane = lane
        self._name = name
        self._block = block
        self._num_bytes = num_bytes
        self._began_s = 0.0

    def __enter__(self) -> None:
        self._began_s = self._counter.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        ended_s = self._counter.end(self._name, self._began_s, self._num_bytes)
        self._timeline._keep(self._lane, self._name, self._block, self._began_s, ended_s, self._num_bytes)


class Timeline:
    """What ran when. Any thread may note tasks; tasks of one lane may overlap."""

    def __init__(self, *, is_tracing: bool = False) -> None:
        self.began_s = time.perf_counter()
        self._counters = {lane: _LaneCounter() for lane in LANES}
        self._tasks: list[Task] | None = [] if is_tracing else None

    @property
    def is_tracing(self) -> bool:
        return self._tasks is not None

    @property
    def tasks(self) -> list[Task]:
        """All of them so far, if they are traced."""
        return list(self._tasks or ())

    def task(self, lane: str, name: str, *, block: str = "", num_bytes: int = 0) -> _Running:
        """A context: what runs in it, on this thread, is one task of ``lane``. ``name`` is of one of few kinds, what it
        is about is the ``block``."""
        return _Running(self, lane, name, block, num_bytes)

    def add(
        self, lane: str, name: str, began_s: float, ended_s: float, *, block: str = "", num_bytes: int = 0
    ) -> None:
        """Note a task that is over and overlapped no other one of its lane."""
        self._counters[lane].add(name, ended_s - began_s, num_bytes)
        self._keep(lane, name, block, began_s, ended_s, num_bytes)

    def totals(self) -> dict[str, LaneTotals]:
        """By lane."""
        return {lane: counter.totals() for lane, counter in self._counters.items()}

    def _keep(self, lane: str, name: str, block: str, began_s: float, ended_s: float, num_bytes: int) -> None:
        tasks = self._tasks
        if tasks is None or len(tasks) >= MAX_TASKS:
            return
        tasks.append(Task(lane, name, block, began_s, ended_s, num_bytes, threading.current_thread().name))
        if len(tasks) == MAX_TASKS:
            logger.warning("the trace is full with %d tasks; later ones are counted only", MAX_TASKS)

"""Runs a graph of tasks on lanes. A lane does one task at a time.

Of the tasks that can begin, a lane takes the most urgent. Of equally urgent tasks it takes the task that could begin
first. A running task is not interrupted.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

NO_LANE = ""
"""Lane of tasks that only wait for other tasks, and occupy no resource."""


@dataclass(frozen=True, slots=True)
class LaneRules:
    """The rules by which lanes affect each other."""

    shared: Collection[str] = ()
    """Lanes that share the cores of a CPU. If several of these lanes work, each gets an equal part of the time."""
    shared_efficiency: float = 1.0
    """Fraction of the cores' time that remains if several of these lanes work."""
    opposite: Mapping[str, str] = field(default_factory=dict)
    """Maps the lane of each direction of a link to the lane of the other direction."""
    both_ways_factor: float = 1.0
    """Factor by which a task of a link takes longer while the opposite direction is busy."""
    mixed_lane: str = NO_LANE
    """The lane of the drives."""
    mixed_factor: float = 1.0
    """Factor by which a read takes longer if a write waits, or a write if a read waits: the drives then do both."""
    looks_ahead: bool = False
    """Whether the drives choose their next task before the running task ends, because each I/O thread holds a task."""


class TaskGraph:
    """Tasks that begin when all tasks before them have ended."""

    def __init__(self) -> None:
        self.lanes: list[str] = []
        self.seconds: list[float] = []
        self.names: list[str] = []
        """Name of each task. If another task waits for it, the wait has this name."""
        self.steps: list[int] = []
        """The step of each task."""
        self.step = 0
        """Step of the tasks that are added next."""
        self._ranks: list[int] = []
        self._after: list[list[int]] = []
        self._num_before: list[int] = []
        self._before: list[list[int]] = []
        self._is_write: list[bool] = []
        self._only_if_ended: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self.lanes)

    def add(
        self,
        lane: str,
        seconds: float,
        after: Iterable[int | None] = (),
        *,
        name: str = "",
        rank: int = 0,
        is_write: bool = False,
    ) -> int:
        """Add a task and return its index. It begins when the tasks ``after`` have ended. ``rank`` 0 is most urgent."""
        number = len(self.lanes)
        self.lanes.append(lane)
        self.seconds.append(seconds)
        self.names.append(name)
        self.steps.append(self.step)
        self._ranks.append(rank)
        self._is_write.append(is_write)
        self._after.append([])
        self._before.append([])
        self._num_before.append(0)
        for before in after:
            self.link(before, number)
        return number

    def link(self, before: int | None, after: int) -> None:
        """Make the task ``after`` begin only when the task ``before`` has ended. None is no task."""
        if before is not None:
            self._after[before].append(after)
            self._before[after].append(before)
            self._num_before[after] += 1

    def skip_unless_ended(self, task: int, other: int) -> None:
        """Make a task take no time if ``other`` has not ended by the time when the task could begin."""
        self._only_if_ended[task] = other

    def last_before(self, task: int, ends_s: list[float]) -> int | None:
        """Return the last task to end among the tasks that ``task`` waits for."""
        return max(self._before[task], key=ends_s.__getitem__, default=None)

    def run(self, rules: LaneRules) -> tuple[list[float], list[float]]:
        """Run all tasks. Returns the times at which they begin, and the times at which they end, in seconds."""
        return _Run(self, rules).run_all()


class _Run:
    """One run of a graph."""

    def __init__(self, graph: TaskGraph, rules: LaneRules) -> None:
        self._graph = graph
        self._rules = rules
        self._num_before = list(graph._num_before)
        self._begins = [0.0] * len(graph)
        self._ends = [-1.0] * len(graph)
        self._ready: dict[str, list[tuple[int, float, int]]] = {lane: [] for lane in sorted({*graph.lanes, NO_LANE})}
        self._of_drives = self._ready.get(rules.mixed_lane, []) if rules.mixed_lane != NO_LANE else []
        self._running: dict[str, bool] = dict.fromkeys(self._ready, False)
        self._num_waiting = [0, 0]
        """Number of reads and number of writes that wait for the drives."""
        self._events: list[tuple[float, int]] = []
        self._shared: list[tuple[float, int]] = []
        """Heap of (value of `_core_s` at which the task ends, task), for tasks on shared lanes."""
        self._core_s = 0.0
        """Seconds of work that a shared lane would have done so far if it had always been busy."""
        self._now = 0.0
        self._chosen: int | None = None
        """The next task of the drives, if they look ahead."""

    def run_all(self) -> tuple[list[float], list[float]]:
        graph = self._graph
        self._release([task for task, number in enumerate(self._num_before) if not number])
        while True:
            for lane, ready in self._ready.items():
                if not self._running[lane] and (ready or (lane == self._rules.mixed_lane and self._chosen is not None)):
                    self._begin(lane, ready)
            if self._rules.looks_ahead and self._chosen is None and self._of_drives:
                self._chosen = heapq.heappop(self._of_drives)[2]
            if not self._events and not self._shared:
                break
            ended = self._advance()
            for task in ended:
                self._running[graph.lanes[task]] = False
                self._ends[task] = self._now
            for task in ended:
                self._release(self._freed_by(task))
        assert all(end >= 0 for end in self._ends), "tasks wait for each other"
        return self._begins, self._ends

    def _freed_by(self, task: int) -> list[int]:
        freed = []
        for later in self._graph._after[task]:
            self._num_before[later] -= 1
            if not self._num_before[later]:
                freed.append(later)
        return freed

    def _release(self, tasks: list[int]) -> None:
        """Queue tasks that can begin now. Tasks that take no time end immediately."""
        graph = self._graph
        while tasks:
            task = tasks.pop()
            lane, other = graph.lanes[task], graph._only_if_ended.get(task)
            if lane == NO_LANE or (other is not None and self._ends[other] < 0):
                self._begins[task] = self._ends[task] = self._now
                tasks += self._freed_by(task)
                continue
            heapq.heappush(self._ready[lane], (graph._ranks[task], self._now, task))
            if lane == self._rules.mixed_lane:
                self._num_waiting[graph._is_write[task]] += 1

    def _begin(self, lane: str, ready: list[tuple[int, float, int]]) -> None:
        rules, graph = self._rules, self._graph
        if lane == rules.mixed_lane and self._chosen is not None:
            task, self._chosen = self._chosen, None
        else:
            task = heapq.heappop(ready)[2]
        seconds = graph.seconds[task]
        self._begins[task] = self._now
        self._running[lane] = True
        if lane == rules.mixed_lane:
            is_write = graph._is_write[task]
            self._num_waiting[is_write] -= 1
            if self._num_waiting[not is_write]:
                seconds *= rules.mixed_factor
        elif rules.both_ways_factor != 1.0 and self._running.get(rules.opposite.get(lane, NO_LANE)):
            seconds *= rules.both_ways_factor
        if lane in rules.shared:
            heapq.heappush(self._shared, (self._core_s + seconds, task))
        else:
            heapq.heappush(self._events, (self._now + seconds, task))

    def _advance(self) -> list[int]:
        """Go to the next time at which tasks end. Returns these tasks."""
        num_shared = len(self._shared)
        slowdown = num_shared / self._rules.shared_efficiency if num_shared > 1 else 1.0
        shared_end = self._now + slowdown * (self._shared[0][0] - self._core_s) if num_shared else float("inf")
        own_end = self._events[0][0] if self._events else float("inf")
        then = min(shared_end, own_end)
        if num_shared:
            self._core_s += (then - self._now) / slowdown
        self._now = max(self._now, then)
        ended = []
        if shared_end <= own_end:
            self._core_s = max(self._core_s, self._shared[0][0])
            while self._shared and self._shared[0][0] <= self._core_s:
                ended.append(heapq.heappop(self._shared)[1])
        while self._events and self._events[0][0] <= self._now:
            ended.append(heapq.heappop(self._events)[1])
        return ended

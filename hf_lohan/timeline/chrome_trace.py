"""Tasks as Chrome's trace JSON, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from hf_lohan.timeline.timeline import LANES, Task

_PID = 1


def trace_events(tasks: Iterable[Task], *, began_s: float) -> Iterator[dict[str, Any]]:
    """The `traceEvents` of a trace, one at a time, for there may be millions. Their clock starts at ``began_s`` and
    counts microseconds.

    Tasks of a lane that overlap without one holding the other are drawn in rows of their own, for the format allows
    only nested ones in a row.
    """
    rows: dict[tuple[str, int], int] = {}
    yield _metadata("process_name", 0, {"name": "hf_lohan"})
    by_lane: dict[str, list[Task]] = {lane: [] for lane in LANES}
    for task in tasks:
        by_lane[task.lane].append(task)
    for lane, of_lane in by_lane.items():
        ends_s: list[float] = []
        for task in sorted(of_lane, key=lambda task: (task.began_s, -task.ended_s)):
            row = next((row for row, end_s in enumerate(ends_s) if end_s <= task.began_s), len(ends_s))
            ends_s[row : row + 1] = [task.ended_s]
            thread = rows.setdefault((lane, row), len(rows) + 1)
            yield _event(task, thread, began_s)
    for (lane, row), thread in rows.items():
        yield _metadata("thread_name", thread, {"name": lane if row == 0 else f"{lane} ({row + 1})"})
        yield _metadata("thread_sort_index", thread, {"sort_index": LANES.index(lane) * 100 + row})


def _event(task: Task, thread: int, began_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PID,
        "tid": thread,
        "name": f"{task.name} {task.block}".rstrip(),
        "cat": task.lane,
        "ts": (task.began_s - began_s) * 1e6,
        "dur": (task.ended_s - task.began_s) * 1e6,
        "args": {"block": task.block, "bytes": task.num_bytes, "thread": task.thread},
    }


def _metadata(name: str, thread: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "pid": _PID, "tid": thread, "name": name, "args": args}

"""A traced run's tasks and steps as Chrome's trace JSON."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from hf_lohan.report import make_folder, open_text
from hf_lohan.timeline import Timeline, trace_events

logger = logging.getLogger(__name__)

STEP_CATEGORY = "step"
_STEPS_ROW = 1_000_000
"""The thread number of the row with the steps; those of the lanes count from 1."""
_PID = 1


@dataclass(frozen=True, slots=True)
class StepMark:
    """One step, between the ends of two. Times are `time.perf_counter`'s."""

    step: int
    began_s: float
    ended_s: float


def write_trace(path: Path, timeline: Timeline, steps: Iterable[StepMark] = ()) -> None:
    """Write all tasks so far, an event a line, with the steps in a row of their own on top. The file is there when it
    is whole; where that cannot be, a warning says so: the training itself is fine."""
    marks = (_event(mark, timeline.began_s) for mark in steps)
    events = chain(_row_of_steps(), marks, trace_events(timeline.tasks, began_s=timeline.began_s))
    fresh = path.with_name(f"{path.name}.new")
    try:
        make_folder(path.parent)
        with open_text(fresh, "w") as stream:
            stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(events):
                stream.write((",\n" if number else "") + json.dumps(event))
            stream.write("\n]}\n")
        os.replace(fresh, path)
    except OSError as error:
        with suppress(OSError):  # half of it is of no use, and where the disk is full the store needs the room
            fresh.unlink(missing_ok=True)
        logger.warning("the trace is not written to %s: %s", path, error)
        return
    logger.info("wrote %d tasks to %s; open it in https://ui.perfetto.dev", len(timeline.tasks), path)


def _row_of_steps() -> list[dict[str, Any]]:
    row = {"ph": "M", "pid": _PID, "tid": _STEPS_ROW}
    return [
        {**row, "name": "thread_name", "args": {"name": "steps"}},
        {**row, "name": "thread_sort_index", "args": {"sort_index": -1}},
    ]


def _event(mark: StepMark, began_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "pid": _PID,
        "tid": _STEPS_ROW,
        "name": f"step {mark.step}",
        "cat": STEP_CATEGORY,
        "ts": (mark.began_s - began_s) * 1e6,
        "dur": (mark.ended_s - mark.began_s) * 1e6,
        "args": {"step": mark.step},
    }

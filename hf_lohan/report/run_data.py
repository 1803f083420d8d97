"""A run's files: their names, who may write them, and how they are read back. They lie in `lohan` in its output folder.

What is not there is left out: old runs, and runs that are not over, have less.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("lohan")
CONFIG_NAME = "config.json"
"""The resolved settings."""
SUMMARY_NAME = "summary.json"
"""Model, hardware, plan and the figures of the whole run."""
PLAN_NAME, CORRECTED_PLAN_NAME = "plan.json", "plan_corrected.json"
"""What the run follows: from its first forward on, and since its first steps were timed."""
STEPS_NAME = "steps.jsonl"
"""A line a step. Where a step has several, the last one counts."""
TRACE_NAME = "trace.json"
"""Chrome's trace JSON, of runs with `trace: true`."""
REPORT_NAME = "report.html"
PRIVATE_FOLDER = Path("_lohan")
"""Beside it. Pushes to the Hub leave out what begins with an underscore."""
STORE_FOLDER = PRIVATE_FOLDER / "store"
"""Where a store is if the configuration names no path."""
_MOST_FOLDERS = 1000
"""That are looked at for a run."""


@dataclass(frozen=True, slots=True)
class TracedTask:
    """One task of a trace. Times count from the trace's begin."""

    lane: str
    name: str
    began_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class RunData:
    output_dir: Path
    config: Mapping[str, Any]
    summary: Mapping[str, Any]
    steps: tuple[Mapping[str, Any], ...]
    trace: tuple[TracedTask, ...]
    """The lane of a whole step is "step", its name the step's number."""


def read_run(path: str | Path) -> RunData:
    """The run in an output folder, or in a folder in it. Raises ValueError if no run wrote there, or if a
    file is damaged."""
    output_dir = output_folder(path, SUMMARY_NAME, STEPS_NAME)
    if output_dir is None:
        raise no_run_in(path, SUMMARY_NAME, STEPS_NAME)
    folder = output_dir / FOLDER
    return RunData(
        output_dir=output_dir,
        config=_read_json(folder / CONFIG_NAME),
        summary=_read_json(folder / SUMMARY_NAME),
        steps=_read_steps(folder / STEPS_NAME),
        trace=_read_trace(folder / TRACE_NAME),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); remove it, and the report goes without") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} holds no JSON object; remove it, and the report goes without")
    return content


def _read_steps(file: Path) -> tuple[Mapping[str, Any], ...]:
    """A line that a killed run did not finish is no step."""
    steps: dict[int, Mapping[str, Any]] = {}
    for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if file.is_file() else ():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and isinstance(entry.get("step"), int) and entry.get("step_s"):
            steps[entry["step"]] = entry
    return tuple(steps[number] for number in sorted(steps))


def _read_trace(file: Path) -> tuple[TracedTask, ...]:
    try:
        return tuple(
            TracedTask(
                lane=event["cat"],
                name=_name_of(event),
                began_s=event["ts"] / 1e6,
                ended_s=(event["ts"] + event["dur"]) / 1e6,
            )
            for event in _read_json(file).get("traceEvents", ())
            if event.get("ph") == "X"
        )
    except (KeyError, TypeError, AttributeError):
        raise ValueError(f"{file} is no trace of a run; remove it, and the report goes without") from None


def _name_of(event: Mapping[str, Any]) -> str:
    """Without what it is about."""
    args = event.get("args", {})
    if "step" in args:
        return str(args["step"])
    return str(event["name"]).removesuffix(f" {args.get('block')}")


def output_folder(given: str | Path, *names: str) -> Path | None:
    """The output folder that `given` is, or is a folder of (`lohan`, `_lohan`, the store in it); None if none of the
    files `names` is there."""
    folder = Path(os.path.abspath(given))
    for inside in (Path(), FOLDER, PRIVATE_FOLDER, STORE_FOLDER):
        if folder.parts[len(folder.parts) - len(inside.parts) :] == inside.parts:
            run = folder.parents[len(inside.parts) - 1] if inside.parts else folder
            if any((run / FOLDER / name).is_file() for name in names):
                return run
    return None


def no_run_in(given: str | Path, *names: str) -> ValueError:
    """What to say where none is; names one that lies below."""
    missing = " and no ".join(str(FOLDER / name) for name in names)
    said = f"{str(given)!r} is not the output folder of an offloaded run (there is no {missing} in it)"
    for number, (folder, below, _) in enumerate(os.walk(given)):
        if number == _MOST_FOLDERS:
            break
        below.sort()
        if number and output_folder(folder, *names) == Path(os.path.abspath(folder)):
            return ValueError(f"{said}; there is one in {folder!r}")
    return ValueError(f"{said}; give the output_dir of one")

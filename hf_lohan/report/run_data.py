"""Names and reads the files that a run writes to `lohan` in its output folder.

Files may be missing, because old and unfinished runs have fewer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path("lohan")
SETTINGS_NAME = "config.json"
"""File with the resolved settings."""
PATHS_OF_RANKS = "paths_of_ranks"
"""Key of an entry of `ssd` in `SETTINGS_NAME`: the path of each rank, if paths differ."""
SUMMARY_NAME = "summary.json"
"""File with the model, hardware, plan and figures of the whole run."""
PLAN_NAME, CORRECTED_PLAN_NAME = "plan.json", "plan_corrected.json"
"""Files with the plan from the first forward, and with the plan that was corrected after the first steps."""
STEPS_NAME = "steps.jsonl"
"""File with one line for each step. If a step has several lines, the last one counts."""
TRACE_NAME = "trace.json"
"""File with the trace in Chrome's JSON format, with `trace: true`."""
REPORT_NAME = "report.html"
PRIVATE_FOLDER = Path("_lohan")
"""Folder next to `lohan`. Pushes to the Hub leave out names that begin with an underscore."""
STORE_FOLDER = PRIVATE_FOLDER / "store"
"""Default folder of the store, relative to the output folder."""
_MOST_FOLDERS = 1000
"""Maximum number of folders that are searched for a run."""


@dataclass(frozen=True, slots=True)
class TracedTask:
    """One task of a trace. Times are relative to the beginning of the trace."""

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
    """Tasks of the trace. A step is a task of the lane "step", and its number is the task's name."""
    steps_of_others: tuple[tuple[Mapping[str, Any], ...], ...] = ()
    """The steps of the run's other ranks. Empty for one rank, and if this is the folder of a rank other than 0."""


def read_run(path: str | Path) -> RunData:
    """Read the run in an output folder or in a folder in it. Raises ValueError without a run or for a damaged file."""
    output_dir = output_folder(path, SUMMARY_NAME, STEPS_NAME)
    if output_dir is None:
        raise no_run_in(path, SUMMARY_NAME, STEPS_NAME)
    folder = output_dir / FOLDER
    steps = _read_steps(folder / STEPS_NAME)
    num_others = len(steps[-1].get("waited_s", ())) if steps else 0
    others = sorted((output_dir / PRIVATE_FOLDER).glob(f"rank-*-of-{1 + num_others}"))
    return RunData(
        output_dir=output_dir,
        config=_read_json(folder / SETTINGS_NAME),
        summary=_read_json(folder / SUMMARY_NAME),
        steps=steps,
        trace=_read_trace(folder / TRACE_NAME),
        steps_of_others=tuple(_read_steps(other / FOLDER / STEPS_NAME) for other in others),
    )


def _read_json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON ({error}); remove it for a report without it") from None
    if not isinstance(content, dict):
        raise ValueError(f"{file} has no JSON object; remove it for a report without it")
    return content


def _read_steps(file: Path) -> tuple[Mapping[str, Any], ...]:
    """Return the steps in order. A line that a killed run did not finish is left out."""
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
        raise ValueError(f"{file} is not the trace of a run; remove it for a report without it") from None


def _name_of(event: Mapping[str, Any]) -> str:
    """Return a task's name without its block, or a step's number."""
    args = event.get("args", {})
    if "step" in args:
        return str(args["step"])
    return str(event["name"]).removesuffix(f" {args.get('block')}")


def output_folder(given: str | Path, *names: str) -> Path | None:
    """Return the output folder for a path: the path itself, or the folder above `lohan`, `_lohan` or the store. Returns
    None if this folder has no file of `names`."""
    folder = Path(os.path.abspath(given))
    for inside in (Path(), FOLDER, PRIVATE_FOLDER, STORE_FOLDER):
        if folder.parts[len(folder.parts) - len(inside.parts) :] == inside.parts:
            run = folder.parents[len(inside.parts) - 1] if inside.parts else folder
            if any((run / FOLDER / name).is_file() for name in names):
                return run
    return None


def no_run_in(given: str | Path, *names: str) -> ValueError:
    """Return the error for a folder without a run. It names a run in a folder below, if any."""
    missing = " and no ".join(str(FOLDER / name) for name in names)
    problem = f"{str(given)!r} is not the output folder of an offloaded run (it has no {missing})"
    for number, (folder, below, _) in enumerate(os.walk(given)):
        if number == _MOST_FOLDERS:
            break
        below.sort()
        if number and output_folder(folder, *names) == Path(os.path.abspath(folder)):
            return ValueError(f"{problem}; give {folder!r}, which is one")
    return ValueError(f"{problem}; give the output_dir of an offloaded run")

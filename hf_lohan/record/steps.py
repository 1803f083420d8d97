"""Writes one JSON line for each step with its times, bytes and memory, and a trace of all tasks in Chrome's format."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hf_lohan.engine import OffloadEngine
from hf_lohan.files.directories import make_folders
from hf_lohan.planning.run_plan import RunPlan
from hf_lohan.report.run_data import STEPS_NAME, TRACE_NAME
from hf_lohan.timeline import COMPUTE_WAITS, LOADS_WAIT, UPDATES_WAIT, LaneTotals, Timeline, trace_events

logger = logging.getLogger(__name__)

_WAITS = (COMPUTE_WAITS, UPDATES_WAIT, LOADS_WAIT)
_LOGGED = ("loss", "grad_norm", "learning_rate", "eval_loss")
"""Values that Trainer logs after a step."""


@dataclass(frozen=True, slots=True)
class _Counts:
    lanes: Mapping[str, LaneTotals]
    ssd_read_bytes: int
    ssd_write_bytes: int
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """Bytes sent to other ranks, by lane, and also the bytes before encoding by a codec. Empty for one rank."""
    waited_s: Mapping[str, float] = field(default_factory=dict)
    """Seconds that this rank waited for each other rank. Empty for one rank."""
    experts: Mapping[str, int] = field(default_factory=dict)
    """The fields of `ExpertFigures`. Empty if experts are not streamed."""


class StepLines:
    """Appends a line after each step. A later line for the same step replaces the earlier line.

    A step lasts from the end of the previous step to its own end, so it includes logging, saving and evaluating
    (`between_s`). Updates that run during the next forward count for the next step. `after` in the last line has the
    updates that remain when training ends. `before` in the first line has the bytes moved before the first step.
    """

    def __init__(self, engine: OffloadEngine, plan: RunPlan | None) -> None:
        self._engine = engine
        self._plan = plan
        self._file: Path | None = None
        """The file of the lines. None before training, and after a failed write."""
        self._line: dict[str, Any] = {}
        self._is_written = True
        self._before: dict[str, Any] | None = None
        self._counts = self._count()
        self._ended_s = self._began_s = 0.0
        self._marks: list[tuple[int, float, float]] = []
        """(number, begin, end) of each step."""
        self._trace: Path | None = None

    def begin_run(self, folder: Path, step: int) -> None:
        """Begin with the line of the step after `step`."""
        self._file, self._line, self._is_written = folder / STEPS_NAME, {}, True
        self._trace = folder / TRACE_NAME if self._engine.timeline.is_tracing else None
        self._keep_lines_until(step)
        self._counts = self._count()
        self._before = _moved(self._counts, _Counts({}, 0, 0))
        self._ended_s = time.perf_counter()

    def begin_step(self) -> None:
        self.flush()
        self._began_s = time.perf_counter()

    def end_step(self, step: int, *, num_tokens: int, anon_rss_bytes: int) -> None:
        before, began_s = self._counts, self._ended_s
        self._engine.device.note_reached()
        self._counts, self._ended_s = self._count(), time.perf_counter()
        if self._engine.timeline.is_tracing:
            self._marks.append((step, began_s, self._ended_s))
        self._line = {
            "step": step,
            "ended_unix_s": round(time.time(), 3),
            "step_s": _rounded(self._ended_s - began_s),
            "between_s": _rounded(self._began_s - began_s),
            "num_tokens": num_tokens,
            **self._outcome(),
            **_moved(self._counts, before),
            **_lanes(self._counts, before),
            "anon_rss_bytes": anon_rss_bytes,
            **self._memory(),
        }
        if self._before is not None:
            self._line["before"], self._before = self._before, None
        self._is_written = False

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Record values that were logged for a finished step. Keys are the names that Trainer uses."""
        logged = {name: _number(values[name]) for name in _LOGGED if name in values}
        if not logged or self._line.get("step") != step:
            return
        self._line.update(logged)
        if self._is_written:
            self._append()

    def end_run(self) -> None:
        self._engine.device.note_reached()
        if self._line:
            after = self._count()
            left_s = _rounded(time.perf_counter() - self._ended_s)
            self._line["after"] = {"seconds": left_s, **_moved(after, self._counts), **_lanes(after, self._counts)}
            self._is_written = False
        self.flush()

    def flush(self) -> None:
        """Write the line of the last step, unless it is already written."""
        if not self._is_written:
            self._append()

    def write_trace(self) -> None:
        """Write the trace, if tasks are traced. Called when training has ended or failed."""
        if self._trace is not None:
            with contextlib.suppress(RuntimeError):  # after a device failure, the error that ended the run is reported
                self._engine.device.note_reached()
            _write_trace(self._trace, self._engine.timeline, self._marks)
            self._trace = None

    def _count(self) -> _Counts:
        io = self._engine.tiers.io
        sent = self._engine.tiers.codecs.figures()
        exact = {f"{name} uncoded": of_lane["exact_bytes"] for name, of_lane in sent.get("coded", {}).items()}
        totals = self._engine.timeline.totals()
        loader = self._engine.expert_loader
        experts = asdict(loader.figures) if loader is not None else {}
        sent_bytes, waited_s = {**sent.get("sent_bytes", {}), **exact}, sent.get("waited_s", {})
        return _Counts(totals, io.read_bytes, io.write_bytes, sent_bytes, waited_s, experts)

    def _outcome(self) -> dict[str, Any]:
        engine, plan, step = self._engine, self._plan, self._engine.last_step
        return {
            "forward_s": _rounded(engine.clock.last_forward_s),
            "backward_s": _rounded(engine.clock.last_backward_s),
            "predicted_step_s": _rounded(plan.plan.prediction.step_s) if plan is not None and plan.plan else None,
            "is_skipped": engine.step_was_skipped,
            "is_clipped": step is not None and step.clipped,
            "updates": step.applied if step is not None else None,
        }

    def _memory(self) -> dict[str, Any]:
        engine = self._engine
        pools = {pool.name: pool.high_water_bytes for pool in engine.tiers.pools}
        pools["activations"] = engine.activations.swapper.high_water_bytes
        pools["copies of records"] = engine.layout.resident_bytes
        device = device_memory(engine, self._plan)
        return {"device_slots_bytes": engine.peak_gpu_pool_bytes, **device, "cpu_pool_bytes": pools}

    def _append(self) -> None:
        self._is_written = True
        if self._file is None:
            return
        try:
            with self._file.open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(self._line, allow_nan=False) + "\n")
        except OSError as error:
            logger.warning("steps are no longer recorded: %s", error)
            self._file = None

    def _keep_lines_until(self, step: int) -> None:
        """Drop lines after `step`, because this run repeats these steps."""
        assert self._file is not None
        try:
            # Only a regular file is read, because reading a pipe would never end.
            lines = self._file.read_text(encoding="utf-8").splitlines() if self._file.is_file() else []
            kept = [line for line in lines if _step_of(line) <= step]
            fresh = self._file.with_name(f"{self._file.name}.new")
            make_folders(self._file.parent)
            fresh.unlink(missing_ok=True)
            with fresh.open("x", encoding="utf-8") as stream:
                stream.writelines(f"{line}\n" for line in kept)
            os.replace(fresh, self._file)
        except OSError as error:
            logger.warning("steps are not recorded: %s", error)
            self._file = None


def device_memory(engine: OffloadEngine, plan: RunPlan | None) -> dict[str, int]:
    """Return the peak of allocated bytes and the bytes that the plan expects, or {} if the device counts no bytes."""
    peak = engine.device.memory_peak()
    if peak is None:
        return {}
    planned = plan.plan.prediction.tier_bytes["gpu"].values() if plan is not None and plan.plan is not None else None
    return {
        "device_peak_allocated_bytes": peak.allocated_bytes,
        "device_peak_reserved_bytes": peak.reserved_bytes,
        **({"device_planned_bytes": sum(planned)} if planned is not None else {}),
    }


def _step_of(line: str) -> float:
    """Return the step of a line, or infinity for a line that a killed run did not finish."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, TypeError, KeyError):
        return math.inf


def _moved(now: _Counts, before: _Counts) -> dict[str, Any]:
    moved: dict[str, Any] = {
        name: getattr(now, name) - getattr(before, name) for name in ("ssd_read_bytes", "ssd_write_bytes")
    }
    if now.sent_bytes:
        moved["sent_bytes"] = {name: sent - before.sent_bytes.get(name, 0) for name, sent in now.sent_bytes.items()}
    if now.waited_s:
        moved["waited_s"] = {rank: _rounded(s - before.waited_s.get(rank, 0.0)) for rank, s in now.waited_s.items()}
    if now.experts:
        moved["experts"] = {name: number - before.experts.get(name, 0) for name, number in now.experts.items()}
    return moved


def _lanes(now: _Counts, before: _Counts) -> dict[str, Any]:
    """Return a dict from lane to its work since `before`. Idle lanes are left out."""
    lanes = {lane: (totals, before.lanes[lane]) for lane, totals in now.lanes.items()}
    return {
        "busy_s": {lane: _rounded(n.busy_s - b.busy_s) for lane, (n, b) in lanes.items() if n.busy_s > b.busy_s},
        "bytes": {lane: n.num_bytes - b.num_bytes for lane, (n, b) in lanes.items() if n.num_bytes > b.num_bytes},
        "waits_s": {
            lane: {
                cause: _rounded(seconds - lanes[lane][1].task_s.get(cause, 0.0))
                for cause, seconds in lanes[lane][0].task_s.items()
            }
            for lane in _WAITS
            if lanes[lane][0].task_s
        },
    }


def _rounded(seconds: float) -> float:
    return round(seconds, 6)


def _number(value: Any) -> float | None:
    """Return a finite number, or None, because JSON has neither NaN nor infinity."""
    number = float(value)
    return number if math.isfinite(number) else None


# The trace.


def _write_trace(path: Path, timeline: Timeline, steps: Iterable[tuple[int, float, float]]) -> None:
    """Write all tasks so far atomically, one event in each line. A failure only logs a warning."""
    events = trace_events(timeline.tasks, began_s=timeline.began_s, steps=steps)
    fresh = path.with_name(f"{path.name}.new")
    try:
        make_folders(path.parent)
        fresh.unlink(missing_ok=True)
        with fresh.open("x", encoding="utf-8") as stream:
            stream.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
            for number, event in enumerate(events):
                stream.write((",\n" if number else "") + json.dumps(event))
            stream.write("\n]}\n")
        os.replace(fresh, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # remove the incomplete trace, because the store may need the space
            fresh.unlink(missing_ok=True)
        logger.warning("cannot write the trace to %s: %s", path, error)
        return
    logger.info("wrote %d tasks to %s; open it in https://ui.perfetto.dev", len(timeline.tasks), path)

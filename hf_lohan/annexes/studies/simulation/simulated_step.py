"""Simulates a step of a plan.

The predicted step time (`costs`) adds up the work of each resource and takes the maximum. A simulation also knows when
each task can begin, so it finds how long resources wait for each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from hf_lohan.annexes.studies.simulation.lanes import NO_LANE, LaneRules
from hf_lohan.annexes.studies.simulation.step_tasks import (
    COMPUTE,
    CPU,
    D2H,
    H2D,
    HASH,
    SSD,
    MemoryChange,
    StepTasks,
    Tier,
)
from hf_lohan.costs.hardware_profile import HardwareProfile
from hf_lohan.costs.model_profile import ModelProfile
from hf_lohan.costs.offload_plan import OffloadPlan, TrainingSetup
from hf_lohan.costs.step.step_costs import SHARED_CORES_EFFICIENCY

_MANY_MICRO_BATCHES = 4
"""With at least this many micro-batches, one earlier step is enough to reach the state in the middle of a run."""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """Bytes over a step. Between `times_s[i]` and `times_s[i + 1]` there are `num_bytes[i]`."""

    times_s: npt.NDArray[np.float64]
    num_bytes: npt.NDArray[np.float64]

    @property
    def most_bytes(self) -> float:
        return float(self.num_bytes.max(initial=0.0))


@dataclass(frozen=True, kw_only=True, slots=True)
class SimulatedStep:
    """A step in the middle of a run."""

    step_s: float
    busy_s: Mapping[str, float]
    """Seconds of work of each lane. The lane "hash" verifies weights that were read."""
    waits_s: Mapping[str, float]
    """Maps the name of the awaited work to the seconds that computing waits for it."""
    memory: Mapping[Tier, MemoryCurve]


def simulate_step(
    model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan
) -> SimulatedStep | None:
    """Simulate a step of a plan. Returns None for several ranks, which share resources in other ways.

    If only some steps are committed, times and bytes are means over steps. If a guess of the norm may be wrong, the
    time of the repeated updates is added, multiplied by `clip_rate`.
    """
    if plan.prediction.ranks is not None:
        return None
    share = 1 / plan.commit_every_steps if plan.commit_every_steps else 0.0
    if 0 < share < 1:
        with_commit, without = (
            _simulate(model, hardware, replace(setup, commit_every_steps=steps), plan) for steps in (1, 0)
        )
        return replace(
            without,
            step_s=share * with_commit.step_s + (1 - share) * without.step_s,
            busy_s=_mean(with_commit.busy_s, without.busy_s, share),
            waits_s=_mean(with_commit.waits_s, without.waits_s, share),
        )
    return _simulate(model, hardware, replace(setup, commit_every_steps=plan.commit_every_steps), plan)


def _mean(one: Mapping[str, float], other: Mapping[str, float], share: float) -> dict[str, float]:
    names = sorted({*one, *other})
    return {name: share * one.get(name, 0.0) + (1 - share) * other.get(name, 0.0) for name in names}


def _simulate(model: ModelProfile, hardware: HardwareProfile, setup: TrainingSetup, plan: OffloadPlan) -> SimulatedStep:
    num_steps = 2 if setup.num_micro_batches >= _MANY_MICRO_BATCHES else 3
    tasks = StepTasks(model, hardware, setup, plan, num_steps)
    graph = tasks.graph
    begins, ends = graph.run(replace(lane_rules(hardware), looks_ahead=not tasks.is_coarse))
    began_s, ended_s = (ends[task] for task in tasks.ends[-2:])
    busy_s: dict[str, float] = defaultdict(float)
    waits_s: dict[str, float] = defaultdict(float)
    idle_since = began_s
    for task, lane in enumerate(graph.lanes):
        if graph.steps[task] != num_steps - 1 or lane == NO_LANE:
            continue
        busy_s[lane] += ends[task] - begins[task]
        if lane == COMPUTE:
            if begins[task] > idle_since:
                last = graph.last_before(task, ends)
                waits_s[graph.names[last] if last is not None else ""] += begins[task] - idle_since
            idle_since = max(idle_since, ends[task])
    step_s = ended_s - began_s
    if plan.clip == "speculate" and setup.clip_rate:
        step_s += setup.clip_rate * max(busy_s[SSD], busy_s[CPU])
    fixed = plan.prediction.tier_bytes
    fixed_bytes: dict[Tier, float] = {
        "device": fixed["gpu"]["slots"],
        "ram": fixed["cpu"]["buffers"] + fixed["cpu"]["records"],
    }
    return SimulatedStep(
        step_s=step_s,
        busy_s={lane: busy_s[lane] for lane in (COMPUTE, H2D, D2H, SSD, CPU, HASH) if busy_s[lane]},
        waits_s=dict(waits_s),
        memory={
            tier: _curve(
                [change for change in tasks.changes if change.tier == tier], begins, ends, began_s, ended_s, num_bytes
            )
            for tier, num_bytes in fixed_bytes.items()
        },
    )


def lane_rules(hardware: HardwareProfile) -> LaneRules:
    """Return the rules by which the lanes of a machine affect each other."""
    read_s, write_s = 1 / hardware.ssd_read_bytes_per_s, 1 / hardware.ssd_write_bytes_per_s
    mixed = hardware.ssd_mixed_bytes_per_s
    mixed_factor = max(2 / mixed, read_s, write_s) / (read_s + write_s) if mixed else 1.0
    both_ways = hardware.h2d_bytes_per_s + hardware.d2h_bytes_per_s
    duplex = hardware.duplex_bytes_per_s
    return LaneRules(
        shared=(COMPUTE, H2D, D2H, CPU, HASH) if hardware.device.shares_cpu else (),
        shared_efficiency=SHARED_CORES_EFFICIENCY,
        opposite={H2D: D2H, D2H: H2D},
        both_ways_factor=max(1.0, both_ways / duplex) if duplex and not hardware.device.shares_cpu else 1.0,
        mixed_lane=SSD,
        mixed_factor=mixed_factor,
    )


def _curve(
    changes: Sequence[MemoryChange],
    begins: Sequence[float],
    ends: Sequence[float],
    began_s: float,
    ended_s: float,
    fixed_bytes: float,
) -> MemoryCurve:
    at_s = np.array([ends[change.task] if change.at_end else begins[change.task] for change in changes])
    num_bytes = np.array([change.num_bytes for change in changes], dtype=np.float64)
    # Memory that is freed at some time can be taken at the same time, so frees are sorted first.
    order = np.lexsort((num_bytes, at_s)) if len(changes) else np.zeros(0, dtype=np.int64)
    at_s, sums = at_s[order], fixed_bytes + np.cumsum(num_bytes[order])
    inside = (at_s >= began_s) & (at_s <= ended_s)
    before = sums[at_s < began_s]
    first = float(before[-1]) if len(before) else fixed_bytes
    return MemoryCurve(
        np.concatenate([np.zeros(1), at_s[inside] - began_s]), np.concatenate([np.full(1, first), sums[inside]])
    )

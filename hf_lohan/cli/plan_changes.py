"""Finds changes that would make a planned run faster. Each changed run is planned."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from hf_lohan.cli.plan_ranks import divides_experts, gpu_links_of, loads_of_ranks
from hf_lohan.cli.plan_request import OtherMachine, PlannedRun, longest_row_of, plan_run, positions_of
from hf_lohan.costs import (
    BudgetError,
    HardwareProfile,
    better_hardware,
    drive_life,
    one_more_ssd,
    plan_offload,
    with_changed,
)
from hf_lohan.device import default_torch_device, device_for
from hf_lohan.hardware import MeasuringEffort
from hf_lohan.hardware.cpu_rates import optimizer_params_per_s
from hf_lohan.model import find_experts
from hf_lohan.optim import STOCHASTIC, MomentDtype
from hf_lohan.planning.studies import plan_studies
from hf_lohan.planning.wear import smaller_states
from hf_lohan.wording import format_bytes, states_setting

_WORTH_IT = 1.01
"""Smaller speedups are not printed."""
_MOST_TIMES_THE_BATCH = 256


@dataclass(frozen=True, slots=True)
class NearestChange:
    """A change of a run, and the plan of the changed run."""

    description: str
    planned: PlannedRun
    times_faster: float
    """Tokens per second with the change, divided by tokens per second without."""

    def to_mapping(self) -> dict[str, Any]:
        step = self.planned.plan.prediction
        return {
            "description": self.description,
            "step_s": step.step_s,
            "tokens_per_s": step.tokens_per_s,
            "times_faster": self.times_faster,
        }


def nearest_changes(planned: PlannedRun) -> list[NearestChange]:
    """Try more tokens per step, twice the RAM and one more drive. Return the changes that make the run faster. The best
    is first."""
    return _helpful(planned, _changed(planned))


def faster_parts(planned: PlannedRun) -> list[NearestChange]:
    """Try a faster CPU, a faster device and so on, as `nearest_changes` does. The layout stays, with its slots and
    buffers."""
    if not planned.plan.fits:
        return []
    better = better_hardware(planned.hardware, planned.setup)
    plans = ((what, on, setup, plan_offload(planned.profile, on, setup)) for what, on, setup in better)
    return _helpful(
        planned, ((what, replace(planned, hardware=on, setup=setup, plan=plan)) for what, on, setup, plan in plans)
    )


def _helpful(planned: PlannedRun, changed: Iterable[tuple[str, PlannedRun]]) -> list[NearestChange]:
    now = planned.plan.prediction.tokens_per_s
    changes = [
        NearestChange(description, other, other.plan.prediction.tokens_per_s / now)
        for description, other in changed
        if other.plan.fits
    ]
    helpful = [change for change in changes if change.times_faster >= _WORTH_IT]
    return sorted(helpful, key=lambda change: -change.times_faster)


def small_states(planned: PlannedRun) -> list[NearestChange]:
    """Return the run with each smaller form of AdamW's states that it may have. These forms round, so a run uses one
    only if the user sets it. On this machine, the rate of updates is measured for each form."""
    changes = []
    for form in smaller_states(planned.layout):
        settings: dict[str, Any] = {"optimizer_state_dtype": form}
        if form == STOCHASTIC:
            settings = {"optimizer_state_dtype": "auto", "stochastic_rounding": True}
        with suppress(BudgetError):
            changed = plan_run(planned.request, OtherMachine(_updating(planned, form), tuple(settings.items())))
            faster = changed.plan.prediction.tokens_per_s / planned.plan.prediction.tokens_per_s
            changes.append(NearestChange(f"{states_setting(form)} (rounds)", changed, faster))
    return [change for change in changes if change.planned.plan.fits]


def _updating(planned: PlannedRun, form: MomentDtype) -> HardwareProfile:
    """Return the profile with the rate of updates for this form. A profile that was read from a file keeps its rate."""
    if planned.request.hardware is not None:
        return planned.hardware
    device, effort = device_for(default_torch_device()), MeasuringEffort().within(planned.config)
    now, then = (
        optimizer_params_per_s(device, planned.dtype, numel=effort.update_numel, budget_s=0.3, moment_dtype=of)
        for of in (planned.config.moment_dtype, form)
    )
    cpu = with_changed(planned.hardware.cpu, lambda rate: rate * then / now, "optimizer_params_per_s")
    return replace(planned.hardware, cpu=cpu)


def plan_facts(planned: PlannedRun) -> dict[str, Any]:
    """Return the plan, the life of the drives and useful changes, in JSON's types."""
    step, life = planned.plan.prediction, drive_life(planned.hardware, planned.plan.prediction)
    longest, loads = longest_row_of(planned), loads_of_ranks(planned.plan, planned.profile, planned.setup)
    between = gpu_links_of(planned.plan, planned.hardware, planned.request.gpu_link)
    return {
        **planned.plan.to_mapping(),
        "solvers": [asdict(solved) for solved in planned.plan.solvers],
        **plan_studies().simulated_facts(planned),
        "longest_tokens": longest.num_tokens,
        "longest_tokens_is_longest_tried": longest.is_longest_tried,
        "positions_exceeded": positions_exceeded(planned),
        "times_slower_than_hidden": times_slower_than_hidden(planned),
        "drive_life": {"steps": life.steps, "tokens": life.tokens, "days": life.days} if life else None,
        "nearest_changes": [change.to_mapping() for change in nearest_changes(planned)] if step.fits else [],
        "small_states": [change.to_mapping() for change in small_states(planned)] if step.fits else [],
        **({} if loads is None else {"most_loaded_rank": loads}),
        **({} if between is None else {"gpu_links": asdict(between)}),
        **_expert_facts(planned),
    }


def with_other_experts(planned: PlannedRun) -> PlannedRun | None:
    """Return the plan with undivided experts if `experts.parallel: auto` divides them, or else with divided experts.
    None if the settings, the model or the budgets leave no choice."""
    config = planned.config
    is_open = planned.plan.prediction.ranks is not None and config.experts.parallel == config.experts.load == "auto"
    if not (is_open and find_experts(planned.model)):
        return None
    request = replace(planned.request, expert_parallel="none" if divides_experts(planned.plan) else "world")
    try:
        return plan_run(request, OtherMachine(planned.hardware))
    except BudgetError:
        return None


def _expert_facts(planned: PlannedRun) -> dict[str, Any]:
    other = with_other_experts(planned)
    if other is None:
        return {}
    ways = {divides_experts(way.plan): way.plan for way in (planned, other)}
    tried = {
        name: {"step_s": plan.prediction.step_s, "fits": plan.fits}
        for name, plan in (("none", ways[False]), ("world", ways[True]))
    }
    return {"expert_parallel": {"divides": divides_experts(planned.plan), "tried": tried}}


def row_tokens(planned: PlannedRun) -> int:
    """Return the number of tokens of a whole row, over all ranks that share it."""
    own_tokens, num_sharing = planned.shape.sequence_length, planned.config.ranks.per_row
    return (planned.request.sequence_length or own_tokens * num_sharing) if num_sharing > 1 else own_tokens


def positions_exceeded(planned: PlannedRun) -> int | None:
    """Return `max_position_embeddings` of the model's config if a row has more tokens, and None otherwise."""
    positions = positions_of(planned.model)
    return positions if positions is not None and row_tokens(planned) > positions else None


def times_slower_than_hidden(planned: PlannedRun) -> float:
    """Return the step time divided by the time of a step that never waits for the drives."""
    step = planned.plan.prediction
    return step.step_s / step.ssd_hidden_step_s


def tokens_at_once(planned: PlannedRun) -> int:
    """Return the number of tokens that are computed each time the weights are loaded."""
    return planned.plan.prediction.num_tokens // planned.plan.num_micro_batches


def _changed(planned: PlannedRun) -> Iterator[tuple[str, PlannedRun]]:
    request, hardware = planned.request, planned.hardware
    larger = _with_more_tokens(planned)
    if larger is not None:
        yield f"gradient_accumulation_steps={larger.request.num_micro_batches}", larger
    cpu = with_changed(hardware.cpu, lambda value: 2 * value, "memory_bytes")
    more_ram = OtherMachine(replace(hardware, cpu=cpu), ram_factor=2)
    yield f"twice the RAM ({format_bytes(cpu.memory_bytes)})", plan_run(request, more_ram)
    yield "one more SSD like the first", plan_run(request, OtherMachine(one_more_ssd(hardware)))


def _with_more_tokens(planned: PlannedRun) -> PlannedRun | None:
    """Return a plan with enough micro-batches to hide the drives, or else with as many as fit. None if no more fit."""
    enough = planned.plan.prediction.ssd_hides_from_tokens
    if enough is None or enough <= tokens_at_once(planned):
        return None
    request = planned.request
    factor = 2 ** math.ceil(math.log2(enough / tokens_at_once(planned)))
    factor = min(factor, _MOST_TIMES_THE_BATCH)
    while factor > 1:
        more = replace(request, num_micro_batches=factor * request.num_micro_batches)
        try:
            larger = plan_run(more, OtherMachine(planned.hardware))
        except BudgetError:
            return None
        if larger.plan.fits:
            return larger
        factor //= 2
    return None

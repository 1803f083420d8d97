"""Reports the bytes that a run writes to its drives, their part of the endurance, and the change that saves most."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from hf_lohan.costs import drive_life, written_bytes
from hf_lohan.costs.offload_plan import MOST_LOST_S
from hf_lohan.costs.record_traffic import FETCHED_KINDS
from hf_lohan.optim import ADAMW, STOCHASTIC, MomentDtype, master_format
from hf_lohan.optim.moments import MOMENT_CODECS
from hf_lohan.planning.layout import OffloadLayout
from hf_lohan.planning.step_plan import PlannedStep
from hf_lohan.wording import drive_bytes, format_bytes, percent, states_setting

_MUCH_WEAR = 0.1
_WORTH_SAYING = 0.95
"""A change is named if it leaves less than this part of the bytes."""


@dataclass(frozen=True, slots=True)
class Wear:
    words: str
    """About "this run", or about "1,000 steps" if the run's steps are not known."""
    is_much: bool
    """Whether it takes more than `_MUCH_WEAR` of the endurance of the drive that wears out first."""


def wear_of(planned: PlannedStep, num_steps: int | None) -> Wear:
    """Return the wear by ``num_steps`` steps like the planned step. Plans no other step, so it takes milliseconds."""
    steps, step = num_steps or 1000, planned.plan.prediction
    life = drive_life(planned.hardware, step)
    worn = steps / life.steps if life is not None else 0.0
    written = drive_bytes(steps * step.ssd_write_bytes_per_step)
    words = f"{'this run writes' if num_steps else '1,000 steps write'} {written} to the SSDs"
    words += f", {percent(worn)} of their endurance" if life is not None else ""
    change, left_bytes = min(_changes(planned, steps), key=lambda change: change[1])
    if left_bytes < _WORTH_SAYING * step.ssd_write_bytes_per_step:
        words += f"; with {change} the same tokens would write {drive_bytes(steps * left_bytes)}"
    return Wear(words, worn > _MUCH_WEAR)


def smaller_states(layout: OffloadLayout) -> list[MomentDtype]:
    """Return the smaller forms that AdamW's states may have. They round."""
    masters = [block.master for block in layout.blocks if block.state_numel]
    if not masters or any(master.rule != ADAMW for master in masters):
        return []
    forms: list[MomentDtype] = [*MOMENT_CODECS]
    has_bfloat16 = any(master.working_dtype == torch.bfloat16 for master in masters)
    smaller = forms[forms.index(masters[0].moment_dtype) + 1 :]
    return [form for form in smaller if form != STOCHASTIC or has_bfloat16]


def _changes(planned: PlannedStep, num_steps: int) -> Iterator[tuple[str, float]]:
    """Yield changes of a run of ``num_steps`` steps, and the bytes that each would write for the tokens of a step. The
    rest of the plan stays."""
    plan, setup, shape = planned.plan, planned.setup, planned.shape
    every = plan.commit_every_steps

    def left_bytes(**changes: Any) -> float:
        changed = replace(setup, **{"commit_every_steps": every, **changes})
        return written_bytes(planned.profile, planned.hardware, changed, plan)

    more = 2 * shape.num_micro_batches * shape.num_together
    yield f"gradient_accumulation_steps={more}", left_bytes(num_micro_batches=2 * setup.num_micro_batches) / 2
    rarely = min(num_steps, int(MOST_LOST_S / plan.prediction.step_s))
    if 0 < every < rarely:
        yield f"commit_every: {rarely}", left_bytes(commit_every_steps=rarely)
    more_bytes = setup.record_cpu_bytes + setup.cpu_memory_bytes
    twice = format_bytes(2 * setup.cpu_memory_bytes)
    yield f"twice the cpu_memory ({twice})", left_bytes(record_cpu_bytes=more_bytes)
    for form in smaller_states(planned.layout):
        trained = next(block.master for block in planned.layout.blocks if block.state_numel)
        smaller = master_format(trained.working_dtype, form).state_bytes_per_param / trained.state_bytes_per_param
        sizes = ("num_bytes", "read_bytes_per_step", "update_read_bytes")
        records = tuple(
            record
            if record.kind in FETCHED_KINDS
            else replace(record, **{name: int(smaller * getattr(record, name)) for name in sizes})  # type: ignore[arg-type]
            for record in setup.records
        )
        per_param = smaller * setup.state_bytes_per_param
        yield f"{states_setting(form)} (rounds)", left_bytes(state_bytes_per_param=per_param, records=records)

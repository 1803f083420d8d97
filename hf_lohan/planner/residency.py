"""Which records have a copy in RAM, as far as it decides how long a step is: those that save most reads for each byte.
(`record_choice` picks the very records for a given room.)"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hf_lohan.planner.model_profile import ModelProfile
from hf_lohan.planner.pool_plan import SizeClass
from hf_lohan.planner.step_costs import Values
from hf_lohan.planner.training_setup import TrainingSetup

PARAM = "param"
STATES = "states"
"""All records of a block beside `param`: they are read and written together."""


@dataclass(frozen=True, slots=True)
class ResidentRecord:
    """A block's records of one kind, and what need not be read from the SSDs with a copy in RAM."""

    block: str
    kind: str
    num_bytes: float
    fetched_bytes: float
    """Read for each forward and each backward."""
    update_read_bytes: float

    def saved_per_byte(self, num_micro_batches: int) -> float:
        """Bytes that a step does not move, for each byte of RAM."""
        return (2 * num_micro_batches * self.fetched_bytes + self.update_read_bytes) / self.num_bytes


def rank_records(model: ModelProfile, setup: TrainingSetup) -> list[ResidentRecord]:
    """All records, those first that save most. Weights come before states whatever the step is bound by, for in each
    phase a byte of them is read at least as often; so the first n are the best n, and only n is to be chosen."""
    records: list[ResidentRecord] = []
    for block in model.blocks:
        trainable_bytes = block.num_trainable_params * model.param_itemsize
        state_bytes = block.num_trainable_params * setup.state_bytes_per_param
        param = ResidentRecord(
            block=block.name,
            kind=PARAM,
            num_bytes=block.param_bytes,
            fetched_bytes=block.param_bytes,
            update_read_bytes=trainable_bytes if setup.update_reads_param else 0,
        )
        states = ResidentRecord(
            block=block.name,
            kind=STATES,
            num_bytes=state_bytes,
            fetched_bytes=0,
            update_read_bytes=state_bytes,
        )
        records += [record for record in (param, states) if record.num_bytes > 0]
    # Layers before the rest: an embedding larger than what is left must not keep them out. Sorting is stable, so layers
    # come in forward order: the first ones are what a step waits for.
    outside = {block.name for block in model.blocks if block.size_class is not SizeClass.LAYER}
    return sorted(
        records, key=lambda record: (-record.saved_per_byte(setup.num_micro_batches), record.block in outside)
    )


@dataclass(frozen=True, slots=True)
class ResidencyChoices:
    """The first 0, 1, 2, ... of the ranked records, as sums [num_choices]."""

    records: tuple[ResidentRecord, ...]
    num_bytes: Values
    fetched_bytes: Values
    update_read_bytes: Values


def residency_choices(model: ModelProfile, setup: TrainingSetup) -> ResidencyChoices:
    """All that fit `cpu_memory_bytes` beside the buffers, and `record_cpu_bytes`."""
    ranked = rank_records(model, setup) if setup.hold_resident_records else []
    room_bytes = setup.cpu_memory_bytes - setup.cpu_fixed_bytes
    if setup.record_cpu_bytes is not None:
        room_bytes = min(room_bytes, setup.record_cpu_bytes)
    num_fit = int(np.searchsorted(np.cumsum([record.num_bytes for record in ranked]), room_bytes, side="right"))
    records = tuple(ranked[:num_fit])
    return ResidencyChoices(
        records,
        *(
            np.concatenate([np.zeros(1), np.cumsum([getattr(record, field) for record in records], dtype=np.float64)])
            for field in ("num_bytes", "fetched_bytes", "update_read_bytes")
        ),
    )

"""What updates are built from: given once, by whoever wires the engine."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field

from hf_lohan.config import Schedule
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.model import Block, ParamSlice
from hf_lohan.ranks import StepAgreement
from hf_lohan.store import RecordFiles, Store
from hf_lohan.threads import Command
from hf_lohan.updates.means import GradientMeans, OwnGradients
from hf_lohan.updates.missed_steps import MissedSteps

GroupOf = Callable[[ParamSlice], Hashable]
"""A parameter's hyperparameters, as its block's rule has them."""
StepCounts = dict[ParamSlice, int]
"""How many optimizer steps each parameter has taken: torch's `step`. One without a gradient skips a step."""


@dataclass(frozen=True)
class UpdateSetup:
    """The parts that gradients and updates pass through."""

    device: Device
    blocks: Sequence[Block]
    """In forward order."""
    slices: Sequence[ParamSlice]
    """In the model's order, in which torch adds norms up."""
    group_of: GroupOf
    """Gives the present hyperparameters."""
    step_counts: StepCounts
    """Of all `slices`. Steps count them on the worker's thread."""
    schedule: Schedule
    holds_gradients: bool
    """Until the norm is known, unless it is guessed."""
    store: Store
    """If it has two homes it keeps its last commit until the next: what was written since can be undone."""
    states: BufferPool
    """Where chunks are updated."""
    gradients: BufferPool
    """Where gradients arrive, and are held. Updates after backward may borrow those that are free."""
    num_arrival_buffers: int
    """So many of them are never borrowed."""
    recall: BufferPool
    """Buffers for spilled gradients that come back. The worker must never wait for a buffer of the pool in which
    gradients arrive: it is who empties that one."""
    has_groups: Callable[[], bool] = lambda: True
    """Whether there are hyperparameters: before an optimizer is made nothing is guessed."""
    spilled_blocks: frozenset[str] = frozenset()
    """Their held gradients wait on the SSD, in `spill`, unless there is room in `shared_ram`."""
    num_held_chunks: int = 0
    """Of the other blocks. Never more are held in `gradients`."""
    shared_ram: HostStack | None = None
    """At its bottom lie swapped activations. What they leave, gradients may take as long as it lasts; None with several
    ranks, which read each other's gradients in buffers."""
    spill: RecordFiles | None = None
    keeps_gradient_dtypes: bool = False
    """One backward a step is to be expected. What it brings in 2 bytes an element is kept so, in half a buffer. Sums of
    it, where they come after all, are float32 and wait in what `open_spill_of_sums` opens."""
    open_spill_of_sums: Callable[[], RecordFiles] | None = None
    means: Callable[[Callable[[Command], None], Callable[[BaseException], None]], GradientMeans] = OwnGradients
    """Makes what makes gradients those of all ranks, given how to run something on the worker's thread, and whom to
    tell what went wrong elsewhere."""
    copies_new_weights: Device | None = None
    """To whoever needs their block: `device`, if None. Where that is host memory, the host copies them at once."""
    missed: MissedSteps = field(default_factory=lambda: MissedSteps((), ()))
    """Steps with gradients of zeros that chunks of the store take later; where nothing is said, none does."""
    agreement: StepAgreement | None = None
    """Of the ranks that train together; None where there is one."""

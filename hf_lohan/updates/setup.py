"""The parts that updates are built from: given once, when the engine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_lohan.config import Schedule
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.model import Block, ParamSlice
from hf_lohan.store import RecordFiles, Store
from hf_lohan.updates.missed_steps import GroupOf, MissedSteps, StepCounts


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
    """Of all `slices`. The worker's thread counts them up."""
    schedule: Schedule
    holds_gradients: bool
    """Gradients wait until the norm is known, or guessed."""
    store: Store
    """With two homes it keeps its last commit until the next one, so later writes can be undone."""
    states: BufferPool
    """Where chunks are updated."""
    gradients: BufferPool
    """Where gradients arrive, and are held. Updates after backward may borrow free ones."""
    num_arrival_buffers: int
    """So many of `gradients` are never borrowed."""
    recall: BufferPool
    """Buffers for spilled gradients that are read back. The worker must never wait for a buffer of `gradients`, because
    only the worker frees those."""
    has_groups: Callable[[], bool] = lambda: True
    """Whether there are hyperparameters: before an optimizer is made nothing is guessed."""
    spilled_blocks: frozenset[str] = frozenset()
    """Their held gradients wait on the SSD, in `spill`, unless there is room in `shared_ram`."""
    num_held_chunks: int = 0
    """Chunks of the other blocks. Never more are held in `gradients`."""
    shared_ram: HostStack | None = None
    """Activations use the bottom, held gradients the rest. None with several ranks, which read each other's gradients
    in buffers."""
    spill: RecordFiles | None = None
    keeps_gradient_dtypes: bool = False
    """One backward a step is expected. Its gradients of 2 bytes an element are kept as they are, in half a buffer. If
    they are summed after all, sums are float32 and wait in what `open_spill_of_sums` opens."""
    open_spill_of_sums: Callable[[], RecordFiles] | None = None
    copies_new_weights: Device | None = None
    """Copies new weights to the slot that waits for them: `device`, if None. Host memory gets them at once."""
    missed: MissedSteps = field(default_factory=lambda: MissedSteps((), ()))
    """Steps with gradients of zeros that chunks of the store take later. By default none does."""
    sums_stay_in_arrival_buffers: bool = False
    """Other ranks read sums there."""

"""The parts from which updates are built when the engine is made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from hf_lohan.config import Schedule
from hf_lohan.device import BufferPool, Device, HostStack
from hf_lohan.model import Block, Chunk, ParamSlice
from hf_lohan.store import RecordFiles, Store
from hf_lohan.updates.missed_steps import GroupOf, MissedSteps, StepCounts


@dataclass(frozen=True)
class UpdateSetup:
    """The parts through which gradients and updates pass."""

    device: Device
    blocks: Sequence[Block]
    """All blocks, in forward order."""
    chunks: Sequence[Chunk]
    """The chunks that this rank updates, in forward order."""
    slices: Sequence[ParamSlice]
    """All slices, in the model's order, in which torch adds norms."""
    group_of: GroupOf
    """Returns the current hyperparameters of a parameter."""
    step_counts: StepCounts
    """Step counts of all `slices`. The worker's thread increases them."""
    schedule: Schedule
    holds_gradients: bool
    """Whether gradients wait until the norm is known or guessed."""
    store: Store
    """With two versions of each record it keeps its last commit until the next commit, so writes can be undone."""
    states: BufferPool
    """Buffers in which chunks are updated."""
    gradients: BufferPool
    """Buffers in which gradients arrive and are held. Updates after backward may borrow free buffers."""
    num_arrival_buffers: int
    """Number of buffers of `gradients` that are never borrowed."""
    recall: BufferPool
    """Buffers for spilled gradients that are read back. The worker must never wait for a buffer of `gradients`, because
    only the worker frees these."""
    has_groups: Callable[[], bool] = lambda: True
    """Returns whether hyperparameters exist. Updates do not guess the norm before an optimizer exists."""
    spilled_blocks: frozenset[str] = frozenset()
    """Blocks whose held gradients wait on the SSD, in `spill`, unless `shared_ram` has room."""
    num_held_chunks: int = 0
    """Number of chunks of the other blocks. At most this number of gradients is held in `gradients`."""
    shared_ram: HostStack | None = None
    """RAM for activations (at the bottom) and held gradients (the rest). None with several ranks, because ranks read
    each other's gradients from buffers."""
    spill: RecordFiles | None = None
    keeps_gradient_dtypes: bool = False
    """Whether one backward per step is expected. Gradients of 2 bytes per element then keep their dtype, in half a
    buffer. If they are summed nevertheless, sums are float32 and wait in the files of `open_spill_of_sums`."""
    open_spill_of_sums: Callable[[], RecordFiles] | None = None
    copies_new_weights: Device | None = None
    """Device that copies new weights to the slot that waits for them. None is `device`. A CPU device copies to host
    memory immediately and not on a stream."""
    missed: MissedSteps = field(default_factory=lambda: MissedSteps((), ()))
    """Steps that chunks apply later, because their gradient was zero. By default no step is postponed."""
    on_device: BufferPool | None = None
    """Buffers in device memory in which devices sum gradients. None if all are summed on the host."""
    parked_share: float = 0.0
    """Fraction of the updates in backward that are postponed to the next forward. A plan may change it."""
    sums_stay_in_arrival_buffers: bool = False
    """Whether sums stay in arrival buffers, because other ranks read them there."""

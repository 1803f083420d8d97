"""Cut `gpu_memory` into slots and `cpu_memory` into buffers, once, before the first step; what is left of RAM is for
copies of records (`record_traffic`).

Host memory is paged: the host buffers of a pool have one size, that of a *chunk* of a record, so a budget is a number
of buffers and nothing fragments. Pools with fixed shares cannot starve one another, which rules deadlock out:

* staging buffers, through which parameters pass from the SSD to the device; larger ones where chunks are small because
  little of the model is trained;
* state buffers, in which the optimizer pipeline reads, updates and writes chunks;
* gradient buffers, in which gradients arrive, and stay where a step has to keep them (clipping, accumulation); one
  that stays in 2 bytes an element takes half a buffer;
* recall buffers, into which gradients that had to be spilled to the SSD come back, and in which they are summed where
  a step was not expected to sum any.

What RAM swapped activations leave serves gradients that have no buffers, too (`shared_ram`). Nobody ever waits for it.
Where each gradient comes once a step it may be all that they are held in: then the plan weighs it against copies.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hf_lohan.planner.cuts import num_chunks, units_between

MASTER_ITEMSIZE_BYTES = 4
"""Masters, moments and sums of gradients are float32 on the host: a chunk of C elements needs buffers of 4C bytes."""

WHOLE_UPDATE_BYTES, WHOLE_DEVICE_BYTES = 12, 8
"""For each element of a matrix that is updated whole: its float32 update, and that in bfloat16 before and after a round
of Newton-Schulz with two matrices that are no larger; the latter also on the device."""

MAX_CHUNK_NUMEL = 4 * 1024 * 1024
GOOD_CHUNK_NUMEL = 256 * 1024
MIN_CHUNK_NUMEL = 16 * 1024
NUM_PIPELINE_STAGES = 3
"""Chunks in the optimizer pipeline at once: one being read, one updated, one written (paper, Fig. 3b)."""

NUM_RECALL_BUFFERS = 2
"""Spilled gradients on their way back: one being read, one waiting for its update."""

MIN_SLOTS_TO_LEND = 3
"""With fewer, a slot that is lent to an update is missing to the layer that computes."""

MIN_EXPERT_SLOTS = 2
"""One computes, the next one comes."""
GOOD_EXPERT_SLOTS = 8
"""So many, where there is room when layers have theirs: while some compute others come, in reads that the drives take
together."""
EXPERT_SHARE = 8
"""More slots for experts take at most one part in so many of `gpu_memory`: what is in them when forward turns into
backward, or a recomputation into a layer's backward, is not loaded again, but kept activations save more."""

MIN_STAGING_BUFFERS = 2
GOOD_STAGING_BUFFERS = 6
GOOD_STAGING_BYTES = 4 << 20
"""Of a buffer: drives read pieces of this size about as fast as larger ones."""
STAGING_SHARE = 64
"""A staging buffer that is larger than a chunk takes at most one part in so many of `cpu_memory`."""


class BudgetError(ValueError):
    """A memory budget is too small for the model; the message has the numbers."""


class SizeClass(enum.Enum):
    """Which set of device slots a block streams through."""

    LAYER = "layer"
    EXPERT = "expert"
    OUTER = "outer"
    RESIDENT = "resident"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """The sizes of one block, as far as planning needs them."""

    name: str
    size_class: SizeClass
    param_bytes: int
    unit_numels: tuple[int, ...]
    """Sizes of the units that its records with states are made of (see `cut_units`), in order."""
    num_trainable_params: int
    cuts: tuple[int, ...] = ()
    """Elements at which another rank's part begins: no chunk goes across."""

    def num_chunks(self, chunk_numel: int) -> int:
        if not self.cuts:
            return num_chunks(self.unit_numels, chunk_numel)
        edges = (0, *self.cuts, sum(self.unit_numels))
        parts = (units_between(self.unit_numels, start, stop) for start, stop in pairwise(edges))
        return sum(num_chunks(part, chunk_numel) for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRequest:
    """What the pools must serve."""

    blocks: Sequence[BlockShape]
    gpu_memory_bytes: int
    cpu_memory_bytes: int
    prefetch_blocks: int
    num_state_buffers_per_chunk: int
    hold_gradients: bool
    halves_gradients: bool = False
    """Whether every gradient comes once a step, in 2 bytes an element, and stays so."""
    holds_in_buffers: bool = True
    """Whether those that are held may stay in the buffers in which they arrive; else each has to leave its own."""
    stages_params: bool = True
    """Whether parameters pass through host buffers on their way to the device; not if its memory is the host's."""
    min_chunk_numel: int = MIN_CHUNK_NUMEL
    """Chunks are this large or twice, four times, ... as large: whole granules."""
    whole_numel: int = 0
    """Elements of the largest parameter that its optimizer needs whole, in one chunk, with what lies in its unit."""
    multiplies_whole: bool = False  # on the device

    @property
    def least_chunk_numel(self) -> int:
        return max(self.min_chunk_numel, self.whole_numel)

    @property
    def whole_bytes(self) -> int:
        """What the update of such a parameter takes beside its buffers."""
        return self.whole_numel * WHOLE_UPDATE_BYTES

    @property
    def whole_device_bytes(self) -> int:
        """What it takes beside the slots."""
        return self.whole_numel * WHOLE_DEVICE_BYTES if self.stages_params and self.multiplies_whole else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Sizes of all pools. `held_blocks` keep their gradients in RAM; other blocks' gradients spill to the SSD."""

    chunk_numel: int
    num_staging_buffers: int
    num_state_buffers: int
    num_gradient_buffers: int
    num_arrival_buffers: int
    """Those of them in which gradients arrive; in the others they stay."""
    gradients_per_buffer: int
    """1, or 2 where each takes half a buffer."""
    num_recall_buffers: int
    held_blocks: tuple[str, ...]
    spilled_blocks: tuple[str, ...]
    slot_bytes: dict[SizeClass, int]
    num_slots: dict[SizeClass, int]
    num_expert_staging_buffers: int = 0
    """For weights of experts that are blocks of their own."""
    chunks_per_staging_buffer: int = 1
    """How many chunks of masters each of them is as large as."""
    whole_bytes: int = 0
    whole_device_bytes: int = 0
    """What optimizers that need parameters whole take beside the buffers, and beside the slots."""

    @property
    def buffer_bytes(self) -> int:
        """Of all but staging buffers."""
        return self.chunk_numel * MASTER_ITEMSIZE_BYTES

    @property
    def staging_buffer_bytes(self) -> int:
        return self.chunks_per_staging_buffer * self.buffer_bytes

    @property
    def cpu_pool_bytes(self) -> int:
        num_staging = self.num_staging_buffers + self.num_expert_staging_buffers
        num_buffers = self.num_gradient_buffers + self.num_state_buffers + self.num_recall_buffers
        return num_staging * self.staging_buffer_bytes + num_buffers * self.buffer_bytes + self.whole_bytes

    @property
    def gpu_pool_bytes(self) -> int:
        slots_bytes = sum(self.slot_bytes[size_class] * count for size_class, count in self.num_slots.items())
        return slots_bytes + self.whole_device_bytes

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        by_class = {name: {c.value: n for c, n in getattr(self, name).items()} for name in ("slot_bytes", "num_slots")}
        blocks = {name: list(getattr(self, name)) for name in ("held_blocks", "spilled_blocks")}
        return {**asdict(self), **by_class, **blocks}


def plan_pools(request: PoolRequest) -> PoolPlan:
    """Choose chunk size, pool sizes and slots for the budgets. Raises BudgetError where they cannot serve."""
    slot_bytes, num_slots = _plan_slots(request)
    _check_cpu_memory(request, two_blocks_bytes=2 * max(slot_bytes[SizeClass.LAYER], slot_bytes[SizeClass.EXPERT]))
    chunk_numel = _choose_chunk_numel(request)
    num_staging, num_state, num_arrival, num_recall = least = _least_buffers(request, chunk_numel)
    spare_bytes = request.cpu_memory_bytes - request.whole_bytes
    spare = spare_bytes // (chunk_numel * MASTER_ITEMSIZE_BYTES) - sum(least)
    per_staging = _chunks_per_staging_buffer(request, chunk_numel, num_staging, spare)
    spare -= num_staging * (per_staging - 1)
    more_staging = min(spare // per_staging, GOOD_STAGING_BUFFERS - MIN_STAGING_BUFFERS) if request.stages_params else 0
    num_of_experts = MIN_STAGING_BUFFERS if num_staging > MIN_STAGING_BUFFERS else 0
    per_buffer = 2 if request.halves_gradients else 1
    num_places = per_buffer * (num_arrival + spare - more_staging * per_staging)
    num_to_hold = num_places - num_arrival if request.holds_in_buffers else 0
    held, spilled, num_held = _choose_held(request, chunk_numel, num_to_hold)
    is_recalled = spilled or (held and request.halves_gradients)
    return PoolPlan(
        chunk_numel=chunk_numel,
        num_staging_buffers=num_staging - num_of_experts + more_staging,
        num_expert_staging_buffers=num_of_experts,
        chunks_per_staging_buffer=per_staging,
        num_state_buffers=num_state,
        # Never fewer than arriving gradients need that are sums after all, and come in float32.
        num_gradient_buffers=max(num_arrival, -(-(num_arrival + num_held) // per_buffer)),
        num_arrival_buffers=-(-num_arrival // per_buffer),
        gradients_per_buffer=per_buffer,
        num_recall_buffers=num_recall if is_recalled else 0,
        held_blocks=held,
        spilled_blocks=spilled,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        whole_bytes=request.whole_bytes,
        whole_device_bytes=request.whole_device_bytes,
    )


def _plan_slots(request: PoolRequest) -> tuple[dict[SizeClass, int], dict[SizeClass, int]]:
    def sizes(size_class: SizeClass) -> list[int]:
        return [block.param_bytes for block in request.blocks if block.size_class is size_class]

    slot_bytes = {size_class: max(sizes(size_class), default=0) for size_class in SizeClass}
    num_layers, num_outer = len(sizes(SizeClass.LAYER)), len(sizes(SizeClass.OUTER))
    num_experts = len(sizes(SizeClass.EXPERT))
    num_slots = {
        SizeClass.LAYER: min(2, num_layers),
        SizeClass.EXPERT: min(MIN_EXPERT_SLOTS, num_experts),
        SizeClass.OUTER: min(1, num_outer),
        SizeClass.RESIDENT: len(sizes(SizeClass.RESIDENT)),
    }
    minimum = sum(slot_bytes[size_class] * num_slots[size_class] for size_class in SizeClass)
    minimum += request.whole_device_bytes
    if minimum > request.gpu_memory_bytes:
        raise BudgetError(
            f"gpu_memory of {request.gpu_memory_bytes} bytes is smaller than two blocks of this model "
            f"({num_slots[SizeClass.LAYER]} x {slot_bytes[SizeClass.LAYER]} bytes"
            f"{_expert_slots(slot_bytes, num_slots)}) and the embeddings or head ({slot_bytes[SizeClass.OUTER]} "
            f"bytes) that must be there with them; set gpu_memory to at least {minimum}"
        )
    spare = request.gpu_memory_bytes - minimum
    if slot_bytes[SizeClass.LAYER]:
        wanted = min(1 + request.prefetch_blocks, num_layers) - num_slots[SizeClass.LAYER]
        more = max(0, min(wanted, spare // slot_bytes[SizeClass.LAYER]))
        num_slots[SizeClass.LAYER] += more
        spare -= more * slot_bytes[SizeClass.LAYER]
    if slot_bytes[SizeClass.EXPERT]:
        wanted = min(GOOD_EXPERT_SLOTS, num_experts) - num_slots[SizeClass.EXPERT]
        more = max(0, min(wanted, spare // slot_bytes[SizeClass.EXPERT]))
        num_slots[SizeClass.EXPERT] += more
        spare -= more * slot_bytes[SizeClass.EXPERT]
    if slot_bytes[SizeClass.OUTER]:
        more = min(num_outer - 1, spare // slot_bytes[SizeClass.OUTER])
        num_slots[SizeClass.OUTER] += more
        spare -= more * slot_bytes[SizeClass.OUTER]
    if slot_bytes[SizeClass.EXPERT]:
        worth = min(num_experts, request.gpu_memory_bytes // EXPERT_SHARE // slot_bytes[SizeClass.EXPERT])
        more = min(worth - num_slots[SizeClass.EXPERT], spare // slot_bytes[SizeClass.EXPERT])
        num_slots[SizeClass.EXPERT] += max(0, more)
    return slot_bytes, num_slots


def _expert_slots(slot_bytes: dict[SizeClass, int], num_slots: dict[SizeClass, int]) -> str:
    number = num_slots[SizeClass.EXPERT]
    return f", and {number} x {slot_bytes[SizeClass.EXPERT]} bytes for experts" if number else ""


def _check_cpu_memory(request: PoolRequest, *, two_blocks_bytes: int) -> None:
    buffers_bytes = _minimum_bytes(request, request.least_chunk_numel)
    needed = max(two_blocks_bytes, buffers_bytes)
    if request.cpu_memory_bytes >= needed:
        return
    why = "is too small for the staging, optimizer and gradient buffers"
    if request.cpu_memory_bytes < two_blocks_bytes:
        why = f"is smaller than two blocks of this model ({two_blocks_bytes} bytes)"
    elif request.whole_numel > request.min_chunk_numel:
        why += f", each for a whole matrix of {request.whole_numel} elements, as the optimizer needs it"
    raise BudgetError(f"cpu_memory of {request.cpu_memory_bytes} bytes {why}; set cpu_memory to at least {needed}")


def _choose_chunk_numel(request: PoolRequest) -> int:
    """The largest chunk whose minimal pools fit the budget; larger than the largest record would only waste memory."""
    largest = max(sum(block.unit_numels) for block in request.blocks)
    least = request.least_chunk_numel
    chunk_numel = max(MAX_CHUNK_NUMEL, least)
    while chunk_numel > least and chunk_numel // 2 >= largest:
        chunk_numel = max(chunk_numel // 2, least)
    # Half of the budget for what must be there leaves the other half to hold gradients; small chunks cost more I/O
    # calls than that is worth, and are taken only where nothing larger fits.
    good = max(GOOD_CHUNK_NUMEL, least)
    while chunk_numel > good and 2 * _minimum_bytes(request, chunk_numel) > request.cpu_memory_bytes:
        chunk_numel = max(chunk_numel // 2, least)
    while chunk_numel > least and _minimum_bytes(request, chunk_numel) > request.cpu_memory_bytes:
        chunk_numel = max(chunk_numel // 2, least)
    return _even_for_experts(request, chunk_numel)


def _even_for_experts(request: PoolRequest, chunk_numel: int) -> int:
    """Where experts are most of the model: a chunk no larger that cuts one into equal parts. A chunk holds no more than
    one block, so the last of an expert would leave most of its buffers empty."""
    all_numel = sum(sum(block.unit_numels) for block in request.blocks)
    experts = [sum(block.unit_numels) for block in request.blocks if block.size_class is SizeClass.EXPERT]
    if 2 * sum(experts) <= all_numel:
        return chunk_numel
    num_chunks, granule = -(-max(experts) // chunk_numel), request.min_chunk_numel
    even_numel = -(-max(experts) // num_chunks // granule) * granule
    return max(even_numel, min(chunk_numel, max(GOOD_CHUNK_NUMEL, request.least_chunk_numel)))


def _chunks_per_staging_buffer(request: PoolRequest, chunk_numel: int, num_staging: int, spare: int) -> int:
    """More than one where it is the largest record with states that bounds chunks, because little of the model is
    trained: weights come all the same. A buffer is then at most half as large as a block, for others come while one is
    copied. ``spare``: the buffers of a chunk's size that nothing needs."""
    if chunk_numel < max(sum(block.unit_numels) for block in request.blocks):
        return 1
    largest_bytes = max(block.param_bytes for block in request.blocks)
    most_bytes = min(GOOD_STAGING_BYTES, largest_bytes // 2, request.cpu_memory_bytes // STAGING_SHARE)
    per_buffer = 1
    while 2 * per_buffer * chunk_numel * MASTER_ITEMSIZE_BYTES <= most_bytes:
        if num_staging * (2 * per_buffer - 1) > spare:
            break
        per_buffer *= 2
    return per_buffer


def _minimum_bytes(request: PoolRequest, chunk_numel: int) -> int:
    num_buffers = sum(_least_buffers(request, chunk_numel))
    return num_buffers * chunk_numel * MASTER_ITEMSIZE_BYTES + request.whole_bytes


def _least_buffers(request: PoolRequest, chunk_numel: int) -> tuple[int, int, int, int]:
    """For staging, states, arriving gradients and recalled ones."""
    num_lanes = 1 + any(block.size_class is SizeClass.EXPERT for block in request.blocks)
    return (
        num_lanes * MIN_STAGING_BUFFERS if request.stages_params else 0,
        NUM_PIPELINE_STAGES * request.num_state_buffers_per_chunk,
        _num_arrival_buffers(request, chunk_numel),
        NUM_RECALL_BUFFERS if request.hold_gradients else 0,
    )


def _num_arrival_buffers(request: PoolRequest, chunk_numel: int) -> int:
    """Gradients that must find room while others are held, to make progress certain.

    A parameter fills all chunks inside it at once; only the chunks it shares with its neighbours wait for them. So a
    block keeps at most (parameters + 1) chunks waiting, and two more travel: one arriving, one in the pipeline. The
    pipeline never waits for a buffer of this pool, so whatever has arrived can always be worked off.

    The same holds of halves, where each gradient takes one: these and the held ones are no more than the pool has, and
    where one is given back another fits, whichever buffer it is half of. Should gradients come in float32 then (those
    of micro-batches that ran together), each needs a whole buffer. No held half is in the way: such a step holds
    nothing in RAM, as it has to begin with them, and what the step before holds the pipeline works off. Where only
    some gradients stay in 2 bytes, each has the room of a whole buffer, so that halves can keep none from the others.
    """
    return 2 + max(min(block.num_chunks(chunk_numel), block.num_trainable_params + 1) for block in request.blocks)


def _choose_held(
    request: PoolRequest, chunk_numel: int, num_places: int
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Blocks whose gradients stay in RAM: the first of the model, whose gradients arrive last."""
    held: list[str] = []
    spilled: list[str] = []
    num_held = 0
    for block in request.blocks:
        num_chunks = block.num_chunks(chunk_numel)
        if not request.hold_gradients or num_chunks == 0:
            continue
        if not spilled and num_held + num_chunks <= num_places:
            held.append(block.name)
            num_held += num_chunks
        else:
            spilled.append(block.name)
    return tuple(held), tuple(spilled), num_held

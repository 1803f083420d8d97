"""Divides `gpu_memory` into slots and `cpu_memory` into buffers, once, before the first step. The rest of RAM is for
copies of records (`record_traffic`).

All buffers of a pool have the size of a *chunk* of a record, so a budget is a number of buffers, and memory does not
fragment. Pools have fixed shares and cannot starve each other, so no deadlock is possible. The pools are

* staging buffers, which pass parameters from the SSD to the device. They are larger than a chunk if chunks are small
  because little of the model is trained;
* state buffers, in which the optimizer pipeline reads, updates and writes chunks;
* gradient buffers, in which gradients arrive, and stay if a step holds them (clipping, accumulation). A held gradient
  of 2 bytes per element takes half a buffer;
* recall buffers, to which spilled gradients return from the SSD, and in which they are summed if a step sums
  unexpectedly.

RAM that swapped activations do not use also holds gradients, without buffers of a pool (`search/candidate_memory`).
Nothing ever waits for this RAM. If each gradient arrives once per step, this RAM may hold all gradients. The plan then
chooses between held gradients and copies of records.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from hf_lohan.costs.cuts import num_chunks, units_between

MASTER_ITEMSIZE_BYTES = 4
"""Masters, moments and sums of gradients are float32 on the host, so a chunk of C elements needs buffers of 4C
bytes."""

WHOLE_UPDATE_BYTES, WHOLE_DEVICE_BYTES = 12, 8
"""Bytes for each element of a matrix that is updated whole, on the host and on the device. They are the float32 update
(host only), and four bfloat16 matrices of a round of Newton-Schulz."""

DECODING_BYTES_PER_CODE = 14
"""Device memory for each byte of codes that is decoded: the byte, its index, two float32 values, and some scales."""

ADDED_SHARE = 8
"""Gradients that devices add, and codes that they decode, take at most 1 / `ADDED_SHARE` of `gpu_memory` if chunks can
be small enough."""
LINK_TILE_NUMEL = 1 << 20
"""Number of elements of a gradient that a device widens and adds at once."""

MAX_CHUNK_NUMEL = 4 * 1024 * 1024
GOOD_CHUNK_NUMEL = 256 * 1024
MIN_CHUNK_NUMEL = 16 * 1024
NUM_PIPELINE_STAGES = 3
"""Chunks in the optimizer pipeline at the same time. One is read, one is updated, and one is written (paper, Fig.
3b)."""

NUM_RECALL_BUFFERS = 2
"""Buffers for spilled gradients. One gradient is read while another waits for its update."""

MIN_SLOTS_TO_LEND = 3
"""With fewer slots, an update would borrow a slot that the computing layer needs."""

MIN_EXPERT_SLOTS = 2
"""One expert computes while the next expert is loaded."""
GOOD_EXPERT_SLOTS = 8
"""Slots of experts if layers leave room. While some experts compute, others are read together."""
EXPERT_SHARE = 8
"""Slots beyond `GOOD_EXPERT_SLOTS` take at most 1 / `EXPERT_SHARE` of `gpu_memory`. They save loads when the backward
of the model or of a layer begins. But kept activations save more time, so they get the rest."""

MIN_STAGING_BUFFERS = 2
GOOD_STAGING_BUFFERS = 6
GOOD_STAGING_BYTES = 4 << 20
"""Wanted size of a buffer. Drives read pieces of this size about as fast as larger pieces."""
ROWS_GRANULES = 8
"""Number of granules of an embedding table that are read at once, to get some of its rows."""
STAGING_SHARE = 64
"""A staging buffer larger than a chunk takes at most 1 / `STAGING_SHARE` of `cpu_memory`."""


SLOTS_TENTHS = 8
"""Tenths of the device's memory that `gpu_memory: auto` allows for slots and kept activations."""


class BudgetError(ValueError):
    """A memory budget is too small for the model. The message says how large it must be."""


class SizeClass(enum.Enum):
    """The set of device slots through which a block streams."""

    LAYER = "layer"
    EXPERT = "expert"
    OUTER = "outer"
    ROWS = "rows"
    """Only rows of the block are loaded, so it has no slots."""
    RESIDENT = "resident"


@dataclass(frozen=True, kw_only=True, slots=True)
class BlockShape:
    """Sizes of one block, for planning."""

    name: str
    size_class: SizeClass
    param_bytes: int
    unit_numels: tuple[int, ...]
    """Numbers of elements of the units (`cut_units`) of the block's trained part, in order."""
    num_trainable_params: int
    cuts: tuple[int, ...] = ()
    """Elements at which another rank's shard begins. No chunk crosses them."""
    codes_bytes: int = 0
    scales_bytes: int = 0
    """Sizes of the records of packed weights, which are not among the stored parameters."""
    stored_param_bytes: int | None = None
    """Size of the record of parameters that are not packed. None if no parameter is packed."""

    @property
    def fetched_bytes(self) -> dict[str, int]:
        """Sizes of the records that a pass reads, by kind."""
        if self.stored_param_bytes is None:
            return {"param": self.param_bytes}
        sizes = {"param": self.stored_param_bytes, "codes": self.codes_bytes, "scales": self.scales_bytes}
        return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes}

    def num_chunks(self, chunk_numel: int) -> int:
        if not self.cuts:
            return num_chunks(self.unit_numels, chunk_numel)
        edges = (0, *self.cuts, sum(self.unit_numels))
        parts = (units_between(self.unit_numels, start, stop) for start, stop in pairwise(edges))
        return sum(num_chunks(part, chunk_numel) for part in parts)


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolRequest:
    """The input of `plan_pools`."""

    blocks: Sequence[BlockShape]
    gpu_memory_bytes: int
    device_memory_bytes: int | None = None
    """The setting `device_memory`, which includes `gpu_memory_bytes`; None for "auto"."""
    cpu_memory_bytes: int
    prefetch_blocks: int
    num_state_buffers_per_chunk: int
    hold_gradients: bool
    halves_gradients: bool = False
    """Whether every gradient arrives once per step, and is held in 2 bytes per element."""
    holds_in_buffers: bool = True
    """Whether held gradients may stay in the buffers in which they arrive."""
    stages_params: bool = True
    """Whether parameters pass through host buffers to the device. False if its memory is the host's."""
    stages_codes: bool = False
    """Whether packed weights pass through host buffers, and are decoded from there."""
    coded_block_bytes: int = 0
    """Bytes of the largest payload in which a block is sent to the device. 0 if blocks are sent unchanged."""
    coded_gradient_bytes: float = 0.0
    """Bytes of an element of a gradient that is coded on the device. 0 if gradients are not coded."""
    min_chunk_numel: int = MIN_CHUNK_NUMEL
    """Size of the smallest chunks, in whole granules. Larger chunks are 2, 4, ... times as large."""
    whole_numel: int = 0
    """Elements of the largest unit whose parameter the optimizer needs whole, that is, in one chunk."""
    multiplies_whole: bool = False
    """Whether the update of a whole parameter multiplies matrices on the device."""
    rows_granule_bytes: int = 0
    """Bytes of the largest granule of a block of which only rows are loaded. 0 without such a block."""
    num_rows_buffers: int = 1
    """Number of host buffers for these rows."""
    lent_expert_bytes: int = 0
    """Bytes of the largest expert that ranks of a node lend each other. 0 if they lend no experts."""
    num_adding_devices: int = 1
    """Number of devices that send each other gradients, and add them. 1 if gradients are added on the host. With
    several nodes it is one more, for memory in which a sum waits for another node."""

    @property
    def rows_buffer_bytes(self) -> int:
        """Bytes of a host buffer for rows."""
        return ROWS_GRANULES * self.rows_granule_bytes

    @property
    def rows_bytes(self) -> int:
        """RAM for rows."""
        return self.num_rows_buffers * self.rows_buffer_bytes

    @property
    def least_chunk_numel(self) -> int:
        return max(self.min_chunk_numel, self.whole_numel)

    @property
    def is_staged(self) -> bool:
        """Whether anything passes through staging buffers."""
        return self.stages_params or self.stages_codes

    def unpacking_bytes(self, staging_buffer_bytes: int) -> int:
        """Return the device memory in which weights are decoded. It has the scales of a block. If device memory is not
        host memory, it also has the codes of a staging buffer, with their indices and float32 values. Each kind of
        loader has its own."""
        if not self.stages_codes:
            return 0
        largest_bytes = max(block.scales_bytes for block in self.blocks)
        num_lanes = 1 + any(block.size_class is SizeClass.EXPERT for block in self.blocks)
        of_codes = DECODING_BYTES_PER_CODE * staging_buffer_bytes if self.stages_params else 0
        return num_lanes * (largest_bytes + of_codes)

    def payload_bytes(self, chunk_numel: int) -> int:
        """Return the device memory for payloads of the link, and for gradients that devices add. There is a payload for
        the gradient of one chunk and, if device memory is not host memory, of one block. If device memory is not
        host memory, there is also memory for an expert of another rank, and for a gradient that waits to be added."""
        block_bytes = self.coded_block_bytes + 2 * self.lent_expert_bytes if self.stages_params else 0
        return block_bytes + math.ceil(self.coded_gradient_bytes * chunk_numel) + self.added_bytes(chunk_numel)

    def added_bytes(self, chunk_numel: int) -> int:
        """Return the device memory for gradients that devices add: arriving gradients, gradients of other devices, and
        their sum."""
        if self.num_adding_devices == 1:
            return 0
        num_buffers = _num_arrival_buffers(self, chunk_numel) + self.num_adding_devices
        return MASTER_ITEMSIZE_BYTES * (num_buffers * chunk_numel + min(chunk_numel, LINK_TILE_NUMEL))

    @property
    def whole_bytes(self) -> int:
        """RAM for the update of a parameter that the optimizer needs whole, in addition to its buffers."""
        return self.whole_numel * WHOLE_UPDATE_BYTES

    @property
    def whole_device_bytes(self) -> int:
        """Device memory for the update of a parameter that the optimizer needs whole, in addition to the slots."""
        return self.whole_numel * WHOLE_DEVICE_BYTES if self.stages_params and self.multiplies_whole else 0


@dataclass(frozen=True, kw_only=True, slots=True)
class PoolPlan:
    """Sizes of all pools. RAM holds the gradients of `held_blocks`. Other blocks' gradients spill to the SSD."""

    chunk_numel: int
    num_staging_buffers: int
    num_state_buffers: int
    num_gradient_buffers: int
    num_arrival_buffers: int
    """Number of gradient buffers in which gradients arrive. The other gradient buffers hold gradients."""
    gradients_per_buffer: int
    """2 if each gradient takes half a buffer; otherwise 1."""
    num_recall_buffers: int
    held_blocks: tuple[str, ...]
    spilled_blocks: tuple[str, ...]
    slot_bytes: dict[SizeClass, int]
    num_slots: dict[SizeClass, int]
    num_expert_staging_buffers: int = 0
    """Staging buffers for weights of streamed experts."""
    chunks_per_staging_buffer: int = 1
    """Size of a staging buffer in chunks."""
    whole_bytes: int = 0
    whole_device_bytes: int = 0
    """Memory for updates of whole parameters: RAM besides the buffers, and device memory besides the slots."""
    unpacking_bytes: int = 0
    """Device memory in which packed weights are decoded and gradients are added, and for payloads of a link with
    codecs."""
    rows_buffer_bytes: int = 0
    rows_bytes: int = 0
    """Bytes of one host buffer for rows of a table, and of all these buffers."""

    @property
    def buffer_bytes(self) -> int:
        """Bytes of every buffer except staging buffers."""
        return self.chunk_numel * MASTER_ITEMSIZE_BYTES

    @property
    def staging_buffer_bytes(self) -> int:
        return self.chunks_per_staging_buffer * self.buffer_bytes

    @property
    def cpu_pool_bytes(self) -> int:
        num_staging = self.num_staging_buffers + self.num_expert_staging_buffers
        num_buffers = self.num_gradient_buffers + self.num_state_buffers + self.num_recall_buffers
        fixed_bytes = self.whole_bytes + self.rows_bytes
        return num_staging * self.staging_buffer_bytes + num_buffers * self.buffer_bytes + fixed_bytes

    @property
    def gpu_pool_bytes(self) -> int:
        slots_bytes = sum(self.slot_bytes[size_class] * count for size_class, count in self.num_slots.items())
        return slots_bytes + self.whole_device_bytes + self.unpacking_bytes

    def to_mapping(self) -> dict[str, Any]:
        """Return the plan for JSON."""
        by_class = {name: {c.value: n for c, n in getattr(self, name).items()} for name in ("slot_bytes", "num_slots")}
        blocks = {name: list(getattr(self, name)) for name in ("held_blocks", "spilled_blocks")}
        return {**asdict(self), **by_class, **blocks}


def plan_pools(request: PoolRequest) -> PoolPlan:
    """Choose chunk size, pool sizes and slots for the budgets. Raises BudgetError if a budget is too small."""
    chunk_numel = _choose_chunk_numel(request)
    slot_bytes, _ = _least_slots(request)
    _check_gpu_memory(request, chunk_numel)
    _check_cpu_memory(request, two_blocks_bytes=2 * max(slot_bytes[SizeClass.LAYER], slot_bytes[SizeClass.EXPERT]))
    num_staging, num_state, num_arrival, num_recall = least = _least_buffers(request, chunk_numel)
    spare_bytes = request.cpu_memory_bytes - request.whole_bytes - request.rows_bytes
    spare = spare_bytes // (chunk_numel * MASTER_ITEMSIZE_BYTES) - sum(least)
    per_staging = _chunks_per_staging_buffer(request, chunk_numel, num_staging, spare)
    num_slots = _plan_slots(request, _least_gpu_bytes(request, chunk_numel, per_staging))
    spare -= num_staging * (per_staging - 1)
    more_staging = min(spare // per_staging, GOOD_STAGING_BUFFERS - MIN_STAGING_BUFFERS) if request.is_staged else 0
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
        # This is enough for gradients that arrive unexpectedly as float32 sums.
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
        unpacking_bytes=request.unpacking_bytes(per_staging * chunk_numel * MASTER_ITEMSIZE_BYTES)
        + request.payload_bytes(chunk_numel),
        rows_buffer_bytes=request.rows_buffer_bytes,
        rows_bytes=request.rows_bytes,
    )


def _num_blocks(request: PoolRequest, size_class: SizeClass) -> int:
    return sum(block.size_class is size_class for block in request.blocks)


def _least_slots(request: PoolRequest) -> tuple[dict[SizeClass, int], dict[SizeClass, int]]:
    """Return the bytes of a slot and the minimum number of slots, by size class."""
    slot_bytes = dict.fromkeys(SizeClass, 0)
    for block in request.blocks:
        if block.size_class is not SizeClass.ROWS:
            slot_bytes[block.size_class] = max(slot_bytes[block.size_class], block.param_bytes)
    most = {SizeClass.LAYER: 2, SizeClass.EXPERT: MIN_EXPERT_SLOTS, SizeClass.OUTER: 1, SizeClass.ROWS: 0}
    num_blocks = {size_class: _num_blocks(request, size_class) for size_class in SizeClass}
    return slot_bytes, {size_class: min(most.get(size_class, num), num) for size_class, num in num_blocks.items()}


def _least_gpu_bytes(request: PoolRequest, chunk_numel: int, per_staging: int = 1) -> int:
    """Return the minimum device memory for chunks of this size, and for staging buffers of ``per_staging`` chunks."""
    slot_bytes, num_slots = _least_slots(request)
    slots_bytes = sum(slot_bytes[size_class] * num_slots[size_class] for size_class in SizeClass)
    unpacking_bytes = request.unpacking_bytes(per_staging * chunk_numel * MASTER_ITEMSIZE_BYTES)
    return slots_bytes + request.whole_device_bytes + unpacking_bytes + request.payload_bytes(chunk_numel)


def _check_gpu_memory(request: PoolRequest, chunk_numel: int) -> None:
    slot_bytes, num_slots = _least_slots(request)
    minimum = _least_gpu_bytes(request, chunk_numel)
    if minimum > request.gpu_memory_bytes:
        of_device, least = "", f"set gpu_memory to at least {minimum}"
        if request.device_memory_bytes is not None:
            of_device = f" (of device_memory, {request.device_memory_bytes} bytes)"
            least = f"set device_memory to at least {-(-minimum * 10 // SLOTS_TENTHS)} with gpu_memory: auto"
        raise BudgetError(
            f"gpu_memory of {request.gpu_memory_bytes} bytes{of_device} is smaller than two blocks of this model "
            f"({num_slots[SizeClass.LAYER]} x {slot_bytes[SizeClass.LAYER]} bytes"
            f"{_expert_slots(slot_bytes, num_slots)}) and the embeddings or head ({slot_bytes[SizeClass.OUTER]} "
            f"bytes) beside them; {least}"
        )


def _plan_slots(request: PoolRequest, least_bytes: int) -> dict[SizeClass, int]:
    """Return the numbers of slots. ``least_bytes``: device memory that is needed with the minimum number of slots."""
    slot_bytes, num_slots = _least_slots(request)
    spare = request.gpu_memory_bytes - least_bytes
    expert_bytes = slot_bytes[SizeClass.EXPERT]
    for size_class, wanted in (
        (SizeClass.LAYER, 1 + request.prefetch_blocks),
        (SizeClass.EXPERT, GOOD_EXPERT_SLOTS),
        (SizeClass.OUTER, len(request.blocks)),
        (SizeClass.EXPERT, request.gpu_memory_bytes // EXPERT_SHARE // expert_bytes if expert_bytes else 0),
    ):
        if slot_bytes[size_class]:
            more = min(wanted, _num_blocks(request, size_class)) - num_slots[size_class]
            more = max(0, min(more, spare // slot_bytes[size_class]))
            num_slots[size_class] += more
            spare -= more * slot_bytes[size_class]
    return num_slots


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
    """Return the largest chunk whose minimal pools fit the budget, but at most the size of the largest record."""
    largest = max(sum(block.unit_numels) for block in request.blocks)
    least = request.least_chunk_numel
    chunk_numel = max(MAX_CHUNK_NUMEL, least)

    def is_too_large(numel: int) -> bool:
        # The minimal pools take at most half of the budget, so that the other half holds gradients. Chunks below the
        # good size cost too many I/O calls, and are used only if nothing larger fits.
        share = 2 if numel > GOOD_CHUNK_NUMEL else 1
        fits = share * _minimum_bytes(request, numel) <= request.cpu_memory_bytes
        return numel // 2 >= largest or not (fits and _has_device_room(request, numel))

    while chunk_numel > least and is_too_large(chunk_numel):
        chunk_numel = max(chunk_numel // 2, least)
    return _even_for_experts(request, chunk_numel)


def _has_device_room(request: PoolRequest, chunk_numel: int, per_staging: int = 1) -> bool:
    """Return whether the device has room for chunks of this size, and for staging buffers of ``per_staging`` chunks."""
    staging_bytes = per_staging * chunk_numel * MASTER_ITEMSIZE_BYTES
    decoding_bytes = request.unpacking_bytes(staging_bytes) - request.unpacking_bytes(0)
    is_small = request.added_bytes(chunk_numel) + decoding_bytes <= request.gpu_memory_bytes // ADDED_SHARE
    return is_small and _least_gpu_bytes(request, chunk_numel, per_staging) <= request.gpu_memory_bytes


def _even_for_experts(request: PoolRequest, chunk_numel: int) -> int:
    """If experts are most of the model, return a chunk of at most this size that cuts an expert into equal parts. A
    chunk has one block, so a short last chunk of each expert would leave most of its buffers empty."""
    all_numel = sum(sum(block.unit_numels) for block in request.blocks)
    experts = [sum(block.unit_numels) for block in request.blocks if block.size_class is SizeClass.EXPERT]
    if 2 * sum(experts) <= all_numel:
        return chunk_numel
    num_chunks, granule = -(-max(experts) // chunk_numel), request.min_chunk_numel
    even_numel = -(-max(experts) // num_chunks // granule) * granule
    return max(even_numel, min(chunk_numel, max(GOOD_CHUNK_NUMEL, request.least_chunk_numel)))


def _chunks_per_staging_buffer(request: PoolRequest, chunk_numel: int, num_staging: int, spare: int) -> int:
    """Return the number of chunks in a staging buffer. It is more than one if chunks are small because little of the
    model is trained, while all weights are read. A buffer is at most half a block, so that one is read while another is
    copied. ``spare``: number of unused buffers of a chunk's size."""
    if chunk_numel < max(sum(block.unit_numels) for block in request.blocks):
        return 1
    largest_bytes = max(block.param_bytes for block in request.blocks)
    most_bytes = min(GOOD_STAGING_BYTES, largest_bytes // 2, request.cpu_memory_bytes // STAGING_SHARE)
    per_buffer = 1
    while 2 * per_buffer * chunk_numel * MASTER_ITEMSIZE_BYTES <= most_bytes:
        if num_staging * (2 * per_buffer - 1) > spare or not _has_device_room(request, chunk_numel, 2 * per_buffer):
            break
        per_buffer *= 2
    return per_buffer


def _minimum_bytes(request: PoolRequest, chunk_numel: int) -> int:
    num_buffers = sum(_least_buffers(request, chunk_numel))
    return num_buffers * chunk_numel * MASTER_ITEMSIZE_BYTES + request.whole_bytes + request.rows_bytes


def _least_buffers(request: PoolRequest, chunk_numel: int) -> tuple[int, int, int, int]:
    """Return the minimum numbers of buffers for staging, states, arriving gradients and recalled gradients."""
    num_lanes = 1 + any(block.size_class is SizeClass.EXPERT for block in request.blocks)
    return (
        num_lanes * MIN_STAGING_BUFFERS if request.is_staged else 0,
        NUM_PIPELINE_STAGES * request.num_state_buffers_per_chunk,
        _num_arrival_buffers(request, chunk_numel),
        NUM_RECALL_BUFFERS if request.hold_gradients else 0,
    )


def _num_arrival_buffers(request: PoolRequest, chunk_numel: int) -> int:
    """Return the number of buffers of arriving gradients besides held gradients, so that a step always makes progress.

    A parameter fills all chunks inside it at the same time. A chunk that it shares with neighbours waits for their
    gradients, so at most (parameters + 1) chunks of a block wait. Two more chunks move: one arrives, and one is in the
    pipeline. The pipeline never waits for a buffer of this pool, so it always takes gradients that have arrived.

    The same is true of half buffers. The pool has enough for arriving and held gradients, and a new gradient fits any
    returned half. If gradients are unexpectedly float32 (from micro-batches that ran together), each needs a whole
    buffer. Held halves do not block them, because a step with float32 gradients holds nothing in RAM, and the pipeline
    frees the halves of the previous step. If only some gradients have 2 bytes per element, each gets a whole buffer.
    """
    return 2 + max(min(block.num_chunks(chunk_numel), block.num_trainable_params + 1) for block in request.blocks)


def _choose_held(
    request: PoolRequest, chunk_numel: int, num_places: int
) -> tuple[tuple[str, ...], tuple[str, ...], int]:
    """Choose the blocks whose gradients are held in RAM. They are the model's first blocks, whose gradients arrive
    last."""
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

"""The gradients of one step on the host. They arrive, are summed over backwards and measured, and wait for their update
in RAM or on the SSD."""

from __future__ import annotations

import heapq
import logging
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.device import Buffer, Event, TopPlace
from hf_lohan.files import IoRequest
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice
from hf_lohan.optim import widen_in_place
from hf_lohan.ranks import SUM_TILE_NUMEL, BlockCodec, CodedValues
from hf_lohan.store import RecordFiles, RecordRead
from hf_lohan.threads import use_all_cores
from hf_lohan.updates.row_gradients import RowsOfPiece
from hf_lohan.updates.setup import UpdateSetup

logger = logging.getLogger(__name__)

_PIECE = np.dtype([("slice", np.int64), ("chunk", np.int64), ("norm", np.float64)])


@dataclass(eq=False)
class ArrivedChunk:
    """A chunk's gradient of one backward. It is in a host buffer after `wait` has returned, or in a device buffer."""

    chunk: Chunk
    buffer: Buffer | None
    """The host buffer; None if this rank only sends the gradient from its device."""
    dtype: torch.dtype
    """Dtype in which backward made the gradient."""
    pieces: list[ChunkPiece] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    keeps_dtype: bool = False
    """Whether the gradient keeps this dtype, in a buffer of half the size. If not, it is widened to float32."""
    codec: BlockCodec | None = None
    """The codec of the payloads in which pieces arrive. `wait` decodes them to float32."""
    rows: list[RowsOfPiece] = field(default_factory=list)
    """Pieces that arrive as rows only. `wait` moves the rows to their places."""
    on_device: Buffer | None = None
    """Device memory in which the gradient arrives. Devices add it to the gradients of other ranks."""

    @property
    def held_dtype(self) -> torch.dtype:
        """The dtype after `wait`."""
        return self.dtype if self.keeps_dtype else torch.float32

    @property
    def landing(self) -> Tensor:
        """The memory to which copies go. It begins at the buffer's start, or is the second half if the gradient is
        widened later."""
        if self.on_device is not None:
            return self.on_device.view(self.dtype, self.chunk.numel)
        start_byte = self.chunk.numel * (self.held_dtype.itemsize - self.dtype.itemsize)
        return self._host.view(self.dtype, self.chunk.numel, start_byte=start_byte)

    @property
    def _host(self) -> Buffer:
        assert self.buffer is not None
        return self.buffer

    def coded_landing(self, piece: ChunkPiece) -> tuple[Tensor, Tensor]:
        """Return the memory, as bytes, to which the codes and the scales of a piece go."""
        part = self._coded_values().part(piece.start_in_chunk, piece.stop_in_chunk)
        return part.codes.view(torch.uint8), part.scales.view(torch.uint8)

    def _coded_values(self) -> CodedValues:
        assert self.codec is not None
        memory = self.on_device or self._host
        return CodedValues.in_place_of(memory.view(torch.float32, self.chunk.numel), self.codec)

    def wait_coded(self) -> None:
        """Wait until the whole gradient is in the buffer. It stays coded, with zeros in the padding and for parameters
        without a gradient."""
        self.wait_for_copies()
        assert self.codec is not None
        coded, block, end = self._coded_values(), self.codec.block_numel, 0
        for piece in sorted(self.pieces, key=lambda piece: piece.start_in_chunk):
            coded.part(end, piece.start_in_chunk).zero_()
            end = -(-piece.stop_in_chunk // block) * block
        coded.part(end, self.chunk.numel).zero_()

    def _decode(self) -> Tensor:
        values, coded = self._host.view(torch.float32, self.chunk.numel), self._coded_values().with_own_scales()
        for piece in sorted(self.pieces, key=lambda piece: piece.start_in_chunk):
            for first in range(piece.start_in_chunk, piece.stop_in_chunk, SUM_TILE_NUMEL):
                stop = min(first + SUM_TILE_NUMEL, piece.stop_in_chunk)
                values[first:stop].copy_(coded.part(first, stop).decoded())
        return values

    def wait_for_copies(self) -> None:
        for event in self.events:
            event.synchronize()
        self.events.clear()

    def drop(self) -> None:
        """Release the buffers."""
        self.wait_for_copies()
        for buffer in filter(None, (self.buffer, self.on_device)):
            buffer.release()

    def wait(self) -> Tensor:
        """Wait until the whole gradient is in the buffer. Returns it as [chunk.numel] in `held_dtype`, with zeros in
        the padding."""
        self.wait_for_copies()
        for rows in self.rows:
            rows.spread(self.landing[rows.piece.start_in_chunk : rows.piece.stop_in_chunk])
        self.rows.clear()
        if self.codec is not None:
            gradient = self._decode()
        elif self.dtype == self.held_dtype:
            gradient = self.landing
        else:
            gradient = widen_in_place(self._host.bytes, self.dtype, self.chunk.numel)
        for start, stop in self.chunk.gaps:
            gradient[start:stop].zero_()
        return gradient


@dataclass(eq=False)
class ChunkGradient:
    """The gradient of one chunk, summed over a step's backwards. It is in RAM, or spilled to the SSD. A gradient of
    zeros has no memory."""

    chunk: Chunk
    buffer: Buffer | TopPlace | None
    slices: set[ParamSlice]
    """Parameters of the chunk that have a gradient."""
    dtype: torch.dtype = torch.float32
    """Dtype. The gradient of a single backward may keep its dtype, and sums are float32."""
    summed: set[ParamSlice] = field(default_factory=set)
    """Parameters to which more than one backward contributed."""
    is_measured: bool = False
    """Whether the norms of the summed parameters are known."""
    spill_write: IoRequest | None = None
    spilled_to: RecordFiles | None = None
    codec: BlockCodec | None = None
    """The codec of `values`, if they are coded in their memory."""
    is_zero: bool = False
    """Whether the gradient is zeros, which need no buffer and no measurement."""
    on_device: Buffer | None = None
    """Device memory with the gradient, in `dtype`, before it is published. `buffer` is then for the mean, or None."""

    @classmethod
    def of_zeros(cls, chunk: Chunk) -> ChunkGradient:
        """Return a gradient of zeros for all trained parameters of the chunk, for example of an expert without
        tokens."""
        slices = {piece.param_slice for piece in chunk.pieces if piece.param_slice.parameter.requires_grad}
        return cls(chunk, None, slices, is_zero=True)

    @classmethod
    def of_nothing(cls, chunk: Chunk) -> ChunkGradient:
        """Return an empty gradient, whose update only applies the chunk's missed steps."""
        return cls(chunk, None, set(), is_zero=True)

    @property
    def values(self) -> Tensor:
        """View [chunk.numel] of the buffer, in `dtype`."""
        assert self.buffer is not None
        return self.buffer.view(self.dtype, self.chunk.numel)

    @property
    def published_values(self) -> Tensor:
        """The values that other ranks get: `values`, or the values in device memory."""
        return self.values if self.on_device is None else self.on_device.view(self.dtype, self.chunk.numel)

    def leave_device(self) -> bool:
        """Return whether the gradient was in device memory. `values` are then for its mean, in float32."""
        was_there, self.on_device = self.on_device is not None, None
        self.dtype = torch.float32 if was_there else self.dtype
        return was_there

    def measure_again(self) -> None:
        """Mark all parameters to be measured on the host, also parameters of a single backward. With several ranks
        nothing is measured as it arrives."""
        self.summed, self.is_measured = set(self.slices), False

    def refuse_not_finite(self) -> None:
        """Raise NonFiniteGradientError if an element is not finite. This protects updates that cannot be undone."""
        if self.is_zero:
            return
        for piece in self.chunk.pieces:
            has_gradient = piece.param_slice in self.slices  # without a gradient this part of the buffer has no values
            if has_gradient and not self.values[piece.start_in_chunk : piece.stop_in_chunk].isfinite().all():
                raise NonFiniteGradientError(
                    f"the gradient of {piece.param_slice.name} is not finite, and other blocks have already been "
                    "updated in place in this step; resume from a checkpoint, and set durability='step' or "
                    "max_grad_norm > 0, so that the run skips such a step"
                )


class NonFiniteGradientError(RuntimeError):
    """Gradients were NaN or infinite in too many steps. The message names the first such parameter."""


class GradientNorms:
    """Computes the same as `torch.nn.utils.get_total_norm`, bit for bit if each parameter's gradient is in one piece. A
    gradient is measured on the device when it is complete, or on the host after it was added to gradients of earlier
    backwards. Norms on the device stay there until the total is needed. One copy then brings all of them to the
    host."""

    def __init__(self, slices: Iterable[ParamSlice]) -> None:
        """``slices``: all slices in the model's order. With several ranks, each rank measures its part of the sums over
        all ranks. All ranks exchange their `measured` norms, so all ranks have the same norms."""
        self._order = list(slices)
        self._first: dict[ParamSlice, Tensor] = {}
        self._summed: dict[ParamSlice, dict[int, float]] = {}
        self._on_host: dict[ParamSlice, Tensor] | None = None
        """Norms by parameter; None before they are needed."""

    def set_first(self, part: ParamSlice, gradient: Tensor) -> None:
        """Compute the norm of a gradient from backward."""
        self._first[part] = torch.linalg.vector_norm(gradient, dtype=_dtype_of(part))
        self._on_host = None

    def set_summed(self, piece: ChunkPiece, gradient: Tensor) -> None:
        """Measure the part of a parameter's gradient in one chunk, after it is summed over backwards."""
        norm = torch.linalg.vector_norm(gradient, dtype=_dtype_of(piece.param_slice))
        self._summed.setdefault(piece.param_slice, {})[piece.chunk.index] = float(norm)
        self._on_host = None

    def total(self) -> Tensor:
        """Return the 2-norm over all gradients of the step, a float32 scalar on the host.

        The norms of parameters are added in the model's order, as in stock torch, because gradients are measured in an
        order that changes from run to run. If a parameter is in several blocks, the squares of its parts' norms are
        added in float64, in any order. Stock torch measures it with one kernel, which on a CPU adds squares in float32
        and has an error of 2e-4 at 8M elements.
        """
        measured = self._norms()
        by_parameter: defaultdict[nn.Parameter, list[ParamSlice]] = defaultdict(list)
        for part in self._order:
            if part in measured:
                by_parameter[part.parameter].append(part)
        norms = [
            measured[parts[0]]
            if parts[0].is_whole
            else torch.tensor(math.hypot(*sorted(float(measured[part]) for part in parts)), dtype=torch.float32)
            for parts in by_parameter.values()
        ]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def first_not_finite(self) -> str | None:
        """Return the name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        return next((part.name for part, norm in self._norms().items() if not math.isfinite(norm)), None)

    def _norms(self) -> dict[ParamSlice, Tensor]:
        if self._on_host is None:
            norms: dict[ParamSlice, Tensor] = {}
            measured = [part for part in self._order if part in self._first]
            measured.sort(key=lambda part: not part.is_whole)
            if measured:
                # Copy all norms in the widest of their dtypes, which changes no bit, because two copies would wait
                # twice.
                dtype = _dtype_of(measured[-1])
                on_host = torch.stack([self._first[part].to(dtype) for part in measured]).cpu()
                norms.update((part, norm.to(_dtype_of(part))) for part, norm in zip(measured, on_host, strict=True))
            for part, pieces in self._summed.items():
                numbers = [norm for _, norm in sorted(pieces.items())]  # chunks arrive in any order
                norms[part] = _norm_of_parts(part, numbers)
            self._on_host = norms
        return self._on_host

    def measured(self) -> bytes:
        """Return this rank's norms, to be sent to all ranks. Each piece has the slice's index in the model, the chunk's
        index, and the norm as float64."""
        index_of = {part: index for index, part in enumerate(self._order)}
        norms = [
            (index_of[part], chunk, norm) for part, by_chunk in self._summed.items() for chunk, norm in by_chunk.items()
        ]
        return np.array(norms, _PIECE).tobytes()

    def replace_with(self, measured: Iterable[bytes]) -> None:
        """Use the norms that all ranks, including this rank, have ``measured``."""
        pieces = np.concatenate([np.frombuffer(norms, _PIECE) for norms in measured])
        pieces.sort(order=("slice", "chunk"))
        self._on_host = {}
        for index in np.unique(pieces["slice"]):
            part = self._order[index]
            self._on_host[part] = _norm_of_parts(part, pieces["norm"][pieces["slice"] == index].tolist())

    @property
    def with_gradient(self) -> set[ParamSlice]:
        """The parameters with a gradient in this step, on any rank."""
        return set(self._norms())

    def clear(self) -> None:
        self._first.clear()
        self._summed.clear()
        self._on_host = None


def _norm_of_parts(part: ParamSlice, norms: list[float]) -> Tensor:
    norm = norms[0] if len(norms) == 1 else math.hypot(*norms)
    return torch.tensor(norm, dtype=_dtype_of(part))


def _dtype_of(part: ParamSlice) -> torch.dtype:
    """Return the dtype of a norm. It is float32 for a whole parameter, as in stock torch."""
    return torch.float32 if part.is_whole else torch.float64


_Key: TypeAlias = tuple[int, int]
"""A chunk's position in the forward, which is its block's index and the chunk's index in the block."""


class HeldGradients:
    """A step's waiting gradients, by chunk, in forward order. Used by one thread."""

    def __init__(self, setup: UpdateSetup, norms: GradientNorms) -> None:
        self._setup = setup
        self._spill_of_sums: RecordFiles | None = None
        self._norms = norms
        self._position = {block: index for index, block in enumerate(setup.blocks)}
        self._held: dict[_Key, ChunkGradient] = {}
        self._unmeasured: set[_Key] = set()
        self._in_buffers: set[_Key] = set()
        """Keys of gradients in buffers that may move to other RAM."""
        self._may_be_spilled: list[_Key] = []
        """A heap of the negated keys of gradients that were in buffers and may be spilled. Some of these gradients may
        be gone."""

    def add_arrived(self, arrived: ArrivedChunk, *, may_stay_coded: bool = False) -> ChunkGradient:
        """Add an arrived chunk to its held gradient, if one exists. Returns the sum, which is no longer held. With
        ``may_stay_coded``, the gradient of a single backward is returned as it arrived."""
        slices = {piece.param_slice for piece in arrived.pieces}
        key = self._key(arrived.chunk)
        gradient = self._pop(key) if key in self._held else None
        if arrived.on_device is not None:
            assert gradient is None, "an earlier backward of the step sent its gradient to the host"
            arrived.wait_for_copies()
            gradient = ChunkGradient(arrived.chunk, arrived.buffer, slices, arrived.dtype, on_device=arrived.on_device)
            if arrived.codec is not None:
                gradient.codec, gradient.dtype = arrived.codec, torch.float32
            return gradient
        if gradient is None and may_stay_coded and arrived.codec is not None:
            arrived.wait_coded()
            return ChunkGradient(arrived.chunk, arrived.buffer, slices, codec=arrived.codec)
        if gradient is not None or arrived.dtype != arrived.held_dtype or arrived.codec is not None:
            use_all_cores()  # for decoding, widening and adding, and because torch measures sums on all cores
        values = arrived.wait()
        if gradient is None:
            return ChunkGradient(arrived.chunk, arrived.buffer, slices, arrived.held_dtype)
        self._bring_back_now(gradient)
        self._widen(gradient)
        for piece in arrived.pieces:
            part = slice(piece.start_in_chunk, piece.stop_in_chunk)
            if piece.param_slice in gradient.slices:
                gradient.values[part].add_(values[part])
                gradient.summed.add(piece.param_slice)
            else:
                gradient.values[part].copy_(values[part])
        gradient.slices |= slices
        gradient.is_measured = False
        self._keep_one_buffer(gradient, arrived, values)
        return gradient

    def _keep_one_buffer(self, gradient: ChunkGradient, arrived: ArrivedChunk, values: Tensor) -> None:
        """Release one of the two buffers. With several ranks the sum must be in the arrival buffer, because other ranks
        read it there, and this rank needs its recall buffers earlier."""
        assert gradient.buffer is not None
        assert arrived.buffer is not None
        is_recalled = isinstance(gradient.buffer, Buffer) and gradient.buffer.pool is self._setup.recall
        if self._setup.sums_stay_in_arrival_buffers and is_recalled:
            values.copy_(gradient.values)
            gradient.buffer.release()
            gradient.buffer = arrived.buffer
        else:
            arrived.buffer.release()

    def measure(self, gradient: ChunkGradient) -> None:
        """Measure the summed parameters. All others were measured as they arrived."""
        gradient.is_measured = True
        use_all_cores()  # torch measures on all cores
        for piece in gradient.chunk.pieces:
            if piece.param_slice in gradient.summed:
                self._norms.set_summed(piece, gradient.values[piece.start_in_chunk : piece.stop_in_chunk])

    def measure_rest(self) -> None:
        """Measure gradients that no final backward announced, for loops that do not say which backward is the last."""
        for key in sorted(self._unmeasured):
            gradient = self._pop(key)
            self._bring_back_now(gradient)
            self.measure(gradient)
            self.hold(gradient)

    def hold(self, gradient: ChunkGradient, *, is_final: bool = False) -> None:
        """Hold a gradient until it is needed. If it is spilled, its buffer is released after the write. `is_final`: the
        gradient only waits for the step's end and its update, so it may use RAM that the next forward will need."""
        key = self._key(gradient.chunk)
        self._held[key] = gradient
        if gradient.is_zero:
            return
        if gradient.summed and not gradient.is_measured:
            self._unmeasured.add(key)
        block = gradient.chunk.block
        if self._setup.keeps_gradient_dtypes and gradient.dtype != block.master.working_dtype:
            # Memory was planned for one backward per step, so RAM has no room for a sum.
            self._write(gradient, self._opened_spill_of_sums(block.master.working_dtype))
        elif self._setup.spilled_blocks and self._setup.shared_ram is not None and self._setup.shared_ram.num_bytes:
            self._hold_where_there_is_room(key, is_final=is_final)
        elif block.name in self._setup.spilled_blocks:
            self._write(gradient, self._setup.spill)

    def _hold_where_there_is_room(self, key: _Key, *, is_final: bool) -> None:
        """Hold the gradient in a buffer, or in the RAM that activations leave. If both are full, spill the gradient
        that is needed last. Activations leave more RAM over time. So the first gradients go to buffers, and are spilled
        if later gradients need the buffers."""
        gradient = self._held[key]
        if isinstance(gradient.buffer, TopPlace):
            return
        assert gradient.buffer is not None
        may_stay = gradient.buffer.pool is self._setup.gradients  # a recall buffer may not
        if may_stay and len(self._in_buffers) < self._setup.num_held_chunks:
            self._stay_in_buffer(key)
        elif is_final and self._move_to_shared_ram(gradient):
            return
        elif may_stay and (last := self._last_in_buffers()) is not None and last > key:
            self._in_buffers.remove(last)
            self._write(self._held[last], self._setup.spill)
            self._stay_in_buffer(key)
        else:
            self._write(gradient, self._setup.spill)

    def hold_in_shared_ram(self, gradient: ChunkGradient) -> bool:
        """Hold a gradient for the next forward if shared RAM has room. Returns whether it is held."""
        has_room = self._setup.shared_ram is not None and not gradient.is_zero and self._move_to_shared_ram(gradient)
        if has_room:
            self._held[self._key(gradient.chunk)] = gradient
        return has_room

    def _stay_in_buffer(self, key: _Key) -> None:
        if not self._in_buffers:
            self._may_be_spilled.clear()
        self._in_buffers.add(key)
        if self._held[key].chunk.block.name in self._setup.spilled_blocks:
            heapq.heappush(self._may_be_spilled, (-key[0], -key[1]))

    def _last_in_buffers(self) -> _Key | None:
        """Return the key of the gradient that is needed last, among those in buffers that may be spilled. The buffers
        have room for all gradients that must not be spilled. So if they are full when such a gradient arrives, another
        gradient can be spilled."""
        while self._may_be_spilled:
            position, index = self._may_be_spilled[0]
            if (-position, -index) in self._in_buffers:
                return -position, -index
            heapq.heappop(self._may_be_spilled)
        return None

    def _move_to_shared_ram(self, gradient: ChunkGradient) -> bool:
        """Move a gradient to shared RAM if there is room that the next forward does not need before the gradient is
        applied. Until that forward reaches the block, it needs as much RAM as the last forward (`marks`), so it always
        finds the same room."""
        ram, values = self._setup.shared_ram, gradient.values
        assert ram is not None and gradient.buffer is not None
        position = self._position[gradient.chunk.block]
        needed_bytes = max(ram.marks.get(block.name, 0) for block in self._setup.blocks[: position + 1])
        place = ram.push_top(values.nbytes, leave=needed_bytes)
        if place is None:
            return False
        place.view(values.dtype, values.numel()).copy_(values)
        gradient.buffer.release()
        gradient.buffer = place
        return True

    def _write(self, gradient: ChunkGradient, spill: RecordFiles | None) -> None:
        assert spill is not None and isinstance(gradient.buffer, Buffer)
        chunk, buffer = gradient.chunk, gradient.buffer
        write = spill.write(chunk.block.name, "gradient", chunk.start, gradient.values)
        write.add_done_callback(lambda request: buffer.release())
        gradient.spill_write, gradient.spilled_to, gradient.buffer = write, spill, None

    def _opened_spill_of_sums(self, dtype: torch.dtype) -> RecordFiles:
        if self._spill_of_sums is None:
            assert self._setup.open_spill_of_sums is not None
            logger.warning(
                "gradients of %s are summed over several backwards, but memory is allocated for one backward per step, "
                "so sums wait on the SSD; set gradient_accumulation_steps before the model is offloaded, if you can",
                dtype,
            )
            self._spill_of_sums = self._setup.open_spill_of_sums()
        return self._spill_of_sums

    def _pop(self, key: _Key) -> ChunkGradient:
        self._unmeasured.discard(key)
        self._in_buffers.discard(key)
        return self._held.pop(key)

    @property
    def chunks(self) -> set[Chunk]:
        """The chunks whose gradients are held."""
        return {gradient.chunk for gradient in self._held.values()}

    def slices_of(self, chunk: Chunk) -> set[ParamSlice]:
        """Return the parameters of a chunk whose gradients are held."""
        return self._held[self._key(chunk)].slices

    def pop_gradient(self, chunk: Chunk) -> ChunkGradient:
        """Remove and return a gradient that is in its buffer. Raises RuntimeError if it is spilled."""
        key = self._key(chunk)
        if self._held[key].buffer is None:
            raise RuntimeError(
                f"the gradient of {chunk} waits on the SSD and other ranks need it, because no backward was announced "
                "as the step's last; set gradient_accumulation_steps, or call announce_backward"
            )
        return self._pop(key)

    def pop_into(self, chunk: Chunk, buffer: Buffer) -> ChunkGradient:
        """Remove and return a gradient, in a buffer of the arrivals' pool, which other ranks can read. The gradient
        moves to ``buffer`` if it is not in this pool."""
        gradient = self._pop(self._key(chunk))
        earlier = gradient.buffer
        if isinstance(earlier, Buffer) and earlier.pool is self._setup.gradients:
            buffer.release()
            return gradient
        values = buffer.view(gradient.dtype, chunk.numel)
        if earlier is None:
            assert gradient.spilled_to is not None
            assert gradient.spill_write is not None
            gradient.spill_write.wait()
            gradient.spilled_to.read(chunk.block.name, "gradient", chunk.start, values).wait()
        else:
            values.copy_(gradient.values)
            earlier.release()
        gradient.buffer = buffer
        return gradient

    def pop_all(self) -> Iterator[ChunkGradient]:
        """Remove and return all gradients, in forward order."""
        for key in sorted(self._held):
            yield self._pop(key)

    def forget_gradients(self, chunks: Iterable[Chunk]) -> None:
        """Drop the gradients of these chunks."""
        for chunk in chunks:
            gradient = self._pop(self._key(chunk))
            if gradient.buffer is not None:
                gradient.buffer.release()
            elif gradient.spill_write is not None:
                gradient.spill_write.wait()

    # Spilled gradients.

    def can_bring_back(self, gradient: ChunkGradient) -> bool:
        """Return whether a buffer is free for `bring_back`."""
        return gradient.buffer is not None or gradient.is_zero or self._setup.recall.num_free > 0

    def bring_back(self, gradient: ChunkGradient) -> list[RecordRead]:
        """Read a spilled gradient into a recall buffer. Returns the reads, which must be done and verified before the
        gradient is used."""
        if gradient.buffer is not None or gradient.is_zero:
            return []
        assert gradient.spilled_to is not None and gradient.spill_write is not None
        gradient.spill_write.wait()
        gradient.buffer = self._setup.recall.acquire()
        chunk = gradient.chunk
        return [gradient.spilled_to.read(chunk.block.name, "gradient", chunk.start, gradient.values)]

    def _widen(self, gradient: ChunkGradient) -> None:
        """Convert a gradient to float32, in place if there is room, or else in a recall buffer. It takes only one
        recall buffer, because a guess in progress may hold the other."""
        if gradient.dtype == torch.float32:
            return
        values, buffer, numel = gradient.values, gradient.buffer, gradient.chunk.numel
        assert buffer is not None
        if buffer.bytes.numel() >= torch.float32.itemsize * numel:
            buffer.view(gradient.dtype, numel, start_byte=values.nbytes).copy_(values)
            widen_in_place(buffer.bytes, gradient.dtype, numel)
            gradient.dtype = torch.float32
        else:
            gradient.buffer, gradient.dtype = self._setup.recall.acquire(), torch.float32
            gradient.values.copy_(values)
            buffer.release()

    def _bring_back_now(self, gradient: ChunkGradient) -> None:
        for read in self.bring_back(gradient):
            read.wait()

    def _key(self, chunk: Chunk) -> _Key:
        return self._position[chunk.block], chunk.index

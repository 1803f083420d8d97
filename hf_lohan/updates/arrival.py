"""Copies each complete gradient from autograd to the host, or to device memory in which devices sum gradients."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from hf_lohan.costs import SizeClass
from hf_lohan.device import Buffer, BufferPool, Device, Lane
from hf_lohan.model import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.ranks import MeasuredCodec
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates.gradients import ArrivedChunk
from hf_lohan.updates.handover import WeightSlots
from hf_lohan.updates.pipeline import GradientPipeline
from hf_lohan.updates.row_gradients import RowGradient

_LOOK_S = 1.0
"""Seconds after which a wait for a buffer submits the incomplete chunks of other blocks."""


@dataclass(frozen=True, slots=True)
class BackwardContext:
    """Facts about a backward, for all its gradients."""

    is_final: bool = True
    """Whether no later backward of this step adds to these gradients."""
    slots: WeightSlots | None = None
    """Lends a block's weights to the block's update. Without it, updates read weights from the store."""


class GradientArrivals:
    """Takes gradients from post-accumulate hooks, and passes each chunk to the pipeline as soon as it is complete. Runs
    on the thread of the backward. If no host buffer is free it waits, which delays the backward and keeps memory within
    its limit."""

    def __init__(
        self,
        device: Device,
        pool: BufferPool,
        chunks: Iterable[Chunk],
        pipeline: GradientPipeline,
        *,
        keeps_dtypes: bool = False,
        coded: MeasuredCodec | None = None,
        to_devices: BufferPool | None = None,
    ) -> None:
        """`keeps_dtypes`: see `UpdateSetup.keeps_gradient_dtypes`. `coded`: the codec for copies to the host of
        gradients that all ranks have. ``to_devices``: buffers in device memory in which devices sum gradients. Without
        it all are summed on the host."""
        self._device = device
        self._pool = pool
        self._pipeline = pipeline
        self._keeps_dtypes = keeps_dtypes
        self._coded = coded
        self._to_devices = to_devices
        self._goes_to_devices = False
        """Whether devices sum the gradients of this backward. All ranks decide alike."""
        self._payload: Tensor | None = None
        """Device memory for the payload of one piece. Only work of the D2H lane uses it."""
        self._context = BackwardContext()
        self._open: dict[Chunk, ArrivedChunk] = {}
        self._order: dict[Chunk, int] = {}
        """Position of each chunk in the order of arrival of the step's gradients."""
        self._submitted: set[Chunk] = set()
        """Chunks that were submitted in the backward, and published chunks that the backward does not reach."""
        self._held_back: deque[Chunk] = deque()
        """Chunks with gradients of earlier backwards that the step's last backward does not reach, in `_order`."""
        self._pieces: dict[ParamSlice, list[ChunkPiece]] = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.param_slice, []).append(piece)

    def begin_backward(self, context: BackwardContext) -> None:
        """Begin a backward. `context` applies until the next one."""
        self._context = context
        # Sums of several backwards are on the host.
        is_only = self._pipeline.count_backward() == 1 and context.is_final
        self._goes_to_devices = self._to_devices is not None and is_only
        self._submitted.clear()
        self._held_back.clear()
        if not self._pipeline.has_gradients:
            self._order.clear()

    def exclude(self, blocks: Collection[Block]) -> None:
        """Record that the backward, if it is the step's last, reaches none of these blocks. Ranks publish gradients in
        the order of their backwards, so that no gradient waits in a buffer until another rank publishes its gradient
        much later. Gradients of earlier backwards, to which this backward adds nothing, have this order too."""
        if blocks and self._context.is_final:
            self._held_back.extend(sorted(self._pipeline.exclude(blocks), key=self._order.__getitem__))

    def _publish_held_before(self, chunk: Chunk) -> None:
        place = self._order.setdefault(chunk, len(self._order))
        while self._held_back and self._order[self._held_back[0]] < place:
            self._publish_held(self._held_back.popleft())

    def _publish_held(self, chunk: Chunk) -> None:
        self._submitted.add(chunk)
        self._pipeline.publish_held(chunk, self._acquire_buffer(chunk.block, half=False))

    def take_gradient(self, param_slice: ParamSlice, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` to the host, and free it on the device."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self.send_gradient(param_slice, gradient)

    def send_gradient(self, param_slice: ParamSlice, gradient: Tensor, *, has_more: bool = False) -> None:
        """Move a slice's gradient to the host. `gradient` belongs to the whole parameter, or only to the slice. It is
        sparse if only rows of the table are on the device. ``has_more``: this backward will add to the gradient."""
        rows = RowGradient(gradient) if gradient.is_sparse else None
        if rows is not None and self._pieces[param_slice][0].chunk.block.size_class is not SizeClass.ROWS:
            raise ValueError(f"{param_slice.name} has a sparse gradient; set sparse=False on its embedding")
        flat = gradient.contiguous().view(-1) if rows is None else rows.values
        if rows is None and flat.numel() != param_slice.numel:
            flat = flat[param_slice.first : param_slice.last]
        self._pipeline.measure_gradient(param_slice, flat if rows is None else rows.to_measure())
        self._device.wait(Lane.D2H, self._device.record(Lane.COMPUTE, flat))
        for piece in self._pieces.get(param_slice, ()):  # a slice without elements has no pieces
            # Copy one piece after the other, because a parameter may have more chunks than the pool has buffers.
            arrived = self._copy_piece(piece, flat, rows)
            if len(arrived.pieces) == len(arrived.chunk.pieces):
                self._submit_chunk(arrived, has_more=has_more)

    def _copy_piece(self, piece: ChunkPiece, flat: Tensor, rows: RowGradient | None) -> ArrivedChunk:
        arrived = self._open.get(piece.chunk)
        if arrived is None:
            self._publish_held_before(piece.chunk)
            block = piece.chunk.block
            is_coded = self._coded is not None and block.owner is None and block.size_class is not SizeClass.ROWS
            codec = self._coded.codec if self._coded is not None and is_coded else None
            keeps_dtype = self._keeps_dtypes and flat.dtype.itemsize < torch.float32.itemsize
            buffer = on_device = None
            with self._device.timeline.task(COMPUTE_WAITS, "a gradient buffer", block=block.name):
                if self._goes_to_devices and block.owner is None and block.size_class is not SizeClass.ROWS:
                    is_half = codec is None and flat.dtype.itemsize < torch.float32.itemsize
                    on_device = self._acquire_buffer(block, half=is_half, pool=self._to_devices)
                if on_device is None or self._pipeline.updates_chunk(piece.chunk):
                    buffer = self._acquire_buffer(block, half=keeps_dtype)
            arrived = ArrivedChunk(
                piece.chunk, buffer, flat.dtype, keeps_dtype=keeps_dtype, codec=codec, on_device=on_device
            )
            self._open[piece.chunk] = arrived
        if rows is not None:
            assert arrived.codec is None, "rows are not coded"
            source, of_piece = rows.part(piece)
            arrived.rows.append(of_piece)
        else:
            source = flat[piece.start_in_slice : piece.start_in_slice + piece.numel]
        if arrived.codec is None:
            start = piece.start_in_chunk
            if source.numel():  # a piece may have none of the rows
                self._device.copy(Lane.D2H, arrived.landing[start : start + source.numel()], source)
        else:
            self._copy_coded(source, *arrived.coded_landing(piece))
        arrived.events.append(self._device.record(Lane.D2H))
        arrived.pieces.append(piece)
        return arrived

    def _copy_coded(self, source: Tensor, codes: Tensor, scales: Tensor) -> None:
        """Encode a piece on the device, and copy its payload."""
        coded, device = self._coded, self._device
        assert coded is not None
        if self._payload is None:
            self._payload = device.empty(coded.codec.message_bytes(self._pool.buffer_bytes // 4))
        message = self._payload[: coded.codec.message_bytes(source.numel())]
        encode = partial(coded.encode, source, message)
        device.run(Lane.D2H, encode, fills=message, reads=(source,), name="encode")
        device.copy(Lane.D2H, codes, message[: codes.numel()])
        device.copy(Lane.D2H, scales, message[codes.numel() :])
        coded.count(source.nbytes, message.numel())

    def _acquire_buffer(self, block: Block, *, half: bool, pool: BufferPool | None = None) -> Buffer:
        pool = pool or self._pool
        if (buffer := pool.acquire_within(0.0, half=half)) is not None:
            return buffer
        with self._pipeline.wait_for_ranks():
            while (buffer := pool.acquire_within(_LOOK_S, half=half)) is None:
                # All buffers may be held by layers in which a parameter gets no gradient, such as an expert without
                # tokens.
                for arrived in list(self._open.values()):
                    if arrived.chunk.block is not block and arrived.chunk.block.size_class is SizeClass.LAYER:
                        self._submit_chunk(arrived)
        return buffer

    def _submit_chunk(self, arrived: ArrivedChunk, *, has_more: bool = False) -> None:
        pipeline = self._pipeline
        is_final = self._context.is_final and not has_more
        if not (is_final or pipeline.holds_gradients):
            raise RuntimeError(
                "gradients are being accumulated, but the engine was prepared to apply them as they arrive, and has "
                "no room to keep them; set gradient_accumulation_steps when you make the Accelerator or the training "
                "arguments, or set max_grad_norm > 0"
            )
        borrowed, slots = None, self._context.slots
        if is_final and slots is not None and pipeline.updates_in_backward and pipeline.updates_chunk(arrived.chunk):
            borrowed = slots.borrow_slot(arrived.chunk.block)
        del self._open[arrived.chunk]
        self._submitted.add(arrived.chunk)
        pipeline.submit(arrived, is_final=is_final, borrowed=borrowed)

    def flush(self) -> None:
        """Submit the chunks in which some parameter got no gradient, after the backward."""
        for arrived in list(self._open.values()):
            self._submit_chunk(arrived)
        if self._context.is_final:
            self._held_back.clear()
            for chunk in sorted(self._pipeline.held_back(self._submitted), key=self._order.__getitem__):
                self._publish_held(chunk)

    def note_zero_gradient(self, part: ParamSlice) -> None:
        """Record that a slice has a gradient of zero in the backward. See `GradientPipeline.note_passed`."""
        self._pipeline.note_passed(piece.chunk for piece in self._pieces[part])

    def abandon_backward(self) -> None:
        """Release the buffers of incomplete chunks after an interrupted backward."""
        for arrived in self._open.values():
            arrived.drop()
        self._open.clear()

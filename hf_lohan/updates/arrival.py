"""From autograd to the host: a gradient leaves the device the moment it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor, nn

from hf_lohan.device import BufferPool, Device, Lane
from hf_lohan.model import Block, Chunk, ChunkPiece, ParamSlice
from hf_lohan.planner import SizeClass
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates.gradients import ArrivedChunk
from hf_lohan.updates.handover import BorrowedSlot
from hf_lohan.updates.pipeline import GradientPipeline


class GradientArrivals:
    """Takes gradients from post-accumulate hooks and gives every chunk to the pipeline as soon as it is complete.

    Runs on the thread of the backward. Where no host buffer is free it waits: backward is held back, memory is not
    exceeded.
    """

    def __init__(
        self,
        device: Device,
        pool: BufferPool,
        chunks: Iterable[Chunk],
        pipeline: GradientPipeline,
        *,
        keeps_dtypes: bool = False,
        measures: bool = True,
        is_final_backward: Callable[[], bool] = lambda: True,
        before_updates: Callable[[], None] = lambda: None,
        lend: Callable[[Chunk], BorrowedSlot | None] = lambda _chunk: None,
    ) -> None:
        """`keeps_dtypes`: see `UpdateSetup`; `measures`: norms are of what arrives here, and not of a mean of several
        ranks; `is_final_backward` is asked in backward whether the step's last one is
        running; `before_updates` is called before what may be updated in backward; `lend` gives the optimizer the
        weights of a chunk's block, which backward uses."""
        self._device = device
        self._pool = pool
        self._pipeline = pipeline
        self._keeps_dtypes = keeps_dtypes
        self._measures = measures
        self._is_final_backward = is_final_backward
        self._is_final_announced = True
        self._before_updates = before_updates
        self._lend = lend
        self._open: dict[Chunk, ArrivedChunk] = {}
        self._pieces: dict[ParamSlice, list[ChunkPiece]] = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.param_slice, []).append(piece)

    def announce_backward(self, *, is_final: bool) -> None:
        """Whether the backwards from here on may be a step's last."""
        self._is_final_announced = is_final

    def take(self, param_slice: ParamSlice, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` to the host and forget it on the device."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self.send(param_slice, gradient)

    def send(self, param_slice: ParamSlice, gradient: Tensor, *, has_more: bool = False) -> None:
        """Move to the host what a slice has of its parameter's gradient: the whole one is given, or just that.
        ``has_more``: the backward under way will add to it."""
        if gradient.is_sparse:
            raise ValueError(f"{param_slice.name} has a sparse gradient; set sparse=False on its embedding")
        flat = gradient.contiguous().view(-1)
        if flat.numel() != param_slice.numel:
            flat = flat[param_slice.first : param_slice.last]
        if self._measures:
            self._pipeline.norms.set_first(param_slice, flat)
        self._device.wait(Lane.D2H, self._device.record(Lane.COMPUTE, flat))
        for piece in self._pieces[param_slice]:
            # One after the other: a parameter may have more chunks than there are buffers.
            arrived = self._land(piece, flat)
            if len(arrived.pieces) == len(arrived.chunk.pieces):
                self._close(arrived, has_more=has_more)

    def _land(self, piece: ChunkPiece, flat: Tensor) -> ArrivedChunk:
        arrived = self._open.get(piece.chunk)
        if arrived is None:
            keeps_dtype = self._keeps_dtypes and flat.dtype.itemsize < torch.float32.itemsize
            with self._device.timeline.task(COMPUTE_WAITS, "a gradient buffer", block=piece.chunk.block.name):
                buffer = self._pool.acquire(half=keeps_dtype, waiting=partial(self._while_waiting, piece.chunk.block))
            arrived = self._open[piece.chunk] = ArrivedChunk(piece.chunk, buffer, flat.dtype, keeps_dtype=keeps_dtype)
        source = flat[piece.start_in_slice : piece.start_in_slice + piece.numel]
        self._device.copy(Lane.D2H, arrived.landing[piece.start_in_chunk : piece.stop_in_chunk], source)
        arrived.events.append(self._device.record(Lane.D2H))
        arrived.pieces.append(piece)
        return arrived

    def _while_waiting(self, block: Block, since_s: float) -> None:
        """No buffer comes back. Layers in which something gets no gradient (an expert that no token went to) may keep
        them all: what is open of other layers than this is taken as complete."""
        others = [arrived for arrived in self._open.values() if arrived.chunk.block is not block]
        for arrived in others:
            if arrived.chunk.block.size_class is SizeClass.LAYER:
                self._close(arrived)
        if self._pipeline.while_waiting is not None:
            self._pipeline.while_waiting(since_s)

    def _close(self, arrived: ArrivedChunk, *, has_more: bool = False) -> None:
        pipeline = self._pipeline
        is_final = not has_more and self._is_final_announced and self._is_final_backward()
        if not (is_final or pipeline.holds_gradients):
            raise RuntimeError(
                "gradients are being accumulated, but the engine was prepared to apply them as they arrive and has no "
                "room to keep them; say gradient_accumulation_steps when you make the Accelerator or the training "
                "arguments, or set max_grad_norm > 0"
            )
        loan = None
        if not pipeline.holds_gradients or pipeline.speculates:
            self._before_updates()
            loan = self._lend(arrived.chunk) if is_final else None
        del self._open[arrived.chunk]
        pipeline.submit(arrived, is_final=is_final, loan=loan)

    def flush(self) -> None:
        """Backward is over: give on the chunks in which some parameter got no gradient."""
        for arrived in list(self._open.values()):
            self._close(arrived)

    def reach(self, part: ParamSlice) -> None:
        """A backward came by what a slice has of its parameter, and has zeros for it: see `GradientPipeline.reach`."""
        self._pipeline.reach(piece.chunk for piece in self._pieces[part])

    def abandon(self) -> None:
        """Backward broke off: give incomplete chunks' buffers back."""
        for arrived in self._open.values():
            arrived.wait()
            arrived.buffer.release()
        self._open.clear()

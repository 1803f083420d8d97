"""From autograd to the host: a gradient leaves the device the moment it is complete."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from hf_lohan.device import Buffer, BufferPool, Device, Event, Lane
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice
from hf_lohan.optim import widen_in_place
from hf_lohan.timeline import COMPUTE_WAITS
from hf_lohan.updates.norms import GradientNorms


@dataclass(eq=False)
class ArrivedChunk:
    """A chunk's gradient, of one backward: in a host buffer once `wait` has returned."""

    chunk: Chunk
    buffer: Buffer
    dtype: torch.dtype
    pieces: list[ChunkPiece] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)

    @property
    def landing(self) -> Tensor:
        """Where copies land: the whole buffer, or its second half for 2-byte gradients, which are widened later."""
        start_byte = self.chunk.numel * (torch.float32.itemsize - self.dtype.itemsize)
        return self.buffer.view(self.dtype, self.chunk.numel, start_byte=start_byte)

    def wait(self) -> Tensor:
        """Have all of it in the buffer: the gradient as float32 [chunk.numel], with zeros in the padding."""
        for event in self.events:
            event.synchronize()
        self.events.clear()
        if self.dtype == torch.float32:
            gradient = self.landing
        else:
            gradient = widen_in_place(self.buffer.bytes, self.dtype, self.chunk.numel)
        for start, stop in self.chunk.gaps:
            gradient[start:stop].zero_()
        return gradient


class GradientArrivals:
    """Takes gradients from post-accumulate hooks and hands on every chunk as soon as it is complete.

    Runs on the thread of the backward. Where no host buffer is free it waits: backward is held back, memory is not
    exceeded.
    """

    def __init__(
        self,
        device: Device,
        pool: BufferPool,
        chunks: Iterable[Chunk],
        norms: GradientNorms,
        hand_on: Callable[[ArrivedChunk], None],
    ) -> None:
        self._device = device
        self._pool = pool
        self._norms = norms
        self._hand_on = hand_on
        self._open: dict[Chunk, ArrivedChunk] = {}
        self._pieces: dict[ParamSlice, list[ChunkPiece]] = {}
        for chunk in chunks:
            for piece in chunk.pieces:
                self._pieces.setdefault(piece.param_slice, []).append(piece)

    def take(self, param_slice: ParamSlice, parameter: nn.Parameter) -> None:
        """Move `parameter.grad` to the host and forget it on the device."""
        gradient = parameter.grad
        assert gradient is not None
        parameter.grad = None
        self.send(param_slice, gradient)

    def send(self, param_slice: ParamSlice, gradient: Tensor) -> None:
        """Move a parameter's whole gradient to the host."""
        if gradient.is_sparse:
            raise ValueError(f"{param_slice.name} has a sparse gradient; set sparse=False on its embedding")
        flat = gradient.contiguous().view(-1)
        self._norms.set_first(param_slice, flat)
        self._device.wait(Lane.D2H, self._device.record(Lane.COMPUTE, flat))
        for piece in self._pieces[param_slice]:
            # One after the other: a parameter may have more chunks than there are buffers.
            arrived = self._land(piece, flat)
            if len(arrived.pieces) == len(arrived.chunk.pieces):
                self._close(arrived)

    def _land(self, piece: ChunkPiece, flat: Tensor) -> ArrivedChunk:
        arrived = self._open.get(piece.chunk)
        if arrived is None:
            with self._device.timeline.task(COMPUTE_WAITS, "a gradient buffer", block=piece.chunk.block.name):
                buffer = self._pool.acquire()
            arrived = self._open[piece.chunk] = ArrivedChunk(piece.chunk, buffer, flat.dtype)
        source = flat[piece.start_in_param : piece.start_in_param + piece.numel]
        self._device.copy(Lane.D2H, arrived.landing[piece.start_in_chunk : piece.stop_in_chunk], source)
        arrived.events.append(self._device.record(Lane.D2H))
        arrived.pieces.append(piece)
        return arrived

    def _close(self, arrived: ArrivedChunk) -> None:
        del self._open[arrived.chunk]
        self._hand_on(arrived)

    def flush(self) -> None:
        """Backward is over: hand on the chunks in which some parameter got no gradient."""
        for arrived in list(self._open.values()):
            self._close(arrived)

    def abandon(self) -> None:
        """Backward broke off: give incomplete chunks' buffers back."""
        for arrived in self._open.values():
            arrived.wait()
            arrived.buffer.release()
        self._open.clear()

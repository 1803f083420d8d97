"""The gradient of one chunk: as it arrives, and as it is kept until it is applied."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.device import Buffer, Event, TopPlace
from hf_lohan.files import IoRequest
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice
from hf_lohan.optim import widen_in_place
from hf_lohan.store import RecordFiles
from hf_lohan.updates.norms import NonFiniteGradientError


@dataclass(eq=False)
class ArrivedChunk:
    """A chunk's gradient, of one backward: in a host buffer once `wait` has returned."""

    chunk: Chunk
    buffer: Buffer
    dtype: torch.dtype
    """As it came."""
    pieces: list[ChunkPiece] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    keeps_dtype: bool = False
    """It stays so, and its buffer may be half of one. Else it is widened to float32."""

    @property
    def held_dtype(self) -> torch.dtype:
        """As it is once it has been waited for."""
        return self.dtype if self.keeps_dtype else torch.float32

    @property
    def landing(self) -> Tensor:
        """Where copies land: at the buffer's beginning, or in its second half if they are to be widened."""
        start_byte = self.chunk.numel * (self.held_dtype.itemsize - self.dtype.itemsize)
        return self.buffer.view(self.dtype, self.chunk.numel, start_byte=start_byte)

    def wait(self) -> Tensor:
        """Have all of it in the buffer: the gradient [chunk.numel] as `held_dtype`, with zeros in the padding."""
        for event in self.events:
            event.synchronize()
        self.events.clear()
        if self.dtype == self.held_dtype:
            gradient = self.landing
        else:
            gradient = widen_in_place(self.buffer.bytes, self.dtype, self.chunk.numel)
        for start, stop in self.chunk.gaps:
            gradient[start:stop].zero_()
        return gradient


@dataclass(eq=False)
class ChunkGradient:
    """The gradient of one chunk, summed over a step's backwards: in RAM, or spilled to the SSD; or nowhere, for it is
    of zeros."""

    chunk: Chunk
    buffer: Buffer | TopPlace | None
    slices: set[ParamSlice]
    """Parameters that have a gradient in it."""
    dtype: torch.dtype = torch.float32
    """What came once may stay as it came. Sums are float32."""
    summed: set[ParamSlice] = field(default_factory=set)
    """Those of them to which more than one backward contributed."""
    is_measured: bool = False
    """Whether the norms of those that were summed are known."""
    spill_write: IoRequest | None = None
    spilled_to: RecordFiles | None = None
    is_zero: bool = False
    """It has no buffer and needs none, nor has it to be measured."""

    @classmethod
    def of_zeros(cls, chunk: Chunk) -> ChunkGradient:
        """For all parameters of the chunk that are trained: an expert that no token went to."""
        slices = {piece.param_slice for piece in chunk.pieces if piece.param_slice.parameter.requires_grad}
        return cls(chunk, None, slices, is_zero=True)

    @classmethod
    def of_nothing(cls, chunk: Chunk) -> ChunkGradient:
        """For none of them: the chunk takes the steps that it has missed, and not that in progress."""
        return cls(chunk, None, set(), is_zero=True)

    @property
    def values(self) -> Tensor:
        """`dtype` [chunk.numel], in its buffer."""
        assert self.buffer is not None
        return self.buffer.view(self.dtype, self.chunk.numel)

    def refuse_not_finite(self) -> None:
        """Raises NonFiniteGradientError, for where an update cannot be undone."""
        if self.is_zero:
            return
        for piece in self.chunk.pieces:
            has_gradient = piece.param_slice in self.slices  # else the buffer holds anything there
            if has_gradient and not self.values[piece.start_in_chunk : piece.stop_in_chunk].isfinite().all():
                raise NonFiniteGradientError(
                    f"the gradient of {piece.param_slice.name} is not finite, and other blocks have been updated in "
                    "place in this step already; resume from a checkpoint, with durability='step' or max_grad_norm > "
                    "0, under which such steps are skipped"
                )

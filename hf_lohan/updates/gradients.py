"""The gradients of one step on the host: a chunk's as it arrives, and as it waits for its update; and their norms."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn

from hf_lohan.device import Buffer, Event, TopPlace
from hf_lohan.files import IoRequest
from hf_lohan.model import Chunk, ChunkPiece, ParamSlice
from hf_lohan.optim import widen_in_place
from hf_lohan.store import RecordFiles

_PIECE = np.dtype([("slice", np.int64), ("chunk", np.int64), ("norm", np.float64)])


class NonFiniteGradientError(RuntimeError):
    """Gradients were NaN or infinite for too long. Names the first parameter concerned."""


class GradientNorms:
    """Mirrors `torch.nn.utils.get_total_norm`, to the bit wherever a parameter's gradient lies in one piece.

    A gradient is measured where it is whole: on the device when it is complete, or on the host after it was added to
    that of earlier backwards. Norms on the device stay there until the total is asked for. Then all come to the host
    in one copy.
    """

    def __init__(self, slices: Iterable[ParamSlice]) -> None:
        """``slices``: in the model's order. Each of several ranks measures its part of the gradients, summed over all
        ranks, and takes what others have `measured`: so all know all norms, and the same ones."""
        self._order = list(slices)
        self._first: dict[ParamSlice, Tensor] = {}
        self._summed: dict[ParamSlice, dict[int, float]] = {}
        self._on_host: dict[ParamSlice, Tensor] | None = None
        """The norms of what has a gradient, once they were asked for."""

    def set_first(self, part: ParamSlice, gradient: Tensor) -> None:
        """Measure a gradient as backward made it."""
        self._first[part] = torch.linalg.vector_norm(gradient, dtype=_dtype_of(part))
        self._on_host = None

    def set_summed(self, piece: ChunkPiece, gradient: Tensor) -> None:
        """Measure the part of a parameter's gradient, summed over backwards, that lies in one chunk."""
        norm = torch.linalg.vector_norm(gradient, dtype=_dtype_of(piece.param_slice))
        self._summed.setdefault(piece.param_slice, {})[piece.chunk.index] = float(norm)
        self._on_host = None

    def total(self) -> Tensor:
        """The 2-norm over all gradients of the step: a float32 scalar on the host.

        Of a parameter that lies in several blocks, the squares of its parts' norms are added in float64, in any order.
        Stock has one kernel go over it, which on a CPU adds squares in float32 and is off by 2e-4 at 8M elements.
        """
        norms: list[Tensor] = []
        in_parts: defaultdict[nn.Parameter, list[float]] = defaultdict(list)
        for part, norm in self._norms().items():
            if part.is_whole:
                norms.append(norm)
            else:
                in_parts[part.parameter].append(float(norm))
        norms += [torch.tensor(math.hypot(*sorted(parts)), dtype=torch.float32) for parts in in_parts.values()]
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def first_not_finite(self) -> str | None:
        """The name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        return next((part.name for part, norm in self._norms().items() if not math.isfinite(norm)), None)

    def _norms(self) -> dict[ParamSlice, Tensor]:
        if self._on_host is None:
            norms: dict[ParamSlice, Tensor] = {}
            measured = [part for part in self._order if part in self._first]
            measured.sort(key=lambda part: not part.is_whole)
            if measured:
                # In the wider of their dtypes, which changes no bit: two copies would wait twice.
                dtype = _dtype_of(measured[-1])
                on_host = torch.stack([self._first[part].to(dtype) for part in measured]).cpu()
                found = (norm.to(_dtype_of(part)) for part, norm in zip(measured, on_host, strict=True))
                norms.update(zip(measured, found, strict=True))
            for part, pieces in self._summed.items():
                numbers = list(pieces.values())
                norm = numbers[0] if len(numbers) == 1 else math.hypot(*numbers)
                norms[part] = torch.tensor(norm, dtype=_dtype_of(part))
            self._on_host = norms
        return self._on_host

    def measured(self) -> bytes:
        """What this rank has of the step, for all ranks: of each piece (slice's place in the model, chunk, norm as
        float64)."""
        place = {part: index for index, part in enumerate(self._order)}
        mine = [(place[part], chunk, norm) for part, pieces in self._summed.items() for chunk, norm in pieces.items()]
        return np.array(mine, _PIECE).tobytes()

    def take(self, measured: Iterable[bytes]) -> None:
        """The norms of the step are those of what all ranks have ``measured``, this one's among it."""
        pieces = np.concatenate([np.frombuffer(of_rank, _PIECE) for of_rank in measured])
        pieces.sort(order=("slice", "chunk"))
        self._on_host = {}
        for index in np.unique(pieces["slice"]):
            numbers = pieces["norm"][pieces["slice"] == index].tolist()
            norm = numbers[0] if len(numbers) == 1 else math.hypot(*numbers)
            self._on_host[self._order[index]] = torch.tensor(norm, dtype=_dtype_of(self._order[index]))

    @property
    def with_gradient(self) -> set[ParamSlice]:
        """What has a gradient in this step, on whichever rank."""
        return set(self._norms())

    def clear(self) -> None:
        self._first.clear()
        self._summed.clear()
        self._on_host = None


def _dtype_of(part: ParamSlice) -> torch.dtype:
    """Of its norm: float32, as stock's, where it is that of a parameter."""
    return torch.float32 if part.is_whole else torch.float64


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

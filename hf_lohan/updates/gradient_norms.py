"""The norm of each parameter's gradient, and of them all, summed as gradients arrive: no extra pass over them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_lohan.model import ChunkPiece, ParamSlice


class GradientNorms:
    """Mirrors `torch.nn.utils.get_total_norm`, to the bit wherever a parameter's gradient lies in one piece.

    A gradient is measured where it is whole: on the device when it is complete, or on the host after it was added to
    that of earlier backwards. Norms on the device stay there until the total is asked for, so nothing waits.
    """

    def __init__(self, slices: Iterable[ParamSlice]) -> None:
        self._order = list(slices)
        self._first: dict[ParamSlice, Tensor] = {}
        self._summed: dict[ParamSlice, dict[int, float]] = {}

    def set_first(self, part: ParamSlice, gradient: Tensor) -> None:
        """Measure a gradient as backward made it."""
        self._first[part] = torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def set_summed(self, piece: ChunkPiece, gradient: Tensor) -> None:
        """Measure the part of a parameter's gradient, summed over backwards, that lies in one chunk."""
        self._summed.setdefault(piece.param_slice, {})[piece.chunk.index] = float(torch.linalg.vector_norm(gradient))

    def total(self) -> Tensor:
        """The 2-norm over all gradients of the step: a float32 scalar on the host."""
        norms = [self._norm(part) for part in self._order if part in self._first]
        if not norms:
            return torch.zeros(())
        total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
        return total

    def first_not_finite(self) -> str | None:
        """The name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        measured = (part for part in self._order if part in self._first)
        return next((part.name for part in measured if not math.isfinite(self._norm(part))), None)

    def _norm(self, part: ParamSlice) -> Tensor:
        pieces = self._summed.get(part)
        if pieces is None:
            return self._first[part].cpu()
        norms = list(pieces.values())
        return torch.tensor(norms[0] if len(norms) == 1 else math.hypot(*norms), dtype=torch.float32)

    def clear(self) -> None:
        self._first.clear()
        self._summed.clear()

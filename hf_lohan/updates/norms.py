"""The norm of each parameter's gradient, and of them all, summed as gradients arrive: no extra pass over them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor

from hf_lohan.model import ChunkPiece, ParamSlice


class NonFiniteGradientError(RuntimeError):
    """Gradients were NaN or infinite for too long. Names the first parameter concerned."""


class GradientNorms:
    """Mirrors `torch.nn.utils.get_total_norm`, to the bit wherever a parameter's gradient lies in one piece.

    A gradient is measured where it is whole: on the device when it is complete, or on the host after it was added to
    that of earlier backwards. Norms on the device stay there until the total is asked for. Then all come to the host
    in one copy.
    """

    def __init__(self, slices: Iterable[ParamSlice]) -> None:
        """``slices``: in the model's order."""
        self._order = list(slices)
        self._first: dict[ParamSlice, Tensor] = {}
        self._summed: dict[ParamSlice, dict[int, float]] = {}
        self._on_host: dict[ParamSlice, Tensor] | None = None
        """The norms of what has a gradient, once they were asked for."""

    def set_first(self, part: ParamSlice, gradient: Tensor) -> None:
        """Measure a gradient as backward made it."""
        self._first[part] = torch.linalg.vector_norm(gradient, dtype=torch.float32)
        self._on_host = None

    def set_summed(self, piece: ChunkPiece, gradient: Tensor) -> None:
        """Measure the part of a parameter's gradient, summed over backwards, that lies in one chunk."""
        self._summed.setdefault(piece.param_slice, {})[piece.chunk.index] = float(torch.linalg.vector_norm(gradient))
        self._on_host = None

    def total(self) -> Tensor:
        """The 2-norm over all gradients of the step: a float32 scalar on the host."""
        norms = list(self._norms().values())
        return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())

    def first_not_finite(self) -> str | None:
        """The name of the first parameter, in the model's order, whose gradient has a NaN or an infinity."""
        return next((part.name for part, norm in self._norms().items() if not math.isfinite(norm)), None)

    def _norms(self) -> dict[ParamSlice, Tensor]:
        if self._on_host is None:
            parts = [part for part in self._order if part in self._first]
            on_device = [self._first[part] for part in parts]
            norms = dict(zip(parts, torch.stack(on_device).cpu() if parts else on_device, strict=True))
            for part, pieces in self._summed.items():
                numbers = list(pieces.values())
                norms[part] = torch.tensor(numbers[0] if len(numbers) == 1 else math.hypot(*numbers))
            self._on_host = norms
        return self._on_host

    def clear(self) -> None:
        self._first.clear()
        self._summed.clear()
        self._on_host = None

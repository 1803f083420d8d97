"""Weights that turn from old to new in the slot where they lie."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class Renewal:
    """A slot that keeps its block over a step. Each update has the old weights of its chunk from there, not from the
    SSD, and leaves the new ones in their place; what is not updated is right as it is."""

    weights: Tensor
    """[block.numel], on the device. The H2D lane waits for whoever computed with the old ones."""
    ended: Callable[[BaseException | None], None]
    """Called when the copies of all new weights are enqueued on the H2D lane, or with what made that impossible."""

"""The mean of several ranks' gradients, to the bit whatever came first: one fixed order for each element."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SUM_TILE_NUMEL = 64 * 1024
"""What is added at once stays in a core's cache."""


def sum_in_rank_order_(out: Tensor, parts: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Set `out` to the sum of `parts`, in their order and in float32, each first multiplied by float32(1 / num_ranks).

    That is what DDP does with float32 gradients whose sum is in rank order. `out`: float32 [numel]; `parts`: [numel],
    float32 or less. One of them may lie in the memory of `out`: where that begins, or, of fewer bytes an element, at
    its end. Raises ValueError where it lies so that it would be overwritten before it is read.
    """
    if not parts:
        raise ValueError("there are no gradients to sum; give at least one")
    overlaps = False
    for part in parts:
        if part.shape != out.shape:
            raise ValueError(f"a gradient of shape {list(part.shape)} cannot be added to {list(out.shape)} elements")
        if overlap(out, part):
            _refuse_overwriting(out, part)
            overlaps = True
    scale = 1.0 / num_ranks
    numel = out.numel()
    widened = torch.empty(min(SUM_TILE_NUMEL, numel), dtype=torch.float32)
    total = torch.empty_like(widened) if overlaps else None
    for start in range(0, numel, SUM_TILE_NUMEL):
        stop = min(start + SUM_TILE_NUMEL, numel)
        goal = out[start:stop]
        tile = goal if total is None else total[: stop - start]
        tile.copy_(parts[0][start:stop]).mul_(scale)
        for part in parts[1:]:
            # Multiplied before it is added, in two operations: one that fuses them rounds once where DDP rounds twice.
            tile.add_(widened[: stop - start].copy_(part[start:stop]).mul_(scale))
        if tile is not goal:
            goal.copy_(tile)
    return out


def overlap(one: Tensor, other: Tensor) -> bool:
    """Whether two contiguous tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _refuse_overwriting(out: Tensor, part: Tensor) -> None:
    """Raises ValueError where tiles of `out` would be written over elements of `part` that come after them."""
    # Element i of `out` ends at 4 (i + 1). What lies there in `part` must not be an element after i, up to the last.
    offset = part.data_ptr() - out.data_ptr()
    if offset < (out.itemsize - part.itemsize) * out.numel():
        raise ValueError(
            f"a gradient lies {offset} bytes behind the beginning of the memory for the sum, where it would be "
            "overwritten before it is read; sum into other memory, or have it end where that ends"
        )

"""Averages the gradients of several ranks in a fixed order, so that the bits do not depend on the order of arrival."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

SUM_TILE_NUMEL = 64 * 1024
"""Number of elements that are added at once. They stay in a core's cache."""


def sum_in_rank_order_(out: Tensor, parts: Sequence[Tensor], num_ranks: int) -> Tensor:
    """Set `out` to the float32 sum of `parts` in their order. Each part is first multiplied by float32(1 / num_ranks).
    DDP computes the same with float32 gradients that are reduced in rank order. `out` is float32 [numel]. `parts` are
    [numel], float32 or a smaller type. One part may share memory with `out` if it begins where `out` begins or, with a
    smaller type, ends where `out` ends. Raises ValueError if a part would be overwritten before it is read."""
    if not parts:
        raise ValueError("got no gradients to sum; pass at least one")
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
            # Multiply and add in two operations, because a fused operation rounds once and DDP rounds twice.
            tile.add_(widened[: stop - start].copy_(part[start:stop]).mul_(scale))
        if tile is not goal:
            goal.copy_(tile)
    return out


def overlap(one: Tensor, other: Tensor) -> bool:
    """Return whether two contiguous tensors share memory."""
    return one.data_ptr() < other.data_ptr() + other.nbytes and other.data_ptr() < one.data_ptr() + one.nbytes


def _refuse_overwriting(out: Tensor, part: Tensor) -> None:
    """Raise ValueError if writing a tile of `out` overwrites later elements of `part`."""
    # Element i of `out` ends at byte 4 (i + 1). No element of `part` after i may begin before that.
    offset = part.data_ptr() - out.data_ptr()
    if offset < (out.itemsize - part.itemsize) * out.numel():
        raise ValueError(
            f"a gradient begins {offset} bytes after the memory for the sum and would be overwritten before it is "
            "read; sum into other memory, or let the gradient end where that memory ends"
        )

"""What ranks have of a chunk's gradient, and how a message says it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from hf_lohan.ranks.messages import PayloadReader

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
"""A message has the place of one here."""
_SMALL_BITS = 62
"""So many bits go into a message's number."""


@dataclass(frozen=True)
class GradientPart:
    """What one rank has of a chunk's gradient."""

    rank: int
    values: Tensor | None
    """[numel], in memory that this rank reads; None if it has none."""
    slice_bits: int
    """Which parameters it has a gradient of. Elsewhere `values` are zero."""


@dataclass(eq=False)
class ChunkParts:
    """What has come of one."""

    parts: dict[int, GradientPart] = field(default_factory=dict)
    """Of the ranks of this box."""
    boxes: dict[int, tuple[int, int]] = field(default_factory=dict)
    """At the owner, by box: elements, or 0 where it has none, and slice bits."""
    is_told: bool = False
    """At the owner: `completed` was called. Elsewhere: the owner knows that this box is complete."""

    def in_rank_order(self) -> list[GradientPart]:
        return [self.parts[rank] for rank in sorted(self.parts)]


def packed_bits(bits: int) -> tuple[tuple[int, ...], bytes]:
    """As a number of a message if they are few, else as its payload."""
    if bits < 1 << _SMALL_BITS:
        return (bits,), b""
    return (), bits.to_bytes(-(-bits.bit_length() // 8), "little")


def unpacked_bits(numbers: list[int], payload: PayloadReader | None) -> int:
    """What `packed_bits` made of them."""
    return int.from_bytes(payload.bytes(), "little") if payload is not None else numbers[0]

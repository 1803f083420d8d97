"""Chooses the updates that are parked: their gradients wait until the next forward comes near their blocks.

In a backward gradients arrive from the last block to the first, and the next forward needs the first block first. While
B of the backward and F of the forward take the drives, no more than about F / (B + F) of the updates fit under the
forward. If the parked ones are spread evenly over the model, then at each moment of the backward the share of
arrived gradients that may be applied is the same, so the drives never lack work, and at each block of the forward the
share of updates that must be done is the same, so computing waits as little as possible. Any other set of the same size
makes one of the two wait: the first blocks are needed too early, and the last blocks leave the drives without work when
the backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence


def spread_share(numels: Sequence[float], share: float) -> list[bool]:
    """Return which of the chunks, with `numels` elements each, in forward order, make up ``share`` of the elements.
    After every chunk, at most ``share`` of the elements so far is chosen."""
    chosen, owed = [], 0.0
    for numel in numels:
        owed += share * numel
        chosen.append(share > 0 and owed >= numel * (1 - 1e-9))
        owed -= numel if chosen[-1] else 0.0
    return chosen

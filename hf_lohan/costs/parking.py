"""Chooses the updates that are parked: their gradients wait until the next forward is near their blocks.

In a backward gradients arrive from the last block to the first, and the next forward needs the first block first. If
the forward takes F seconds and the backward B seconds, about F / (B + F) of the updates can run during the forward.
Parked updates are spread evenly over the model. At each moment of the backward the same share of the arrived gradients
may be applied, so the drives never lack work. At each block of the forward the same share of its updates must be done,
so computing waits as little as possible. Any other set of the same size makes computing or the drives wait: the first
blocks are needed too early, and the last blocks leave the drives without work when the backward begins.
"""

from __future__ import annotations

from collections.abc import Sequence


def spread_share(numels: Sequence[float], share: float) -> list[bool]:
    """Return whether each chunk is chosen, so that the chosen chunks have ``share`` of all elements. `numels`: elements
    of each chunk, in forward order. After every chunk, at most ``share`` of the elements so far is chosen."""
    chosen, owed = [], 0.0
    for numel in numels:
        owed += share * numel
        chosen.append(share > 0 and owed >= numel * (1 - 1e-9))
        owed -= numel if chosen[-1] else 0.0
    return chosen

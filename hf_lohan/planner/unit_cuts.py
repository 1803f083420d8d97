"""Where a block's records are cut into chunks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache


def cut_units(unit_numels: Sequence[int], chunk_numel: int) -> list[tuple[int, int]]:
    """Cut a row of units into chunks [start, stop) of at most `chunk_numel` elements.

    A unit is a parameter with the small ones behind it. Units that fit are not cut: what is measured over a whole
    parameter (its gradient's norm) is then measured in one piece, by the same kernel as in memory, to the same bit.
    """
    chunks: list[tuple[int, int]] = []
    start = stop = 0
    for numel in unit_numels:
        if start < stop and stop + numel - start > chunk_numel:
            chunks.append((start, stop))
            start = stop
        stop += numel
        while stop - start > chunk_numel:
            chunks.append((start, start + chunk_numel))
            start += chunk_numel
    if start < stop:
        chunks.append((start, stop))
    return chunks


@cache
def num_chunks(unit_numels: tuple[int, ...], chunk_numel: int) -> int:
    """How many chunks `cut_units` makes, without making them: a layer of a large model has a hundred thousand."""
    count = held = 0
    for numel in unit_numels:
        if held and held + numel > chunk_numel:
            count, held = count + 1, 0
        held += numel
        if held > chunk_numel:
            whole = (held - 1) // chunk_numel
            count, held = count + whole, held - whole * chunk_numel
    return count + (held > 0)

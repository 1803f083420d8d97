"""Where a block's records are cut into chunks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate


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


TRAINED_COST = 8
"""A trainable element moves about so many times the bytes of a frozen one in a step."""
SMALL_NUMEL = 4 * 1024 * 1024
"""Blocks of up to so many elements are cut between units only: a rank that has more of one has less of another."""
_IMBALANCE = 0.02


def cut_for_ranks(
    unit_numels: Sequence[int], numel: int, num_ranks: int, *, granule_numel: int, keeps_units: bool = False
) -> tuple[int, ...]:
    """Where a block of ``numel`` elements is cut into contiguous parts, one for each rank: ``num_ranks`` + 1 edges, the
    first 0, the last ``numel``; a part may be empty.

    ``unit_numels`` are those of its trainable part (see `cut_units`), frozen elements follow. Cuts lie at granules.
    They lie between units where that costs at most `_IMBALANCE` of a part, in small blocks, and with ``keeps_units``:
    then the norm of each parameter's gradient is measured in one piece.
    """
    units = [0, *accumulate(unit_numels)]
    trained = units[-1]
    total = TRAINED_COST * trained + max(0, numel - trained)
    edges = [0]
    for rank in range(1, num_ranks):
        wanted = _element_at(total * rank / num_ranks, trained)
        nearest = _nearest(units, wanted)
        is_near = abs(nearest - wanted) <= _IMBALANCE * numel / num_ranks
        if wanted < trained and (keeps_units or is_near or numel <= SMALL_NUMEL):
            edge = nearest
        else:
            edge = round(wanted / granule_numel) * granule_numel
        edges.append(min(max(edge, edges[-1]), numel))
    return (*edges, numel)


def _element_at(cost: float, trained: int) -> float:
    """Where so much of a block's cost lies before."""
    return cost / TRAINED_COST if cost <= TRAINED_COST * trained else trained + cost - TRAINED_COST * trained


def _nearest(units: Sequence[int], wanted: float) -> int:
    place = bisect_left(units, wanted)
    return min(units[max(0, place - 1) : place + 1], key=lambda edge: abs(edge - wanted))


def units_between(unit_numels: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """The sizes of what of the units lies in elements [start, stop)."""
    found, first = [], 0
    for numel in unit_numels:
        low, high = max(start, first), min(stop, first + numel)
        if low < high:
            found.append(high - low)
        first += numel
    return tuple(found)

"""Cuts a block's records into chunks, and into shards for ranks."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache
from itertools import accumulate, chain, pairwise

_EVEN_PARTS = 16
"""Ranks have about equally many rows if the most loaded rank has at most 1 + 1 / `_EVEN_PARTS` times the mean."""
_NUM_TRIED = 16
"""Number of long segments that are searched for a segment of the receiver's own rows."""


def cut_units(unit_numels: Sequence[int], chunk_numel: int) -> list[tuple[int, int]]:
    """Cut a row of units into chunks [start, stop) of at most `chunk_numel` elements. A unit is a parameter with the
    small parameters after it. Units that fit are not cut, so that one kernel computes the norm of a whole gradient, as
    in memory, with the same bits."""
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
    """Return the number of chunks of `cut_units` without making the list, because a layer of a large model has a
    hundred thousand chunks."""
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
"""In a step, a trainable element moves about this number of times the bytes of a frozen element."""
SMALL_NUMEL = 4 * 1024 * 1024
"""Blocks of at most this size are cut only between units. Uneven shards of several blocks balance out."""
_IMBALANCE = 0.02


def cut_for_ranks(
    unit_numels: Sequence[int],
    numel: int,
    num_ranks: int,
    *,
    granule_numel: int,
    keeps_units: bool = False,
    packed_numels: Sequence[int] = (),
    packed_granule_numel: int = 1,
) -> tuple[int, ...]:
    """Cut a block of ``numel`` elements into contiguous shards, one for each rank. Returns ``num_ranks`` + 1 edges,
    from 0 to the end of the block. A shard may be empty.

    ``unit_numels``: the units of the trainable elements (see `cut_units`). Frozen elements follow these. Cuts are at
    granules. A cut is between units in small blocks, with ``keeps_units``, or if that moves it by at most `_IMBALANCE`
    of a shard. The norm of each parameter's gradient is then computed in one piece. ``packed_numels``: sizes of the
    records of packed weights, which follow the ``numel`` elements and have granules of ``packed_granule_numel``.
    """
    records = [(numel, granule_numel), *((packed, packed_granule_numel) for packed in packed_numels)]
    numel += sum(packed_numels)
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
            edge = _nearest_granule(records, wanted)
        edges.append(min(max(edge, edges[-1]), numel))
    return (*edges, numel)


def _nearest_granule(records: Sequence[tuple[int, int]], wanted: float) -> int:
    """Return the nearest start of a granule or end of a record. ``records``: their sizes and granules."""
    start = 0
    for numel, granule in records:
        if wanted <= start + numel:
            return start + min(round((wanted - start) / granule) * granule, numel)
        start += numel
    return start


def owned_experts(num_experts: int, layer: int, num_ranks: int) -> list[range]:
    """Return, for each rank, the range of indices of the experts that it owns in a layer. A range may be empty. The
    first range belongs to a different rank in each layer, so that ranges of unequal size balance out."""
    edges = [-(-part * num_experts // num_ranks) for part in range(num_ranks + 1)]
    ranges = [range(first, last) for first, last in pairwise(edges)]
    return [ranges[(rank - layer) % num_ranks] for rank in range(num_ranks)]


def balanced_experts(counts: Sequence[Sequence[float]], num_ranks: int, num_local: int) -> list[list[list[int]]]:
    """Return, for each layer and rank, the experts that the rank owns so that ranks have about equally many rows.

    ``counts`` [layers][experts]: the rows of each expert. Experts are divided among nodes of ``num_local`` ranks, and
    then among the ranks of each node. The expert with the most rows is assigned first, to the receiver with the fewest
    rows. Receivers have numbers of experts that differ by at most one. A layer keeps its ranges (`owned_experts`) if
    they are as balanced.
    """
    nodes = [range(first, first + num_local) for first in range(0, num_ranks, num_local)]
    divided: list[list[list[int]]] = []
    for layer, of_layer in enumerate(counts):
        ranges = [list(own) for own in owned_experts(len(of_layer), layer, num_ranks)]
        own: list[list[int]] = [[] for _ in range(num_ranks)]
        turn = layer % len(nodes)  # the remainder of a division goes to a different node and rank in each layer
        in_turn = nodes[turn:] + nodes[:turn]
        of_nodes = _longest_first(of_layer, range(len(of_layer)), len(nodes))
        for node, experts in zip(in_turn, of_nodes, strict=True):
            ranks = [node[(layer + index) % num_local] for index in range(num_local)]
            for rank, of_rank in zip(ranks, _longest_first(of_layer, experts, num_local), strict=True):
                own[rank] = sorted(of_rank)
        ways = [
            (most_rows(of_layer, way), most_rows(of_layer, [[*chain(*way[of.start : of.stop])] for of in nodes]), way)
            for way in (ranges, own)
        ]
        divided.append(min(ways, key=lambda way: way[:2])[2])
    return divided


def _longest_first(counts: Sequence[float], experts: Sequence[int], num_parts: int) -> list[list[int]]:
    """Divide experts into parts with about equally many rows, whose sizes differ by at most one."""
    least, num_larger = divmod(len(experts), num_parts)
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    rows = [0.0] * num_parts
    for expert in sorted(experts, key=lambda expert: (-counts[expert], expert)):
        may_grow = num_larger > 0
        open_parts = [part for part in range(num_parts) if len(parts[part]) < least + may_grow]
        part = min(open_parts, key=lambda part: (rows[part], part))
        num_larger -= len(parts[part]) == least
        parts[part].append(expert)
        rows[part] += counts[expert]
    return parts


def most_rows(counts: Sequence[float], owned: Sequence[Sequence[int]]) -> float:
    """Return the rows of the rank with the most rows in a layer. ``owned``: the experts of each rank."""
    return max(sum(counts[expert] for expert in own) for own in owned)


def shared_segments(
    counts: Sequence[Sequence[int]], owners: Sequence[int], num_local: int, least_rows: int
) -> dict[tuple[int, int], int]:
    """Return the segments of a layer's rows that another rank of the owner's node computes, so that the ranks of a node
    have about equally many rows. The keys are (expert, source rank), the values are the computing ranks. A segment is
    the rows that one rank has for one expert.

    ``counts`` [ranks][experts]: the number of rows of each segment. ``owners``: each expert's rank. Segments with fewer
    than ``least_rows`` rows stay with their owners. The result depends on nothing else, so all ranks agree.
    """
    shared: dict[tuple[int, int], int] = {}
    for first in range(0, len(counts), num_local):
        loads = dict.fromkeys(range(first, first + num_local), 0)
        movable: dict[int, list[tuple[int, int, int]]] = {rank: [] for rank in loads}
        for expert, owner in enumerate(owners):
            if owner in loads:
                numbers = [of_source[expert] for of_source in counts]
                loads[owner] += sum(numbers)
                segments = ((number, -expert, -source) for source, number in enumerate(numbers))
                movable[owner] += [segment for segment in segments if segment[0] >= max(1, least_rows)]
        for segments_of_owner in movable.values():
            segments_of_owner.sort()
        total = sum(loads.values())
        while True:
            most = max(loads, key=lambda rank: (loads[rank], -rank))
            least = min(loads, key=lambda rank: (loads[rank], rank))
            if _EVEN_PARTS * loads[most] * num_local <= (_EVEN_PARTS + 1) * total:
                break
            place = _segment_to_move(movable[most], loads[most] - loads[least], least)
            if place is None:
                break
            number, expert, source = movable[most].pop(place)
            shared[-expert, -source] = least
            loads[most] -= number
            loads[least] += number
    return shared


def _segment_to_move(segments: Sequence[tuple[int, int, int]], gap: int, to_rank: int) -> int | None:
    """Return the index of the segment whose move to another rank evens out a difference of ``gap`` rows best; None if
    no move does. ``segments`` are sorted. Among the longest segments, one with the other rank's own rows is preferred,
    because these rows need not be sent."""
    longer = bisect_left(segments, (gap // 2 + 1,))
    place = longer - 1
    most = segments[place][0] if longer else 0
    if longer < len(segments) and segments[longer][0] < gap - most:
        place, most = longer, segments[longer][0]
    if place < 0:
        return None
    nearly = (tried for tried in range(place, max(-1, place - _NUM_TRIED), -1) if 2 * segments[tried][0] >= most)
    return next((tried for tried in nearly if -segments[tried][2] == to_rank), place)


def _element_at(cost: float, trained: int) -> float:
    """Return the element up to which the elements of the block have this cost in total."""
    return cost / TRAINED_COST if cost <= TRAINED_COST * trained else trained + cost - TRAINED_COST * trained


def _nearest(units: Sequence[int], wanted: float) -> int:
    index = bisect_left(units, wanted)
    return min(units[max(0, index - 1) : index + 1], key=lambda edge: abs(edge - wanted))


def units_between(unit_numels: Sequence[int], start: int, stop: int) -> tuple[int, ...]:
    """Return the sizes of the units within elements [start, stop)."""
    numels, first = [], 0
    for numel in unit_numels:
        low, high = max(start, first), min(stop, first + numel)
        if low < high:
            numels.append(high - low)
        first += numel
    return tuple(numels)

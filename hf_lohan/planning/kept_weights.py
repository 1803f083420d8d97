"""What ranks on several nodes keep of each other's weights, as the setting `collectives` asks."""

from __future__ import annotations

from collections.abc import Sequence

from hf_lohan.config import Collectives
from hf_lohan.model import Block
from hf_lohan.model.stored_form import dtype_name
from hf_lohan.ranks import WEIGHTS_INT8, Ranks
from hf_lohan.store import RecordSpec

_MESSAGES_AT_ONCE = 2
"""So many blocks are under way at a time."""


def kept_ranks(ranks: Ranks, *, keeps_own: bool) -> list[int]:
    """Whose parts of each block a rank keeps: those that pass through it and, to tell later what changed, its own."""
    return [*ranks.counterparts, *([ranks.rank] if keeps_own else [])]


def part_bytes(block: Block, rank: int) -> int:
    """Of a rank's part of a block's weights."""
    first, last = block.rank_ranges[rank]
    return (last - first) * block.master.working_dtype.itemsize


def kept_record_name(block: Block, rank: int) -> str:
    """Of a part in the file of what is kept."""
    return f"{block.name} of rank {rank}"


def kept_records(blocks: Sequence[Block], ranks: Ranks, collectives: Collectives) -> tuple[RecordSpec, ...]:
    """Scratch records for what a rank keeps where RAM has no room for it."""
    keeps_own = collectives.forward == "delta"
    return tuple(
        RecordSpec(
            kept_record_name(block, rank),
            "param",
            dtype_name(block.master.working_dtype),
            last - first,
            granule_numel=block.granule_numel,
            first=first,
        )
        for block in blocks
        for rank in kept_ranks(ranks, keeps_own=keeps_own)
        for first, last in [block.rank_ranges[rank]]
        if first < last
    )


def kept_bytes(blocks: Sequence[Block], ranks: Ranks, collectives: Collectives) -> int:
    """RAM for what a rank keeps: of the rank that keeps most, for all plan alike."""
    if ranks.num_nodes == 1 or not collectives.keeps_weights:
        return 0
    keeps_own = collectives.forward == "delta"
    of_ranks = [kept_ranks(ranks.of_rank(rank), keeps_own=keeps_own) for rank in range(ranks.num_ranks)]
    return max(sum(part_bytes(block, other) for block in blocks for other in others) for others in of_ranks)


def message_bytes(blocks: Sequence[Block], ranks: Ranks, collectives: Collectives) -> int:
    """RAM for messages that are not sent from where weights lie: those of the rank with the largest parts."""
    if ranks.num_nodes == 1 or collectives.forward == "exact":
        return 0
    parts = [(block, first, last) for block in blocks for first, last in block.rank_ranges]
    if collectives.forward == "int8":
        return _MESSAGES_AT_ONCE * max(WEIGHTS_INT8.message_bytes(last - first) for _, first, last in parts)
    # And what a part was before, where that comes from the SSD.
    itemsizes = [(last - first) * block.master.working_dtype.itemsize for block, first, last in parts]
    return 2 * _MESSAGES_AT_ONCE * max(itemsizes)

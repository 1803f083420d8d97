"""Computes the bytes of a node's copy of all weights, in RAM or on the SSD, of the payloads that the node sends, and of
the experts that ranks lend each other."""

from __future__ import annotations

from collections.abc import Sequence

from hf_lohan.config import AUTO, Collectives
from hf_lohan.costs import SizeClass
from hf_lohan.costs.collectives import WEIGHT_FORMAT, WithinCodec
from hf_lohan.costs.record_traffic import PARAM
from hf_lohan.model import Block
from hf_lohan.ranks import Ranks
from hf_lohan.store import RecordSpec

_PAGE_BYTES = 4096
_PAYLOADS_AT_ONCE = 2
"""Number of blocks that are sent at the same time."""


def group_counterparts(ranks: Ranks, way: Collectives) -> list[int]:
    """Return the counterparts of a rank on the other nodes that keep one copy together with its node."""
    of_group = way.nodes_of_group(ranks.num_local)
    group = ranks.node // of_group
    return [rank for rank in ranks.counterparts if rank // ranks.num_local // of_group == group]


def kept_ranks(ranks: Ranks, way: Collectives) -> list[int]:
    """Return the ranks whose shards a rank keeps. A rank and its counterparts in its group divide the shards of other
    groups among themselves. If changes are sent, a rank also keeps its own shard, to compute the changes."""
    of_group, in_group = way.nodes_of_group(ranks.num_local), group_counterparts(ranks, way)
    received = [rank for rank in ranks.counterparts if rank not in in_group]
    return [*received[ranks.node % of_group :: of_group], *([ranks.rank] if way.keeps_own else [])]


def carried_ranks(ranks: Ranks, way: Collectives) -> list[int]:
    """Return the ranks whose shards a rank sends to its counterparts in its group: itself and its `kept_ranks`."""
    return [ranks.rank, *kept_ranks(ranks, way)]


def part_bytes(block: Block, rank: int) -> int:
    """Return the bytes of a rank's shard of a block's weights."""
    first, last = block.rank_ranges[rank]
    return (last - first) * block.master.working_dtype.itemsize


def kept_record_name(block: Block, rank: int) -> str:
    """Return the name of a shard in the scratch file."""
    return f"{block.name} of rank {rank}"


def kept_records(blocks: Sequence[Block], ranks: Ranks, way: Collectives) -> tuple[RecordSpec, ...]:
    """Return scratch records for the shards that a rank keeps on the SSD; empty if it keeps none there."""
    if way.backward != "ssd":
        return ()
    return tuple(
        RecordSpec(
            kept_record_name(block, rank),
            "param",
            "uint8",
            part_bytes(block, rank),
            granule_numel=block.granule_numel * block.master.working_dtype.itemsize,
        )
        for block in blocks
        for rank in kept_ranks(ranks, way)
        if part_bytes(block, rank)
    )


def kept_bytes(blocks: Sequence[Block], ranks: Ranks, way: Collectives) -> int:
    """Return the bytes of the node's copy that a rank keeps, in RAM or on the SSD. This is the maximum over all
    ranks."""
    if way.backward == "world":
        return 0
    kept_by_rank = [kept_ranks(ranks.of_rank(rank), way) for rank in range(ranks.num_ranks)]
    return max(sum(part_bytes(block, other) for block in blocks for other in kept) for kept in kept_by_rank)


def coded_bytes_within(block: Block, within: WithinCodec) -> int:
    """Return the bytes of the payload in which the block is sent to devices; 0 if the block is sent unchanged."""
    return 0 if within == "exact" or block.packed_slices else WEIGHT_FORMAT.payload_bytes(block.numel)


def message_bytes(blocks: Sequence[Block], ranks: Ranks, way: Collectives) -> int:
    """Return the bytes of RAM for payloads that need separate buffers. This is the maximum over all ranks."""
    grouped = 0
    if group_counterparts(ranks, way):
        of_ranks = [carried_ranks(ranks.of_rank(rank), way) for rank in range(ranks.num_ranks)]
        grouped = _PAYLOADS_AT_ONCE * max(
            sum(part_bytes(block, rank) for rank in carried) for block in blocks for carried in of_ranks
        )
    if way.forward == "exact":
        return grouped
    parts = [(block, rank) for block in blocks for rank in range(len(block.rank_ranges))]
    if way.forward == "int8":
        return grouped + _PAYLOADS_AT_ONCE * max(
            WEIGHT_FORMAT.payload_bytes(coded_numel(block, rank)) + _packed_bytes(block, rank) for block, rank in parts
        )
    # A change also needs the previous shard, which may come from the SSD.
    return 2 * _PAYLOADS_AT_ONCE * max(part_bytes(block, rank) for block, rank in parts)


def coded_numel(block: Block, rank: int) -> int:
    """Return the number of elements of a rank's shard that a codec may round. Packed weights follow them."""
    start, stop = block.record_ranges(PARAM)[rank]
    return stop - start


def _packed_bytes(block: Block, rank: int) -> int:
    """Return the bytes of packed weights in a rank's shard. They are sent unchanged, even with a codec."""
    return part_bytes(block, rank) - coded_numel(block, rank) * block.master.working_dtype.itemsize


def lent_expert_bytes(balance: int | str, ranks: Ranks, blocks: Sequence[Block]) -> int:
    """Return the bytes, in whole pages, for an expert that a rank lends to another rank of its node; 0 if ranks lend
    none. Raises ValueError if ranks should lend experts, but experts are loaded with their layers."""
    if balance in (AUTO, False) or ranks.num_local == 1:
        return 0
    experts = [block.param_bytes for block in blocks if block.size_class is SizeClass.EXPERT]
    if not experts:
        raise ValueError(
            f"experts.balance: {balance} is set, but each rank loads all weights of a layer, so that no "
            "rank owns an expert; set experts to streamed and experts.parallel to world for a mixture of experts, or "
            "experts.balance to false"
        )
    return -(-max(experts) // _PAGE_BYTES) * _PAGE_BYTES


def lending_bytes(expert_bytes: int) -> int:
    """Return the bytes of each rank's RAM for an expert that it lends, and a gradient of an expert that it borrows."""
    return 2 * expert_bytes

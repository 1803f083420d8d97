"""Computes the bytes that a step reads of each record, and chooses the records with a copy in RAM. These save the most
SSD reads per byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hf_lohan.costs.pool_plan import BlockShape, SizeClass

PARAM = "param"
"""The kind of records that passes read. Updates read all kinds."""
FETCHED_KINDS = (PARAM, "codes", "scales")
"""The kinds that passes read if weights are packed."""
ROWS_SHARE = 16
"""If only rows of a table are loaded, a forward is assumed to read 1 / `ROWS_SHARE` of the table. Its batch is
not known when copies are chosen."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordTraffic:
    """The size of one record's copy in RAM, and the reads that it saves."""

    block: str
    kind: str
    num_bytes: int
    read_bytes_per_step: int
    """Bytes that a step reads from the SSD without a copy. A copy saves no writes, because commits need them."""
    update_read_bytes: int = 0
    """The part of `read_bytes_per_step` that the optimizer reads."""
    is_expert_weight: bool = False
    """Whether the record is an expert's weights, which only steps with tokens for the expert read in full."""


def step_traffic(
    blocks: Sequence[BlockShape],
    *,
    param_itemsize: int,
    state_itemsizes: Mapping[str, float],
    num_slots: Mapping[SizeClass, int],
) -> list[RecordTraffic]:
    """Return the traffic of each record in a step of one micro-batch, with blocks in forward order. `state_itemsizes`:
    bytes of a parameter by kind. A forward or a backward reads a block unless it is still in a slot. The last blocks of
    a forward are the first of the backward. The last blocks of a backward are the first of the next forward, if no
    update is between them. An update reads all records again. A step is assumed to reach every expert."""
    layers = [block.name for block in blocks if block.size_class is SizeClass.LAYER]
    num_outer = sum(block.size_class is SizeClass.OUTER for block in blocks)
    num_kept = num_slots[SizeClass.LAYER]
    at_start, at_end = set(layers[:num_kept]), set(layers[max(0, len(layers) - num_kept) :])

    def num_pass_reads(block: BlockShape) -> int:
        is_new = block.num_trainable_params > 0
        if block.size_class is SizeClass.EXPERT:
            return 2
        if block.size_class is SizeClass.LAYER:
            return int(block.name not in at_start or is_new) + int(block.name not in at_end)
        stays = block.size_class is SizeClass.RESIDENT or num_slots[SizeClass.OUTER] >= num_outer
        return int(is_new or not stays)

    def pass_read_bytes(block: BlockShape, num_bytes: int) -> int:
        if block.size_class is SizeClass.ROWS:
            return num_bytes // ROWS_SHARE
        return num_pass_reads(block) * num_bytes

    records = []
    for block in blocks:
        state_numel = sum(block.unit_numels)
        trained_bytes = state_numel * param_itemsize
        kinds = {
            kind: (num_bytes, pass_read_bytes(block, num_bytes), trained_bytes if kind == PARAM else 0)
            for kind, num_bytes in block.fetched_bytes.items()
        }
        if state_numel:
            sizes = {kind: int(state_numel * itemsize) for kind, itemsize in state_itemsizes.items()}
            kinds |= {kind: (size, 0, size) for kind, size in sizes.items()}
        records += [
            RecordTraffic(
                block=block.name,
                kind=kind,
                num_bytes=num_bytes,
                read_bytes_per_step=fetched_bytes + update_bytes,
                update_read_bytes=update_bytes,
                is_expert_weight=kind in FETCHED_KINDS and block.size_class is SizeClass.EXPERT,
            )
            for kind, (num_bytes, fetched_bytes, update_bytes) in kinds.items()
        ]
    return records


def choose_resident_records(records: Sequence[RecordTraffic], *, free_bytes: int) -> tuple[RecordTraffic, ...]:
    """Return the records to copy to `free_bytes` of RAM. Records that save the most reads per byte are first. Records
    that save the same are spread evenly over the model, so that the remaining reads of a block overlap with the
    computation of neighbouring blocks. Among these, weights of experts are last, because not every batch needs them.
    More memory saves at least as many reads."""
    by_benefit: dict[tuple[float, bool], list[RecordTraffic]] = defaultdict(list)
    for record in records:
        if record.read_bytes_per_step:
            saved = record.read_bytes_per_step / record.num_bytes
            by_benefit[saved, not record.is_expert_weight].append(record)
    room_bytes = free_bytes
    chosen = set()
    for benefit in sorted(by_benefit, reverse=True):
        for index in spread(len(by_benefit[benefit])):
            record = by_benefit[benefit][index]
            if record.num_bytes <= room_bytes:
                room_bytes -= record.num_bytes
                chosen.add(record)
    return tuple(record for record in records if record in chosen)


def spread(count: int) -> list[int]:
    """Return 0 to `count` - 1 in bit-reversed order, so that every prefix is evenly spread."""
    num_bits = count.bit_length()
    return sorted(range(count), key=lambda index: int(f"{index:0{num_bits}b}"[::-1], 2))

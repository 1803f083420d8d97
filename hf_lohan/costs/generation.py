"""Chooses the layers that stay on the device while a model generates, and computes the bytes that each token reads.

Every pass needs every block once, in the same order. A ring of slots that replaces the least recently used block would
read the whole model for each token. Instead, some layers stay, and the others pass through a small ring.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hf_lohan.costs.pool_plan import MIN_EXPERT_SLOTS, BlockShape, BudgetError, SizeClass
from hf_lohan.costs.record_traffic import ROWS_SHARE, RecordTraffic, spread
from hf_lohan.wording import format_bytes, times


@dataclass(frozen=True, kw_only=True, slots=True)
class KeysAndValues:
    """The cache of keys and values of all tokens so far."""

    num_sequences: int
    """The number of prompts times the number of beams."""
    num_tokens: int
    """Tokens of each sequence, including its prompt."""
    num_bytes: int
    """Bytes of all sequences."""

    def __str__(self) -> str:
        sequences = times(self.num_sequences, "sequence")
        return f"keys and values of {sequences} of {self.num_tokens:,} tokens ({format_bytes(self.num_bytes)})"


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationSlots:
    """How device memory is divided among layers and experts."""

    num_layer_slots: int
    kept_layers: tuple[str, ...]
    """Layers that stay on the device. They are evenly spread, so that other layers are read while these compute."""
    num_expert_slots: int
    """Slots of streamed experts. They hold the experts of the last tokens."""


def slots_for_generation(
    blocks: Sequence[BlockShape], *, gpu_memory_bytes: int, keys_and_values: KeysAndValues, prefetch_blocks: int
) -> GenerationSlots:
    """Divide the part of ``gpu_memory_bytes`` that keys and values leave among four uses: a ring of ``prefetch_blocks``
    + 1 slots, slots for modules outside the layers, layers that stay, and experts. Raises BudgetError if two layers,
    two experts, the largest module outside the layers, and the keys and values do not fit."""

    def sizes(size_class: SizeClass) -> list[int]:
        return [block.param_bytes for block in blocks if block.size_class is size_class]

    layer_bytes, outer_bytes = max(sizes(SizeClass.LAYER)), max(sizes(SizeClass.OUTER), default=0)
    num_layers, num_outer = len(sizes(SizeClass.LAYER)), len(sizes(SizeClass.OUTER))
    resident_bytes = max(sizes(SizeClass.RESIDENT), default=0) * len(sizes(SizeClass.RESIDENT))
    expert_bytes, num_experts = max(sizes(SizeClass.EXPERT), default=0), len(sizes(SizeClass.EXPERT))
    least_slots, least_experts = min(2, num_layers), min(MIN_EXPERT_SLOTS, num_experts)
    least_bytes = least_slots * layer_bytes + least_experts * expert_bytes + outer_bytes + resident_bytes
    left_bytes = gpu_memory_bytes - keys_and_values.num_bytes - least_bytes
    if left_bytes < 0:
        needed = least_bytes + keys_and_values.num_bytes
        raise BudgetError(
            f"gpu_memory of {format_bytes(gpu_memory_bytes)} is too small: two layers{_two_experts(least_experts)} and "
            "the embeddings or head beside them take "
            f"{format_bytes(least_bytes)}, beside {keys_and_values}; set gpu_memory to at least {needed} bytes "
            f"({format_bytes(needed)}), or generate fewer tokens or sequences"
        )
    ring = min(1 + prefetch_blocks, num_layers)
    for_ring = min(ring - least_slots, left_bytes // layer_bytes)
    left_bytes -= max(0, for_ring) * layer_bytes
    other_outer_bytes = max(0, num_outer - 1) * outer_bytes
    if other_outer_bytes <= left_bytes:
        left_bytes -= other_outer_bytes
    num_slots = min(num_layers, least_slots + max(0, for_ring) + left_bytes // layer_bytes)
    left_bytes -= (num_slots - least_slots - max(0, for_ring)) * layer_bytes
    more_experts = min(num_experts - least_experts, left_bytes // expert_bytes) if expert_bytes else 0
    layers = [block.name for block in blocks if block.size_class is SizeClass.LAYER]
    num_kept = num_layers if num_slots == num_layers else max(0, num_slots - ring)
    kept = set(spread(num_layers)[:num_kept])
    return GenerationSlots(
        num_layer_slots=num_slots,
        kept_layers=tuple(name for index, name in enumerate(layers) if index in kept),
        num_expert_slots=least_experts + more_experts,
    )


def _two_experts(number: int) -> str:
    return f", {times(number, 'expert')}" if number else ""


def token_traffic(
    blocks: Sequence[BlockShape], slots: GenerationSlots, *, num_outer_slots: int, experts_share: float = 1.0
) -> tuple[RecordTraffic, ...]:
    """Return, in forward order, the bytes that one token reads of each record of parameters of a rank, if nothing is
    cached in RAM. ``experts_share``: the share of streamed experts that a token chooses. All experts are equally
    likely. Experts in slots are not read."""
    num_outer = sum(block.size_class is SizeClass.OUTER for block in blocks)
    kept = set(slots.kept_layers)
    num_experts = sum(block.size_class is SizeClass.EXPERT for block in blocks)
    missing_share = max(0.0, 1 - slots.num_expert_slots / num_experts) if num_experts else 0.0

    def read_bytes(block: BlockShape, num_bytes: int) -> int:
        if block.size_class is SizeClass.EXPERT:
            return int(experts_share * missing_share * num_bytes)
        if block.size_class is SizeClass.ROWS:
            return num_bytes // ROWS_SHARE
        stays = {
            SizeClass.LAYER: block.name in kept,
            SizeClass.OUTER: num_outer_slots >= num_outer,
        }.get(block.size_class, True)
        return 0 if stays else num_bytes

    return tuple(
        RecordTraffic(
            block=block.name,
            kind=kind,
            num_bytes=num_bytes,
            read_bytes_per_step=read_bytes(block, num_bytes),
            is_expert_weight=block.size_class is SizeClass.EXPERT,
        )
        for block in blocks
        for kind, num_bytes in block.fetched_bytes.items()
    )

"""Computes the costs of a step for one of the ranks that share rows (`ranks.per_row`), from a trace of its tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from hf_lohan.activations.layer_runs import row_memory_bytes
from hf_lohan.activations.token_ranges import RowPieces
from hf_lohan.costs import SizeClass
from hf_lohan.costs.model_profile import BlockProfile, ModelProfile
from hf_lohan.planning.layout import OffloadLayout


def tokens_of_rank(sequence_length: int, sequence_ranks: int) -> int:
    """Return the largest number of tokens that a rank has of a row."""
    return RowPieces(sequence_length, 0, sequence_ranks).most_tokens


def key_numel(config: Any) -> int:
    """Return the number of elements of a token's keys and values in one layer, from a model's config; 0 if it is not
    known. Ranks share expanded keys and values, so compressed keys count as expanded. A trace in chunks is more exact
    (`TracedModel.keys`), but some layers cannot be traced, such as mixtures in float32."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    try:
        num_heads = int(text.num_attention_heads)
        names = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        if all(getattr(text, name, None) is not None for name in names):
            return num_heads * sum(int(getattr(text, name)) for name in names)
        head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // num_heads
        return 2 * int(getattr(text, "num_key_value_heads", None) or num_heads) * int(head_dim)
    except (AttributeError, TypeError):  # the config has no sizes, or the sizes of its layers differ
        return 0


def shared_key_bytes(
    profile: ModelProfile, keys: tuple[int, int], sequence_ranks: int, chunk_tokens: int | None = None
) -> int:
    """Return a rank's part of the RAM in which the ranks of a row have keys, values and sums of their gradients
    (`RowMemory`). It is enough for all batches with no more tokens and no longer rows than ``profile``, which counts
    the rank's own tokens. With ``chunk_tokens``, RAM has the tokens of one chunk at a time, or of one row if a row has
    more. ``keys``: number of a token's elements in the keys and values of a layer, and bytes of an element."""
    num_tokens = profile.batch_size * profile.sequence_length
    at_once = num_tokens if chunk_tokens is None else max(profile.sequence_length, min(num_tokens, chunk_tokens))
    key_numel, itemsize = keys
    return -(-row_memory_bytes(sequence_ranks * at_once * key_numel, itemsize, sequence_ranks) // sequence_ranks)


def with_shared_keys(layout: OffloadLayout, num_bytes: int) -> OffloadLayout:
    """Return the layout with at least this RAM for keys of shared rows. It is taken from the RAM for copies of records
    that a run has not made yet, and then from the RAM for activations. If both have too little, the plan of the layout
    does not fit."""
    more_bytes = max(0, num_bytes - layout.shared_key_bytes)
    free_bytes = layout.record_bytes - (layout.resident_bytes if layout.is_split else 0)
    of_records = min(more_bytes, free_bytes)
    return replace(
        layout,
        shared_key_bytes=layout.shared_key_bytes + more_bytes,
        record_bytes=layout.record_bytes - of_records,
        activation_bytes=max(0, layout.activation_bytes - (more_bytes - of_records)),
    )


def with_keys_of_other_ranks(
    profile: ModelProfile, keys: tuple[int, int], sequence_ranks: int, *, in_ram: bool = False
) -> ModelProfile:
    """Return the profile of a rank whose queries see keys of all ranks. ``profile`` counts the rank's own tokens. A
    layer then holds the keys and values of whole rows and float32 sums of their gradients, unless these are ``in_ram``.
    A query sees ``sequence_ranks`` times as many keys. The cost of attention in a window is overestimated, because it
    does not grow with the row. ``keys``: see `shared_key_bytes`."""
    tokens = profile.batch_size * profile.sequence_length * sequence_ranks
    key_numel, itemsize = keys
    held_bytes = 0 if in_ram else tokens * key_numel * (itemsize + torch.float32.itemsize)

    def of_rank(block: BlockProfile) -> BlockProfile:
        if block.size_class is not SizeClass.LAYER or not block.flops:
            return block
        operations = tuple(
            replace(operation, flops=operation.flops * sequence_ranks) if operation.attention_flops else operation
            for operation in block.operations
        )
        added = sum(operation.flops for operation in operations) - sum(
            operation.flops for operation in block.operations
        )
        return replace(
            block,
            operations=operations,
            flops=block.flops + added,
            working_bytes=block.working_bytes + held_bytes if block.working_bytes else 0,
        )

    return replace(profile, blocks=tuple(of_rank(block) for block in profile.blocks))

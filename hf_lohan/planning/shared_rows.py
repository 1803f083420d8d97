"""What a step costs one of the ranks that share rows (`sequence_ranks`), from a trace of its own tokens."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hf_lohan.activations.token_ranges import RowPieces
from hf_lohan.planner import SizeClass
from hf_lohan.planner.model_profile import BlockProfile, ModelProfile


def tokens_of_rank(sequence_length: int, sequence_ranks: int) -> int:
    """Return the most tokens that a rank has of a row."""
    return RowPieces(sequence_length, 0, sequence_ranks).most_tokens


def key_numel(config: Any) -> int:
    """Return the elements of a token's keys and values in one layer. For models that expand compressed keys it is the
    expanded ones, which are what ranks share."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    num_heads = int(text.num_attention_heads)
    expanded = [getattr(text, name, None) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")]
    if all(isinstance(size, int) for size in expanded):
        return num_heads * sum(int(size) for size in expanded if size is not None)
    head_dim = getattr(text, "head_dim", None) or int(text.hidden_size) // num_heads
    return 2 * int(getattr(text, "num_key_value_heads", None) or num_heads) * int(head_dim)


def with_keys_of_other_ranks(profile: ModelProfile, model: nn.Module, sequence_ranks: int) -> ModelProfile:
    """Return the profile of a rank whose queries see keys of all ranks. ``profile`` counts the rank's own tokens. A
    layer then holds the keys and values of whole rows and their float32 sums, and a query sees ``sequence_ranks`` times
    as many keys. Attention in a window is overestimated, because it does not grow with the row."""
    tokens = profile.batch_size * profile.sequence_length * sequence_ranks
    numel = tokens * key_numel(getattr(model, "config", None))
    held_bytes = numel * (profile.param_itemsize + torch.float32.itemsize)

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

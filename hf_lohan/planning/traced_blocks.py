"""What a model's forward does, cut into the blocks that stream."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hf_lohan.model import TracedModel, discover_blocks, signature_of, trace_model

_MOST_TRACED = 64
_traced: dict[Any, TracedModel] = {}
"""What models of this process were seen to do. A resumed or repeated run has the model of the first."""
_NO_SETTINGS = frozenset({"_name_or_path", "_commit_hash", "dtype", "transformers_version"})
"""What a model's config says of where it comes from."""


def trace_blocks(
    model: nn.Module,
    *,
    batch_size: int,
    sequence_length: int,
    device: torch.device | str = "cpu",
    fused_attention: bool = False,
) -> TracedModel:
    """What a forward of a causal LM does (on meta, or in memory and not yet offloaded), cut into the runtime's blocks.

    Raises ValueError (DiscoveryError) for a model without layers, or with fewer positions than the sequence has tokens.
    """
    said = vars(model.config) if hasattr(model, "config") else {}
    settings = {name: value for name, value in said.items() if name not in _NO_SETTINGS}
    key = (signature_of(model), repr(settings), batch_size, sequence_length, str(device), fused_attention)
    if key not in _traced:
        _check_positions(model, sequence_length)
        if len(_traced) >= _MOST_TRACED:
            del _traced[next(iter(_traced))]
        _traced[key] = trace_model(
            model,
            discover_blocks(model),
            batch_size=batch_size,
            sequence_length=sequence_length,
            device=device,
            fused_attention=fused_attention,
        )
    return _traced[key]


def _check_positions(model: Any, sequence_length: int) -> None:
    words = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module is not words and module.num_embeddings < sequence_length:
            raise ValueError(
                f"the model has {module.num_embeddings} positions ({name}), fewer than the sequence length of "
                f"{sequence_length}; give a shorter one"
            )

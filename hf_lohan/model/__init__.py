"""What streams together, and where it lies: a model cut into blocks, a block into parameters, chunks and records.

`discovery` finds a model's layers and gives every parameter to one `block`, where it has an offset that is the same in
all of the block's records; `layout` says which records and pools that takes under one configuration. Nothing here moves
a byte: blocks are named and measured, and everything above speaks of them.
"""

from hf_lohan.model.block import (
    PARAM_ALIGN_NUMEL,
    Block,
    Chunk,
    ChunkPiece,
    ParamSlice,
    lay_out_block,
    ranges,
    round_up,
)
from hf_lohan.model.chunked_head import ChunkedHead, ChunkedLoss, Smoothing, chunked_head_of, has_foreign_forward
from hf_lohan.model.discovery import (
    DiscoveryError,
    ModelBlocks,
    Rules,
    adamw_everywhere,
    discover_blocks,
    hidden_matrices,
    kept_in_float32,
    muon_for_matrices,
)
from hf_lohan.model.experts import FusedExperts, find_experts
from hf_lohan.model.kernel_names import Operation, anchor_name
from hf_lohan.model.profile import TracedModel, trace_model
from hf_lohan.model.stored_form import StoredForm, dtype_name, records_of_rank, stored_form
from hf_lohan.model.trace import signature_of

__all__ = [
    "PARAM_ALIGN_NUMEL",
    "Block",
    "Chunk",
    "ChunkPiece",
    "ChunkedHead",
    "ChunkedLoss",
    "DiscoveryError",
    "FusedExperts",
    "ModelBlocks",
    "Operation",
    "ParamSlice",
    "Rules",
    "Smoothing",
    "StoredForm",
    "TracedModel",
    "adamw_everywhere",
    "anchor_name",
    "chunked_head_of",
    "discover_blocks",
    "dtype_name",
    "find_experts",
    "has_foreign_forward",
    "hidden_matrices",
    "kept_in_float32",
    "lay_out_block",
    "muon_for_matrices",
    "ranges",
    "records_of_rank",
    "round_up",
    "signature_of",
    "stored_form",
    "trace_model",
]

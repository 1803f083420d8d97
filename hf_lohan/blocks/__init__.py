"""What streams together, and where it lies: a model cut into blocks, a block into parameters, chunks and records.

`discovery` finds a model's layers and gives every parameter to one `block`, where it has an offset that is the same in
all of the block's records; `layout` says which records and pools that takes under one configuration. Nothing here moves
a byte: blocks are named and measured, and everything above speaks of them.
"""

from hf_lohan.blocks.block import Block, Chunk, ChunkPiece, ParamSlice, lay_out_block, ranges, round_up
from hf_lohan.blocks.discovery import DiscoveryError, ModelBlocks, check_one_dtype, discover_blocks
from hf_lohan.blocks.layout import OffloadLayout, lay_out, stored_form

__all__ = [
    "Block",
    "Chunk",
    "ChunkPiece",
    "DiscoveryError",
    "ModelBlocks",
    "OffloadLayout",
    "ParamSlice",
    "check_one_dtype",
    "discover_blocks",
    "lay_out",
    "lay_out_block",
    "ranges",
    "round_up",
    "stored_form",
]

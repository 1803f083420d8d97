"""Cuts a model into blocks, and a block into parameters, chunks and records.

`discovery` finds a model's layers and assigns every parameter to one `block`. The parameter's offset is the same in all
records of the block. `stored_form` lists the records of a model.
"""

from hf_lohan.model.adapted import base_of, has_adapters, is_of_peft, is_peft_model, wrapped_models
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
from hf_lohan.model.discovery import (
    DiscoveryError,
    MissedChangeError,
    ModelBlocks,
    Rules,
    WrittenWeightError,
    adamw_everywhere,
    discover_blocks,
    hidden_matrices,
    kept_in_float32,
    muon_for_matrices,
)
from hf_lohan.model.embedding_table import (
    RowIds,
    rows_between,
    rows_granule_bytes,
    table_of_rows,
    table_to_load_by_rows,
    why_whole,
    with_rows,
)
from hf_lohan.model.experts import experts_as_stored, find_experts, owners_as_stored, owners_by_name
from hf_lohan.model.stored_form import (
    StoredForm,
    assign_shards,
    common_blocks,
    dtype_name,
    experts_by_rank,
    owners_of,
    records_of_rank,
    stored_form,
)

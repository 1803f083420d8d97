"""Decides whether only rows of the input embeddings are loaded to the device, and plans for it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
from torch import nn

from hf_lohan.compat.torch_private import own_parameters
from hf_lohan.costs import ModelProfile
from hf_lohan.model.discovery import ModelBlocks
from hf_lohan.store import GRANULE_NUMEL

RowIds = npt.NDArray[np.int64]
"""Indices of rows of a table, ascending, each once."""
_READS_TABLE = "TrainableTokens"
"""Part of the names of PEFT's classes that read an embedding's whole weight."""


def table_of_rows(model: nn.Module) -> nn.Parameter | str:
    """Return the weight of the input embeddings if nothing but an embedding of tokens reads it. Otherwise return why it
    must be loaded whole."""
    try:
        words = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        words = None
    # PEFT's wrappers compute `weight`, so search the modules within them. If PEFT trains a copy, take the copy.
    inner = [module for module in words.modules() if isinstance(module, nn.Embedding)] if words is not None else []
    found = sorted(inner, key=lambda module: not module.weight.requires_grad)
    if not found or not isinstance(weight := found[0].weight, nn.Parameter):
        return "the model has no table of input embeddings"
    owners = {
        f"{name}.{own}".removeprefix("."): module
        for name, module in model.named_modules()
        for own, parameter in own_parameters(module)
        if parameter is weight
    }
    if not owners:
        return "the input embeddings are not a part of the model"
    if len(owners) > 1:
        return f"{' and '.join(sorted(owners))} are one tensor"
    name, module = next(iter(owners)), found[0]
    if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
        return f"{name} has max_norm, scale_grad_by_freq or sparse=True"
    parents = [name.rsplit(".", number)[0] for number in range(1, name.count(".") + 1)]
    if any(_READS_TABLE in type(model.get_submodule(parent)).__name__ for parent in parents):
        return f"PEFT adds trained tokens to {name} in each forward"
    if weight.shape[1] > GRANULE_NUMEL:
        return f"a row of {name} has more than {GRANULE_NUMEL} elements"
    return weight


def table_to_load_by_rows(model: nn.Module) -> nn.Parameter | None:
    """Return the weight of the input embeddings if the model allows that only rows of it are loaded."""
    found = table_of_rows(model)
    return found if isinstance(found, nn.Parameter) else None


def why_whole(model: nn.Module) -> str:
    """Return why a model's embeddings are loaded whole although `embedding: rows` is set."""
    found = table_of_rows(model)
    return "they are small and stay on the device" if isinstance(found, nn.Parameter) else found


def rows_between(ids: RowIds, width: int, first: int, stop: int) -> tuple[slice, slice]:
    """Return the slice of ``ids`` whose rows have elements in [first, stop) of a table, and the slice of these elements
    in a flat tensor of all rows of ``ids``. Of the first and the last row only a part may be included."""
    begin, end = np.searchsorted(ids, [first // width, -(-stop // width)]).tolist()
    if begin == end or first >= stop:
        return slice(0, 0), slice(0, 0)
    before = max(0, first - int(ids[begin]) * width)
    behind = max(0, (int(ids[end - 1]) + 1) * width - stop)
    return slice(begin, end), slice(begin * width + before, end * width - behind)


def rows_granule_bytes(model_blocks: ModelBlocks) -> int:
    """Return the bytes of a granule of the table's block if only rows of the table are loaded, or else 0."""
    table = model_blocks.table
    return 0 if table is None else table.granule_numel * table.master.working_dtype.itemsize


def with_rows(profile: ModelProfile, model_blocks: ModelBlocks) -> ModelProfile:
    """Return the profile if only rows of the table of embeddings are loaded to the device."""
    table = model_blocks.table
    if table is None:
        return profile
    num_rows, granule_bytes = table.slices[0].shape[0], rows_granule_bytes(model_blocks)
    blocks = tuple(
        block.by_rows(num_rows, granule_bytes, profile.num_tokens) if block.name == table.name else block
        for block in profile.blocks
    )
    return replace(profile, blocks=blocks)

"""What is asked of operations as they run: whether they write to their arguments, or draw random numbers."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import OpOverload, schema_of, tree_leaves


@cache
def is_mutable(operation: Any) -> bool:
    """Whether it writes to some of its arguments."""
    return isinstance(operation, OpOverload) and bool(schema_of(operation).is_mutable)


@cache
def is_random(operation: Any) -> bool:
    """Whether it may draw from the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that a mutable operation writes to."""
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

"""Device-independent names of operations."""

from __future__ import annotations

from functools import cache
from typing import TypeAlias

from hf_lohan.compat.torch_private import HigherOrderOperator, OpOverload, operation_name

Operation: TypeAlias = OpOverload | HigherOrderOperator

_PRODUCTS = frozenset({"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm", "linear", "convolution"})
ATTENTION_KERNELS = "_scaled_dot_product_"
_ATTENTION = "scaled_dot_product_attention"
_LOHAN = "lohan"
"""Namespace of `lohan::experts`, which computes all experts of a layer."""
_FLEX_ATTENTION = frozenset({"flex_attention"})


@cache
def anchor_name(operation: Operation) -> str | None:
    """Return the name of an operation whose output is worth keeping because it takes many FLOPs per byte: a matrix
    product ("aten.mm"), or attention in any kernel ("aten.scaled_dot_product_attention"). Return None for other
    operations, which are cheap to recompute.

    The caller numbers the operations of one kind within a layer's forward, as in "aten.mm#0".
    """
    if isinstance(operation, HigherOrderOperator):
        return operation.name() if operation.name() in _FLEX_ATTENTION else None
    name = operation_name(operation)
    if name.startswith(ATTENTION_KERNELS):
        return None if name.endswith("_backward") else f"{operation.namespace}.{_ATTENTION}"
    return f"{operation.namespace}.{name}" if name in _PRODUCTS or operation.namespace == _LOHAN else None

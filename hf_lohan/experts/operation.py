"""`lohan::experts`: all experts of a layer as one operation, opaque to autograd and to whoever watches a layer run.

As plain autograd, weights would be leaves of the layer's graph: under checkpointing each expert would be loaded three
times, and which gradient is whose would depend on the order of loads. Here backward has the operation's inputs alone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lohan.experts.streamed import StreamedExperts, experts_of


@torch.library.custom_op("lohan::experts", mutates_args=())
def _experts(rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return experts_of(handle).forward(rows, top_k_weights, top_k_index)


@_experts.register_fake
def _fake(rows: Tensor, top_k_weights: Tensor, top_k_index: Tensor, anchor: Tensor, handle: int) -> Tensor:
    return torch.empty_like(rows)


def _set_up(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int], output: Tensor) -> None:
    rows, top_k_weights, top_k_index, _, ctx.handle = inputs
    ctx.save_for_backward(rows, top_k_weights, top_k_index)
    # Under checkpointing the graph is the forward's, though what it saved is made again: so is this number.
    ctx.of_forward = experts_of(ctx.handle).forward_number


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
    rows, top_k_weights, top_k_index = ctx.saved_tensors
    of_rows, of_weights = experts_of(ctx.handle).backward(
        ctx.of_forward, gradient, rows, top_k_weights, top_k_index, needs=ctx.needs_input_grad[:2]
    )
    return of_rows, of_weights, None, None, None


_experts.register_autograd(_backward, setup_context=_set_up)


def run_experts(experts: StreamedExperts, rows: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """``rows`` [tokens, hidden] through the experts ``top_k_index`` [tokens, k] of each, weighted by ``top_k_weights``
    [tokens, k] and added up. To the bit what transformers' `grouped_mm` gives, its gradients, too."""
    output: Tensor = _experts(rows, top_k_weights, top_k_index, experts.anchor, experts.handle)
    return output

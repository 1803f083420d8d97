"""Traces the streamed experts of a layer as one operation, without weights and without the routing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_lohan.costs.model_profile import OperationProfile
from hf_lohan.hardware import MatrixShape
from hf_lohan.model.experts import FusedExperts

NAME = "lohan.experts"
"""The `anchor_name` of the operation."""
_MOST_ROWS = 2
"""The busiest expert is assumed to get this multiple of the average number of rows."""


@dataclass
class ExpertsTrace:
    """One call of a layer's experts."""

    num_chosen: int
    num_tokens: int
    flops: int
    output_bytes: int
    inner_bytes: int
    """Bytes that autograd would save if it saw the experts' operations."""
    products: list[MatrixShape] = field(default_factory=list)

    def operation(self, number: int, module: str) -> OperationProfile:
        name = f"{NAME}#{number}"
        return OperationProfile(
            name=name, flops=self.flops, output_bytes=self.output_bytes, module=module, loads_experts=True
        )


Computes: TypeAlias = Callable[[int, Sequence[Tensor]], None]
"""Called with the FLOPs of all experts, and with the tensors that exist during the computation."""


def forward_on_paper(
    experts: FusedExperts,
    on_call: Callable[[ExpertsTrace], None] = lambda _trace: None,
    computes: Computes = lambda _flops, _held: None,
) -> Callable[..., Tensor]:
    """Return a forward for a module of experts that runs on fake tensors. ``on_call`` is called before autograd saves
    anything, and ``computes`` in the forward and in the backward."""
    matrices = [tuple(parameter.shape[1:]) for parameter in experts.parameters.values() if parameter.dim() == 3]
    numel = sum(parameter.numel() for parameter in experts.parameters.values()) // experts.num_experts

    def forward(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        hidden, num_rows = hidden_states.shape[-1], top_k_index.numel()
        widths = [rows * columns // hidden for rows, columns in matrices]
        of_row_bytes = (2 * hidden + sum(widths)) * hidden_states.itemsize
        each_rows = -(-num_rows // experts.num_experts)
        trace = ExpertsTrace(
            num_chosen=top_k_index.shape[-1],
            num_tokens=hidden_states.shape[0],
            flops=2 * num_rows * hidden * sum(widths),
            output_bytes=hidden_states.nbytes,
            inner_bytes=num_rows * of_row_bytes,
            products=[MatrixShape(each_rows, hidden, width) for width in widths],
        )
        busiest_rows = min(num_rows, _MOST_ROWS * each_rows)
        within = 2 * busiest_rows * of_row_bytes // hidden_states.itemsize + 2 * numel
        on_call(trace)
        weight = next(experts.module.parameters(recurse=False))
        apply: Any = _Experts.apply
        # A backward computes an expert's forward again, and the gradients of its rows and of its weights.
        backward_flops = (2 + weight.requires_grad) * trace.flops
        flops = partial(computes, trace.flops), partial(computes, backward_flops)
        output: Tensor = apply(hidden_states, top_k_weights, top_k_index, weight, within, *flops)
        return output

    return forward


class _Experts(torch.autograd.Function):
    """Allocates the same tensors as streamed experts: three tensors of all rows, one expert's tensors, and gradients of
    two experts."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        top_k_weights: Tensor,
        top_k_index: Tensor,
        weight: Tensor,
        within_numel: int,
        computes_forward: Callable[[Sequence[Tensor]], None],
        computes_backward: Callable[[Sequence[Tensor]], None],
    ) -> Tensor:
        held = [rows.new_empty(top_k_index.numel(), rows.shape[-1]) for _ in range(3)]
        held.append(rows.new_empty(within_numel // 2))
        ctx.save_for_backward(rows, top_k_weights, top_k_index)
        ctx.within_numel, ctx.computes = within_numel, computes_backward
        output = torch.empty_like(rows)
        computes_forward((rows, *held, output))
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, top_k_weights, top_k_index = ctx.saved_tensors
        held = [rows.new_empty(top_k_index.numel(), rows.shape[-1]) for _ in range(3)]
        held.append(rows.new_empty(ctx.within_numel))
        gradients = torch.empty_like(rows), torch.empty_like(top_k_weights)
        ctx.computes((gradient, rows, *held, *gradients))
        return *gradients, None, None, None, None, None

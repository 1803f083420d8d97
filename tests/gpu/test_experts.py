"""Streamed experts on CUDA: an expert computed alone equals the same expert in the grouped product."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.testing.models import tiny_model


def experts_module(dtype: torch.dtype) -> Any:
    model = tiny_model("qwen3_moe", hidden_size=128, num_experts=16, num_experts_per_tok=4, moe_intermediate_size=64)
    return model.model.layers[0].mlp.experts.cuda().to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 16, 257, 2048])
def test_an_expert_alone_equals_the_grouped_product(dtype: torch.dtype, num_tokens: int) -> None:
    """To the bit in bfloat16, and within rounding in float32."""
    module = experts_module(dtype)
    generator = torch.Generator(device="cuda").manual_seed(0)
    rows = torch.randn(num_tokens, 128, device="cuda", dtype=dtype, generator=generator)
    chosen = torch.rand(num_tokens, 16, device="cuda", generator=generator).topk(4).indices
    weights = torch.full(chosen.shape, 0.25, device="cuda", dtype=dtype)
    expected = module(rows, chosen, weights)

    def alone(expert: int, of_expert: Tensor) -> Tensor:
        own = {name: weight[expert : expert + 1] for name, weight in module.named_parameters()}
        return one_expert(module, of_expert, own)

    ids, order = torch.sort(chosen.reshape(-1))
    outputs = torch.empty(ids.numel(), 128, device="cuda", dtype=dtype)
    for expert in ids.unique().tolist():
        outputs[ids == expert] = alone(expert, rows[order[ids == expert] // 4])
    position = torch.empty_like(order)
    position[order] = torch.arange(order.numel(), device="cuda")
    total = (outputs * 0.25)[position].view(num_tokens, 4, 128).sum(1)
    if dtype == torch.bfloat16:
        assert torch.equal(total, expected), f"{(total != expected).sum()} of {total.numel()} elements differ"
    else:
        assert torch.allclose(total, expected, rtol=1e-5, atol=1e-6)

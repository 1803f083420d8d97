"""Streamed experts on CUDA: an expert computed alone equals the same expert in the grouped product."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engines import open_engine, resolved
from torch import Tensor

from hf_lohan.device import device_for
from hf_lohan.experts import StreamedExperts
from hf_lohan.huggingface.offloaded_model import compute_expert, stream_experts
from hf_lohan.optim import OffloadAdamW
from hf_lohan.planning import lay_out
from hf_lohan.testing.models import tiny_batch, tiny_model

LOSS_TOLERANCE = 1e-5
"""Relative, over 10 steps in float32, because CUDA chooses kernels by the number of rows and groups."""


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
        return compute_expert(module, of_expert, own)

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


def test_training_follows_torch(tmp_path: Path) -> None:
    reference, model = (tiny_model("mixtral").train() for _ in range(2))
    reference = reference.cuda()
    optimizers = [torch.optim.AdamW(reference.parameters(), lr=1e-3, weight_decay=0.1, fused=True)]
    settings = {"cpu_memory": "4MiB", "gpu_memory": "1MiB", "experts": "streamed"}
    config = resolved(tmp_path, memory_bytes=1 << 32, **settings)
    layout = lay_out(model, config, working_dtype=torch.float32, hold_gradients=False)
    engine = open_engine(model, layout, config, device_for("cuda"), compute_expert=compute_expert)
    try:
        stream_experts(engine.experts)
        assert all(isinstance(experts, StreamedExperts) for experts in engine.experts.values())
        optimizers.append(OffloadAdamW(model.parameters(), lr=1e-3, weight_decay=0.1, engine=engine))
        for step in range(10):
            batch = {key: value.cuda() for key, value in tiny_batch(seed=step).items()}
            losses = [either(**batch).loss for either in (reference, model)]
            assert torch.allclose(losses[1], losses[0], rtol=LOSS_TOLERANCE, atol=0)
            for loss, optimizer in zip(losses, optimizers, strict=True):
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    finally:
        engine.close()

"""Layers in chunks on CUDA: equal to stock up to the order of sums, with planned places for what they write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from trainer_runs import Outcome, assert_same_bits, make_trainer, train

import hf_lohan.device.cuda as cuda_device
from hf_lohan.compat.torch_private import attention_after
from hf_lohan.huggingface.offloaded_model import run_plan_of
from hf_lohan.testing.models import tiny_model

SMALL: dict[str, Any] = {"cpu_memory": "8MiB", "gpu_memory": "2MiB", "chunks.layers": 6, "activations": "recompute"}
"""The rows of 16 tokens have chunks of 6, 6 and 4."""
BATCH = {"max_steps": 4, "gradient_accumulation_steps": 2}


def run(folder: Path, offload: dict[str, Any], **settings: Any) -> tuple[Outcome, int, int]:
    """Return the outcome, and how many tensors got a planned place and how many did not."""
    trainer = make_trainer(folder, tiny_model("llama"), offload={**SMALL, **offload}, **{**BATCH, **settings})
    trainer.train()
    engine = trainer.offload_engine
    plan, arena = run_plan_of(engine), engine.device.arena
    assert plan is not None and plan.chunks is not None and plan.chunks.has_cut
    assert plan.plan is not None and plan.plan.chunk_tokens == 6
    logged = [row for row in trainer.state.log_history if "loss" in row]
    weights = {name: engine.parameters.read_parameter(name) for name, _ in trainer.model.named_parameters()}
    engine.close()
    outcome = Outcome([row["loss"] for row in logged], [float(row["grad_norm"]) for row in logged], weights)
    return outcome, arena.num_placed, arena.num_unplaced


SWAP = {"activations": "swap", "cpu_memory": "32MiB"}
WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {"recompute": ({}, {}), "bfloat16": (SWAP, {"bf16": True})}
"""Offload settings and TrainingArguments."""


@pytest.mark.parametrize("way", WAYS)
def test_what_chunks_write_has_planned_places_and_the_same_bits(
    way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    offload, settings = WAYS[way]
    placed, num_placed, _ = run(tmp_path / "placed", offload, **settings)
    assert num_placed > 0
    made = cuda_device.CudaDevice.__init__

    def without_places(self: Any, *args: Any, **kwargs: Any) -> None:
        made(self, *args, **kwargs)
        self.plans_addresses = False

    monkeypatch.setattr(cuda_device.CudaDevice, "__init__", without_places)
    unplaced, none_placed, num_unplaced = run(tmp_path / "unplaced", offload, **settings)
    assert none_placed == 0 < num_unplaced
    assert_same_bits(placed, unplaced)


def test_chunks_equal_stock_up_to_the_order_of_sums(tmp_path: Path) -> None:
    stock = train(tmp_path / "stock", tiny_model("llama"), **BATCH)
    ours, _, _ = run(tmp_path / "ours", {})
    assert ours.losses == pytest.approx(stock.losses, abs=1e-6)
    assert ours.norms == pytest.approx(stock.norms, rel=1e-5)
    for name, weight in stock.weights.items():
        assert torch.allclose(ours.weights[name], weight, rtol=0, atol=2e-5), name
    assert any(not torch.equal(ours.weights[name], weight) for name, weight in stock.weights.items()), "not cut"


@pytest.mark.parametrize(("dtype", "size"), [(torch.float32, 8), (torch.float32, 6), (torch.float64, 8)])
def test_attention_after_earlier_keys_takes_any_dtype_and_size(
    dtype: torch.dtype, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fused kernels take neither float64 nor every size of heads. Then there is a mask."""
    torch.manual_seed(0)
    query, key, value = (torch.randn(1, heads, num, size, dtype=dtype) for heads, num in ((4, 5), (2, 12), (2, 12)))
    mask = torch.ones(5, 12, dtype=torch.bool).tril(7)
    sdpa, has_mask = F.scaled_dot_product_attention, []
    expected = sdpa(query, key, value, mask, enable_gqa=True)

    def attend(*args: Any, **options: Any) -> torch.Tensor:
        has_mask.append(len(args) > 3)
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", attend)
    found = attention_after(query.cuda(), key.cuda(), value.cuda()).cpu()
    assert has_mask == ([] if (dtype, size) == (torch.float32, 8) else [True])
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)

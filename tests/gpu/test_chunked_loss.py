"""A chunked loss on CUDA equals the loss of whole logits and needs a fraction of the memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_lohan.activations import ChunkedLoss, chunked_head_of
from hf_lohan.testing.models import tiny_batch, tiny_model

VOCABULARY = 65_536


def loss_and_gradient(model: Any, batch: dict[str, torch.Tensor]) -> tuple[float, torch.Tensor, int]:
    model.zero_grad()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = model(**batch).loss
    loss.backward()
    return loss.item(), model.lm_head.weight.grad.clone(), torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_chunked_loss_equals_the_loss_of_whole_logits(dtype: torch.dtype) -> None:
    model = tiny_model("llama", num_layers=1, vocab_size=VOCABULARY).cuda().to(dtype).train()
    batch = {name: value.cuda() for name, value in tiny_batch(batch_size=4, sequence_length=128).items()}
    loss_and_gradient(model, batch)  # warms up: libraries allocate memory at their first use
    expected_loss, expected, whole_bytes = loss_and_gradient(model, batch)
    head = chunked_head_of(model, ChunkedLoss(over_bytes=0, chunk_bytes=4 << 20))
    head.attach()
    loss, gradient, chunked_bytes = loss_and_gradient(model, batch)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert loss == pytest.approx(expected_loss, rel=tolerance)
    assert (gradient - expected).float().norm() <= tolerance * expected.float().norm()
    assert chunked_bytes < whole_bytes / 3

"""Steps of micro-batches that run together, compared with stock accumulation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_lohan.testing.models import tiny_batch

NUM_MICRO_BATCHES = 4


def micro_batches(twins: Any, step: int, num: int = NUM_MICRO_BATCHES, **shape: int) -> list[Callable[[], Tensor]]:
    def forward_and_backward(seed: int) -> Tensor:
        loss: Tensor = twins.model(**tiny_batch(seed=seed, **shape)).loss / num
        assert twins.engine.defer_backward(loss)
        return loss.detach()

    return [partial(forward_and_backward, 100 * step + number) for number in range(num)]


def train(twins: Any, step: int, *, max_norm: float = 0.5) -> None:
    """Take one step with stock accumulation and one with all micro-batches together."""
    stock = [twins.stock(**tiny_batch(seed=100 * step + n)).loss / NUM_MICRO_BATCHES for n in range(NUM_MICRO_BATCHES)]
    for loss in stock:
        loss.backward()
    losses = twins.engine.run_micro_batches(micro_batches(twins, step))
    assert losses == [loss.detach() for loss in stock]
    if max_norm:
        twins.clip(max_norm)
    twins.step()


def assert_close(twins: Any) -> None:
    """Check that the weights are equal up to the order of a sum."""
    for name, weight in twins.stock.named_parameters():
        assert torch.allclose(twins.engine.parameters.read_parameter(name), weight, rtol=0, atol=2e-5), name

"""Parameters that get no gradient keep no buffers from those that do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import EngineFactory, Twins
from torch import Tensor

from hf_lohan.testing.models import tiny_model


def without_mlps(model: Any) -> Any:
    """What they give is lost, so their weights get no gradient; every layer's chunk stays incomplete."""
    for layer in model.model.layers:
        layer.mlp.forward = _nothing
    return model


def _nothing(hidden: Tensor) -> Tensor:
    return torch.zeros_like(hidden)


@pytest.mark.parametrize("max_norm", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_more_layers_may_be_incomplete_than_there_are_buffers(build_engine: EngineFactory, max_norm: float) -> None:
    stock, model = (without_mlps(tiny_model("llama", num_layers=24).train()) for _ in range(2))
    engine = build_engine(model, hold_gradients=max_norm > 0, cpu_memory="3MiB")
    twins = Twins(stock, engine)
    for seed in range(2):
        twins.backward(seed)
        if max_norm:
            twins.clip(max_norm)
        twins.step()
    twins.assert_equal()

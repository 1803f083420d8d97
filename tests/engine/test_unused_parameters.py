"""Parameters without a gradient do not keep buffers from parameters that have one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from engines import EngineFactory, Twins

from hf_lohan.testing.models import tiny_model


def without_mlps(model: Any) -> Any:
    """Replace all MLPs by zeros. Their weights get no gradient, so the chunks of all layers stay incomplete."""
    for layer in model.model.layers:
        layer.mlp.forward = torch.zeros_like
    return model


@pytest.mark.parametrize("max_norm", [pytest.param(0.0, marks=pytest.mark.slow), 0.5])
def test_more_chunks_may_be_incomplete_than_the_pool_has_buffers(
    build_engine: EngineFactory, max_norm: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hf_lohan.updates.arrival._LOOK_S", 0.02)
    stock, model = (without_mlps(tiny_model("llama", num_layers=24).train()) for _ in range(2))
    engine = build_engine(model, hold_gradients=max_norm > 0, cpu_memory="3MiB")
    twins = Twins(stock, engine)
    for seed in range(2):
        twins.backward(seed)
        if max_norm:
            twins.clip(max_norm)
        twins.step()
    twins.assert_equal()

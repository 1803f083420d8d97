"""The weights of an offloaded model in its store."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lohan import engine_of


def stored(model: Any) -> dict[str, Tensor]:
    access = engine_of(model).parameters  # type: ignore[union-attr]
    return {name: access.read_parameter(name) for name, _ in model.named_parameters()}


def assert_stored(model: Any, stock: Any) -> None:
    """Check that the store has the weights of a model in memory."""
    expected, found = dict(stock.named_parameters()), stored(model)
    assert found.keys() == expected.keys()
    for name, weight in expected.items():
        assert found[name].dtype == weight.dtype, name
        assert torch.equal(found[name], weight), name

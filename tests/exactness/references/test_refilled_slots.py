"""Slots are refilled between forward and backward, and no gradient is computed with another layer's weights.

As in bitsandbytes' issue 2034: an autograd function keeps its weight as an attribute, which neither hooks nor
checkpointing see, and before the backward a program that streams weights has written others into the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from covering import slow_but
from torch import Tensor, nn

from hf_lohan.testing.models import tiny_model

NUM_LAYERS = 8
NUM_STEPS = 2
TWO_SLOTS = {"gpu_memory": "600KiB", "prefetch_blocks": 1}


class SavedByAutograd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.saved_tensors[0], None


class KeptAsAttribute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient @ ctx.weight, None


class Frozen(nn.Module):
    """A frozen linear layer whose function keeps its weight in one of the ways."""

    def __init__(self, linear: nn.Linear, multiply: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.multiply = multiply

    def forward(self, inputs: Tensor) -> Tensor:
        return self.multiply(inputs, self.weight)


SAFE_WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "saved": lambda inputs, weight: SavedByAutograd.apply(inputs, weight),
    "saved view": lambda inputs, weight: SavedByAutograd.apply(inputs, weight.t().t()),
    "kept parameter": lambda inputs, weight: KeptAsAttribute.apply(inputs, weight),
}


def model_that(multiply: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """A model whose gradients go through a frozen matrix of each layer."""
    model = tiny_model("llama", num_layers=NUM_LAYERS)
    for layer in model.model.layers:
        layer.mlp.down_proj = Frozen(layer.mlp.down_proj, multiply)
    return model


def train(twins: Any) -> None:
    """Take steps of two forwards and then two backwards, so that a layer's slot has another layer in between."""
    for step in range(NUM_STEPS):
        of_both = [*twins.losses(2 * step), *twins.losses(2 * step + 1)]
        for loss in of_both:
            loss.backward()
        twins.step()


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", slow_but(("saved",), SAFE_WAYS))
def test_a_refilled_slot_changes_no_gradient(way: str, recompute: bool, make_twins: Any) -> None:
    twins = make_twins(model_factory=lambda: model_that(SAFE_WAYS[way]), recompute=recompute, **TWO_SLOTS)
    train(twins)
    twins.assert_equal()


def test_these_slots_are_refilled(make_twins: Any) -> None:
    """The control: a view that a function keeps as an attribute has another layer's weights in backward."""
    twins = make_twins(
        model_factory=lambda: model_that(lambda inputs, weight: KeptAsAttribute.apply(inputs, weight.t().t())),
        **TWO_SLOTS,
    )
    with pytest.raises(AssertionError, match=r"^loss \d"):
        train(twins)

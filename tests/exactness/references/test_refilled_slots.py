"""Slots are refilled between forward and backward, and no gradient is computed with another layer's weights.

As in bitsandbytes' issue 2034: an autograd function keeps its weight as an attribute, which neither hooks nor
checkpointing see, and before the backward a program that streams weights has written others into the same buffer.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from covering import slow_but
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hf_lohan.testing.models import tiny_batch, tiny_model

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


class Keeps(nn.Module):
    """A frozen linear layer whose function may keep views of its weight in the module or elsewhere."""

    def __init__(self, linear: nn.Linear, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.weight = nn.Parameter(linear.weight.detach().clone(), requires_grad=False)
        self.function = function

    def forward(self, inputs: Tensor) -> Any:
        return self.function(self, inputs)


def multiply_by_cached(module: Any, inputs: Tensor) -> Tensor:
    if not hasattr(module, "transposed"):
        module.transposed = module.weight.t()
    return inputs @ module.transposed


def add_in_hook(module: Any, inputs: Tensor) -> Tensor:
    view, output = module.weight[:], inputs @ module.weight.t()
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient + view.mean())
    return output


def multiply_in_checkpoint(module: Any, inputs: Tensor) -> Tensor:
    view = module.weight.t()
    return checkpoint(lambda inputs: (inputs @ view).sin(), inputs, use_reentrant=False)


KEPT_VIEWS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "transposed": lambda module, inputs: KeptAsAttribute.apply(inputs, module.weight.t().t()),
    "detached": lambda module, inputs: KeptAsAttribute.apply(inputs, module.weight.detach()),
    "data": lambda module, inputs: KeptAsAttribute.apply(inputs, module.weight.data),
    "cached": multiply_by_cached,
    "in a hook": add_in_hook,
    "in a checkpoint": multiply_in_checkpoint,
}
KEPT_MESSAGE = r"a view of a weight of model\.layers\.0 was kept .* ctx.save_for_backward"


def model_that_keeps(function: Callable[[Any, Tensor], Any]) -> Any:
    model = tiny_model("llama", num_layers=NUM_LAYERS)
    for layer in model.model.layers:
        layer.mlp.down_proj = Keeps(layer.mlp.down_proj, function)
    return model


@pytest.mark.parametrize("recompute", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["kept", "recomputed"])
@pytest.mark.parametrize("way", KEPT_VIEWS)
def test_a_view_that_may_get_the_weights_of_another_layer_is_refused(
    way: str, recompute: bool, make_twins: Any
) -> None:
    twins = make_twins(model_factory=lambda: model_that_keeps(KEPT_VIEWS[way]), recompute=recompute, **TWO_SLOTS)
    with pytest.raises(ValueError, match=KEPT_MESSAGE):
        train(twins)


def test_a_view_that_micro_batches_keep_is_refused(make_twins: Any) -> None:
    twins = make_twins(model_factory=lambda: model_that_keeps(KEPT_VIEWS["transposed"]), **TWO_SLOTS)
    with pytest.raises(ValueError, match=KEPT_MESSAGE):
        twins.engine.run_micro_batches([lambda: twins.engine.defer_backward(twins.model(**tiny_batch()).loss)] * 2)


@pytest.mark.parametrize("without_gradients", [torch.no_grad, torch.inference_mode])
def test_training_is_exact_after_an_evaluation_that_kept_a_view(without_gradients: Any, make_twins: Any) -> None:
    ways = {"way": multiply_by_cached}
    model_factory = partial(model_that_keeps, lambda module, inputs: ways["way"](module, inputs))
    twins = make_twins(model_factory=model_factory, **TWO_SLOTS)
    with without_gradients(), pytest.raises(ValueError, match=KEPT_MESSAGE):
        twins.model(**tiny_batch(seed=0))
    ways["way"] = lambda module, inputs: inputs @ module.weight.t()
    with without_gradients():
        twins.losses(1)
    train(twins)
    twins.assert_equal()


class Shifted(nn.Module):
    """A norm of the sum of linear layers' output and of a row that another module returned as a view of its weight."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, width = norm, norm.weight.numel()
        self.table = Keeps(nn.Linear(width, width), lambda module, _inputs: {"row": module.weight[0]})
        self.table.weight.requires_grad_()
        self.linears = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))

    def forward(self, hidden: Tensor) -> Tensor:
        row = self.table(hidden)["row"]
        return self.norm(self.linears(hidden) + row)


def test_a_view_that_a_module_returns_is_exact(make_twins: Any) -> None:
    def model_factory() -> Any:
        model = tiny_model("llama", num_layers=2)
        torch.manual_seed(0)
        model.model.norm = Shifted(model.model.norm)
        return model

    twins = make_twins(model_factory=model_factory, **TWO_SLOTS)
    assert {"model.norm.table", "model.norm.linears.0"} <= {block.name for block in twins.engine.layout.blocks}
    train(twins)
    twins.assert_equal()


class KeptScale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor, scale: Tensor) -> Tensor:
        ctx.scale = scale.detach()
        return inputs * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * ctx.scale, None


def test_a_view_of_small_weights_may_be_kept(make_twins: Any) -> None:
    """These have memory that no other block gets."""

    def model_factory() -> Any:
        model = tiny_model("llama", num_layers=NUM_LAYERS)
        scaled = Keeps(nn.Linear(1, 64), lambda module, inputs: KeptScale.apply(inputs, module.weight[:, 0]))
        model.model.norm = nn.Sequential(model.model.norm, scaled)
        return model

    twins = make_twins(model_factory=model_factory, **TWO_SLOTS)
    train(twins)
    twins.assert_equal()

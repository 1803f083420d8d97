"""backward(inputs=...) and torch.autograd.grad compute gradients of some absent weights, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from engines import EngineFactory, TwinsFactory
from torch import Tensor

from hf_lohan.testing.models import tiny_batch, tiny_model

NUM_STEPS = 3
PARTS = {"a layer": ".layers.0.", "the head": "lm_head", "the embeddings": "embed", "matrices": "mlp", "everything": ""}


def some_parameters(model: Any, part: str) -> list[Tensor]:
    return [parameter for name, parameter in model.named_parameters() if PARTS[part] in name]


@pytest.mark.covering(1)
@pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("part", PARTS)
def test_a_backward_to_some_weights_is_exact(
    part: str, recompute: bool, hold_gradients: bool, make_twins: TwinsFactory
) -> None:
    twins = make_twins(recompute=recompute, hold_gradients=hold_gradients, sums_gradients=hold_gradients)
    for step in range(NUM_STEPS):
        for model, loss in zip(twins.models, twins.losses(step), strict=True):
            loss.backward(inputs=some_parameters(model, part) if step == 1 else None)
        twins.step()
    twins.assert_equal()


@pytest.mark.covering(1)
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
@pytest.mark.parametrize("part", PARTS)
def test_gradients_that_are_only_returned_are_exact(part: str, recompute: bool, make_twins: TwinsFactory) -> None:
    twins = make_twins(recompute=recompute)
    for step in range(NUM_STEPS):
        losses = zip(twins.models, twins.losses(step), strict=True)
        ours, theirs = (torch.autograd.grad(loss, some_parameters(model, part)) for model, loss in losses)
        assert all(map(torch.equal, ours, theirs))
        twins.backward(step)
        twins.step()
    twins.assert_equal()


def test_a_backward_to_embeddings_alone_changes_no_weight(make_twins: TwinsFactory) -> None:
    twins = make_twins()
    for step in range(NUM_STEPS):
        gradients = []
        for model in twins.models:
            embeds = torch.randn(2, 9, 64, generator=torch.Generator().manual_seed(step)).requires_grad_()
            loss = model(inputs_embeds=embeds, labels=torch.arange(18).view(2, 9)).loss
            loss.backward(inputs=[embeds], retain_graph=True)
            loss.backward(inputs=[embeds, model.lm_head.weight])
            gradients.append(embeds.grad)
        assert torch.equal(*gradients)
        twins.step()
    twins.assert_equal()


@pytest.mark.parametrize(
    "compute",
    [
        lambda loss, weight: loss.backward(inputs=[weight]),
        lambda loss, weight: torch.autograd.backward([loss], inputs=weight),
        lambda loss, weight: torch.autograd.grad(loss, weight),
    ],
    ids=["method", "function", "grad"],
)
def test_experts_that_stream_need_a_whole_backward(
    compute: Callable[[Tensor, Tensor], object], build_engine: EngineFactory
) -> None:
    model = build_engine(tiny_model("mixtral"), experts="streamed", cpu_memory="16MiB").model
    loss = model(**tiny_batch()).loss
    with pytest.raises(ValueError, match=r"each backward also computes the experts' gradients; leave inputs out"):
        compute(loss, model.lm_head.weight)
    loss.backward()

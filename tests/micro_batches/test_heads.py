"""The modules after the last layer run one micro-batch at a time if the losses allow it."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import pytest
import torch
from engines import TwinsFactory
from joint_steps import NUM_MICRO_BATCHES, assert_close, micro_batches, train
from torch import Tensor, nn

from hf_lohan.micro_batches.joint_forward import MicroBatchHeads
from hf_lohan.testing.models import tiny_batch, tiny_model

HEADS_IN_TURN = [(what, number) for number in range(NUM_MICRO_BATCHES) for what in ("forward", "backward")]
HEADS_TOGETHER = [("forward", n) for n in (3, 2, 1, 0)] + [("backward", n) for n in range(NUM_MICRO_BATCHES)]


@pytest.mark.parametrize(
    ("family", "overrides", "order"),
    [
        ("llama", {}, HEADS_IN_TURN),
        ("opt", {}, HEADS_IN_TURN),
        ("mixtral", {"output_router_logits": True}, HEADS_TOGETHER),
    ],
)
def test_only_one_micro_batch_has_logits_at_a_time(
    family: str, overrides: dict[str, Any], order: list[tuple[str, int]], make_twins: TwinsFactory
) -> None:
    """If the loss also depends on the layers directly, all backwards come last."""
    twins = make_twins(model_factory=partial(tiny_model, family, **overrides), recompute=True)
    train(twins, 0)  # the first step detects the order
    events: list[tuple[str, int]] = []
    number_of: ContextVar[int] = ContextVar("number_of")

    def watch(_module: nn.Module, _args: Any, logits: Tensor) -> None:
        number = number_of.get()
        events.append(("forward", number))
        logits.register_hook(lambda _gradient: events.append(("backward", number)))

    def numbered(number: int, run: Callable[[], Tensor]) -> None:
        number_of.set(number)
        run()

    handle = twins.model.lm_head.register_forward_hook(watch)
    twins.engine.run_micro_batches([partial(numbered, n, run) for n, run in enumerate(micro_batches(twins, 1))])
    handle.remove()
    assert events == order
    twins.optimizer.zero_grad()
    train(twins, 2)
    twins.assert_equal()


def test_the_last_layer_s_output_is_freed_by_its_gradient() -> None:
    weight = nn.Parameter(torch.ones(8))
    heads = MicroBatchHeads(lambda tensor: tensor is weight)
    inputs = [torch.ones(8, requires_grad=True) for _ in range(2)]
    outputs = []
    for number, tensor in enumerate(inputs):
        output = heads.put_gate(number, 2 * tensor)
        outputs.append(weakref.ref(output.untyped_storage()))
        heads.run_backward_of(number, [(number + 1) * (output * weight).sum()])
        del output
        assert outputs[-1]() is None
    heads.run_joint_backward()
    assert [tensor.grad.tolist() for tensor in inputs] == [[2.0] * 8, [4.0] * 8]


def test_micro_batches_without_a_loss_are_refused(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    with pytest.raises(RuntimeError, match="no micro-batch passed its loss"):
        twins.engine.run_micro_batches([lambda: twins.model(**tiny_batch()).loss.detach()] * 2)
    train(twins, 0)
    twins.assert_equal()


def test_a_micro_batch_may_have_several_losses_and_forwards(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)

    def losses(model: Any, number: int) -> list[Tensor]:
        return [model(**tiny_batch(seed=10 * number + offset)).loss for offset in range(2)]

    def forward_and_backward(number: int) -> None:
        for loss in losses(twins.model, number):
            twins.engine.defer_backward(loss)

    for _ in range(2):
        for number in range(3):
            torch.autograd.backward(losses(twins.stock, number))
        twins.engine.run_micro_batches([partial(forward_and_backward, number) for number in range(3)])
        twins.step()
    assert_close(twins)

"""A failed micro-batch or backward leaves nothing of its step."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from engines import TwinsFactory
from joint_steps import micro_batches, train
from torch import Tensor, nn

from hf_lohan.micro_batches.joint_forward import MicroBatchHeads
from hf_lohan.testing.models import tiny_batch


def test_an_interrupt_between_heads_and_layers_drops_the_step(
    make_twins: TwinsFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head's gradients are then complete and being transferred."""
    twins = make_twins("llama", recompute=True, hold_gradients=False)
    train(twins, 0, max_norm=0.0)

    def interrupt(_heads: MicroBatchHeads) -> None:
        raise Interrupted

    with monkeypatch.context() as patched:
        patched.setattr(MicroBatchHeads, "run_joint_backward", interrupt)
        with pytest.raises(Interrupted):
            twins.engine.run_micro_batches(micro_batches(twins, 1))
    for step in range(1, 3):
        train(twins, step, max_norm=0.0)
    twins.assert_equal()


class Interrupted(BaseException):
    """Like `KeyboardInterrupt`, not caught by `except Exception`."""


@pytest.mark.covering(0)
@pytest.mark.parametrize(
    ("error", "layer", "activations"),
    [
        (ValueError, 0, "recompute"),
        (ValueError, 1, "swap"),
        (ValueError, 2, "keep"),
        (Interrupted, 0, "keep"),
        (Interrupted, 1, "recompute"),
        (Interrupted, 2, "swap"),
    ],
)
def test_a_failed_forward_changes_nothing(
    error: type[BaseException], layer: int, activations: str, make_twins: TwinsFactory
) -> None:
    recompute = activations != "keep"
    twins = make_twins("llama", recompute=recompute, activations=activations, cpu_memory="16MiB")
    train(twins, 0)
    broken = {"calls": 0}

    def fail_forward(_module: nn.Module, _args: Any, _output: Any) -> None:
        broken["calls"] += 1
        if broken["calls"] == 2:
            raise error("on purpose")

    handle = twins.model.model.layers[layer].mlp.register_forward_hook(fail_forward)
    with pytest.raises(error):
        twins.engine.run_micro_batches(micro_batches(twins, 1))
    handle.remove()
    assert {id(p) for p in twins.model.parameters()} == {id(part.parameter) for part in twins.engine.parameter_slices}
    for step in range(1, 3):
        train(twins, step)
    twins.assert_equal()


def test_a_failed_backward_drops_the_step(make_twins: TwinsFactory) -> None:
    twins = make_twins("llama", recompute=True)
    train(twins, 0)

    def fail(_gradient: Tensor) -> None:
        raise ValueError("on purpose")

    def forward_and_backward(seed: int) -> None:
        loss = twins.model(**tiny_batch(seed=seed)).loss
        if seed == 1:
            loss.register_hook(fail)
        twins.engine.defer_backward(loss)

    with pytest.raises(ValueError, match="on purpose"):
        twins.engine.run_micro_batches([partial(forward_and_backward, seed) for seed in range(3)])
    for step in range(1, 3):
        train(twins, step)
    twins.assert_equal()

"""Every family trains as in memory, wherever it reads its weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES, model_of
from covering import slow_but


def test_layers_with_shared_weights_train_as_in_memory(make_twins: Callable[..., Any]) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        made = model_of("llama")
        layers = made.model.layers
        layers[2].mlp = layers[0].mlp
        return made

    twins = make_twins(model_factory=model, cpu_memory="8MiB", gpu_memory="512KiB", recompute=True)
    twins.train(3, max_norm=1.0)
    twins.assert_equal()


ALIKE = frozenset(
    ("mistral", "qwen2", "qwen3", "gemma", "olmo2", "starcoder2", "granite", "stablelm", "phi3", "qwen3_moe", "olmoe")
)
"""Decoders of the shape of Llama, or of Mixtral. They have other norms, biases and positions, which are the model's."""


@pytest.mark.parametrize("architecture", slow_but(ARCHITECTURES.keys() - ALIKE, ARCHITECTURES))
def test_two_steps_equal_stock(architecture: str, make_twins: Callable[..., Any]) -> None:
    def model() -> Any:
        torch.manual_seed(0)
        return model_of(architecture)

    can_recompute = model().supports_gradient_checkpointing
    twins = make_twins(
        model_factory=model, hold_gradients=False, cpu_memory="8MiB", gpu_memory="512KiB", recompute=can_recompute
    )
    for step in range(2):
        twins.backward(step, rng_seed=step)  # some have dropout by default
        twins.step()
    twins.assert_equal()

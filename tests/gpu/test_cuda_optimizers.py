"""Optimizers other than AdamW on CUDA. They run on the CPU, except Muon's matrix products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_lohan import Accelerator, LohanPlugin, engine_of
from hf_lohan.device import device_for
from hf_lohan.model import hidden_matrices
from hf_lohan.testing.models import tiny_batch, tiny_model

NUM_STEPS = 5


def muon_and_adamw(model: Any) -> list[torch.optim.Optimizer]:
    matrices = hidden_matrices(model)
    of_layers = [p for p in model.parameters() if p in matrices]
    rest = [p for p in model.parameters() if p not in matrices]
    return [torch.optim.Muon(of_layers, lr=1e-3), torch.optim.AdamW(rest, lr=1e-3)]


def sgd(model: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)]


def train(model: Any, optimizers: Any, backward: Callable[[Any], Any]) -> None:
    for step in range(NUM_STEPS):
        backward(model(**{name: value.cuda() for name, value in tiny_batch(seed=step).items()}).loss)
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@pytest.mark.parametrize(
    ("make", "tolerance"), [(sgd, 1e-5), (muon_and_adamw, 2e-4)], ids=["sgd", "muon"]
)  # Newton-Schulz is in bfloat16, and Adam divides by numbers near 0
def test_steps_equal_those_of_torch_on_the_gpu(make: Any, tolerance: float, tmp_path: Path) -> None:
    stock = tiny_model("llama").train().cuda()
    train(stock, make(stock), lambda loss: loss.backward())
    offload = {"cpu_memory": "8MiB", "gpu_memory": "4MiB", "ssd": str(tmp_path)}
    accelerator = Accelerator(lohan_plugin=LohanPlugin(offload=offload))
    model = tiny_model("llama").train()
    prepared, *optimizers = accelerator.prepare(model, *make(model))
    train(prepared, optimizers, accelerator.backward)
    engine = engine_of(model)
    worst = max(
        float((engine.parameters.read_parameter(name) - p.detach().cpu()).abs().max())
        for name, p in stock.named_parameters()
    )
    engine.close()
    assert worst < tolerance


def test_compute_aside_returns_a_finished_host_tensor() -> None:
    device, value = device_for("cuda"), torch.randn(512, 1024)
    for _ in range(20):
        product = device.compute_aside(lambda matrix: matrix @ matrix.T, value)
        assert product.device.type == "cpu"
        assert torch.allclose(product, value @ value.T, rtol=1e-2, atol=1e-1)

"""The shapes of models in torch's tests of FSDP, as layers: shared parameters, nested modules, late copies, parameters
that are frozen here and there, experts of another width. All train as in memory, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from async_device import AsyncDevice
from torch import Tensor, nn
from torch.nn import functional as F

from hf_lohan.device import CpuDevice, Device

pytestmark = pytest.mark.slow
VOCAB_SIZE = 23
WIDTH = 16
NUM_STEPS = 4
SETTINGS = {"cpu_memory": "8MiB", "gpu_memory": "1MiB"}


class Nested(nn.Module):
    """Modules in modules, of several widths."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.Sequential(nn.Sequential(nn.Linear(4, 16)), nn.Linear(16, 16))
        self.module = nn.Sequential(nn.Linear(WIDTH, 4), inner, nn.Sequential(nn.Linear(16, 4)), nn.Linear(4, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.module(hidden)


class Mixture(nn.Module):
    """A shared projection to an odd width, an expert that half of the tokens need, and a projection back."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, 23)
        self.expert = nn.Linear(23, 12)
        self.down = nn.Linear(12, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        output = hidden.clone()
        output[:, ::2] = hidden[:, ::2] + self.down(self.expert(self.shared(hidden[:, ::2])).relu())
        return output


class WithLoss(nn.Module):
    """A model of the batches of `tiny_batch`."""

    def forward(self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor) -> Any:
        logits = self.logits(input_ids % VOCAB_SIZE)
        return SimpleNamespace(loss=F.cross_entropy(logits.flatten(0, 1), (labels % VOCAB_SIZE).flatten()))

    def logits(self, ids: Tensor) -> Tensor:
        raise NotImplementedError


class Layered(WithLoss):
    def __init__(self, layer: Callable[[], nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.layers = nn.ModuleList(layer() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)

    def logits(self, ids: Tensor) -> Tensor:
        hidden = self.embed(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        logits: Tensor = self.head(hidden)
        return logits


class SharedParameters(WithLoss):
    """An encoder and a decoder whose embedding is the head's weight, with buffers."""

    def __init__(self, *, dropout: float = 0.0, has_batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB_SIZE, WIDTH)
        self.transformer = nn.Transformer(WIDTH, 4, 2, 2, dim_feedforward=8, dropout=dropout)
        self.head = nn.Linear(WIDTH, VOCAB_SIZE)
        self.head.weight = self.embed.weight
        self.register_buffer("bias", torch.ones(WIDTH))
        self.register_buffer("counts", torch.zeros(WIDTH, dtype=torch.long))
        self.norm = nn.BatchNorm1d(WIDTH) if has_batch_norm else nn.Identity()

    def logits(self, ids: Tensor) -> Tensor:
        embedded = self.embed(ids.t())  # [tokens, rows, width]
        source = embedded + self.bias + self.counts.type_as(embedded)
        target = self.norm(embedded.transpose(1, 2)).transpose(1, 2)
        logits: Tensor = self.head(self.transformer(source, target)).transpose(0, 1)
        return logits


def frozen_but(model: nn.Module, *trained: str) -> nn.Module:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(any(part in name for part in trained))
    return model


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "shared parameters": SharedParameters,
    "shared parameters, dropout": lambda: SharedParameters(dropout=0.1),
    "shared parameters, batch norm": lambda: SharedParameters(has_batch_norm=True),
    "nested": lambda: Layered(Nested),
    "mixture": lambda: Layered(Mixture),
    "last projection trained": lambda: frozen_but(Layered(Nested), "layers.2.module.3"),
    "biases trained": lambda: frozen_but(Layered(Nested), "bias"),
    "expert frozen": lambda: frozen_but(Layered(Mixture), "shared", "down", "embed"),
}
DEVICES: dict[str, Callable[[], Device]] = {"in time": CpuDevice, "delayed": lambda: AsyncDevice(5, max_delay_s=5e-4)}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hold_gradients", [True, False], ids=["held", "active"])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_shape_trains_as_in_memory(shape: str, hold_gradients: bool, device: str, make_twins: Any) -> None:
    twins = make_twins(model_factory=SHAPES[shape], hold_gradients=hold_gradients, device=DEVICES[device](), **SETTINGS)
    for step in range(NUM_STEPS):
        twins.backward(step, rng_seed=step)
        if hold_gradients:
            twins.clip(0.5)
        twins.step()
    twins.assert_equal()
    buffers = dict(twins.model.named_buffers())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in twins.stock.named_buffers())

"""A model of three layers with any forward function, run with `ActivationTiers` or in plain torch. Weights stay in
memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hf_lohan.absent import StandIns, saved_weight_hooks
from hf_lohan.activations.tiers import ActivationTiers
from hf_lohan.costs import INPUT, Placement
from hf_lohan.device import CpuDevice, Device, HostStack

WIDTH = 16
NUM_LAYERS = 3
OPERATIONS = (INPUT, "aten.addmm#0", "aten.mm#0")
Forward = Callable[["Layer", Tensor], Any]


class Layer(nn.Module):
    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.function = function

    def forward(self, hidden: Tensor) -> Any:
        return self.function(self, hidden)


class LayeredModel(nn.Module):
    """Three layers that run with `tiers`, or in plain torch if it is None."""

    def __init__(self, function: Forward, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(function) for _ in range(NUM_LAYERS))
        self.between = between
        self.tiers: ActivationTiers | None = None

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden * 1.5
        for layer in self.layers:
            before = hidden
            run = self.tiers.run_layer if self.tiers is not None else lambda forward, *args: forward(*args)
            hidden = run(partial(type(layer).forward, layer), before)
            hidden = self.between(hidden, before)
        return hidden.sin().sum()

    def gradients(self, num_backwards: int = 1) -> list[Tensor]:
        leaf = torch.linspace(-1, 1, 8 * WIDTH).view(8, WIDTH).requires_grad_()
        if self.tiers is None:
            loss = self(leaf)
        else:
            with saved_weight_hooks(StandIns(CpuDevice()), lambda _tensor: None, pytest.fail, self.tiers):
                loss = self(leaf)
            self.tiers.expect_backward()
        for number in range(num_backwards):
            loss.backward(retain_graph=number < num_backwards - 1)
        found = [leaf.grad, *(parameter.grad for parameter in self.parameters())]
        return [loss.detach(), *(gradient for gradient in found if gradient is not None)]

    def use_tiers(self, place: Placement, device: Device | None = None, *more_operations: str) -> None:
        """Put the activations of all layers in `place`. Call `close` at the end."""
        names = {layer: str(number) for number, layer in enumerate(self.layers)}
        device = device or CpuDevice()
        ram = HostStack(device)
        ram.reallocate(1 << 20)
        self.tiers = ActivationTiers(device, names, ram)
        self.tiers.set_placements(dict.fromkeys(names.values(), dict.fromkeys((*OPERATIONS, *more_operations), place)))

    def close(self) -> None:
        if self.tiers is not None:
            self.tiers.close()


def all_equal(ours: list[Tensor], stock: list[Tensor]) -> bool:
    return len(ours) == len(stock) and all(torch.equal(a, b) for a, b in zip(ours, stock, strict=True))

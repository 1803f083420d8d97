"""Linear layers that have all their weights, but wait for the time of their products instead of computing them.

`pace_layers` replaces a model's layers by these. They compute a cheap function of a few of their weights, with equal
results on every device. Each weight gets a gradient. It is the true gradient for used weights, and a small constant for
all others. On a `PacedDevice`, forward and backward take the time of the FLOPs of a true product, and the planner
counts these FLOPs.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any
from weakref import WeakValueDictionary

import torch
from paced_device import PacedDevice
from torch import Tensor, nn
from torch.utils.flop_counter import register_flop_formula

UNUSED_GRADIENT_SCALE = 1e-6
"""So small that a billion such gradients have a norm far below 1, so that only the true gradients decide whether a step
clips."""
_PATTERN_NUMEL = 1 << 20

_devices: WeakValueDictionary[int, PacedDevice] = WeakValueDictionary()
"""Devices by number. Layers pass the number to the operations, because these take no objects."""


class PacedLinear(nn.Module):
    """Replaces an `nn.Linear` without a bias. The weight is [out_features, in_features]."""

    def __init__(self, weight: nn.Parameter, device: PacedDevice | None) -> None:
        """With ``device=None`` nothing waits."""
        super().__init__()
        self.weight = weight
        self.device_number = -1
        if device is not None:
            self.device_number = id(device)
            _devices[self.device_number] = device

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = _Product.apply(x, self.weight, self.device_number)  # type: ignore[no-untyped-call]
        return result


def pace_layers(layers: Iterable[nn.Module], device: PacedDevice | None) -> None:
    """Replace every `nn.Linear` in the layers. Raises ValueError if one has a bias."""
    for layer in layers:
        for parent in list(layer.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, nn.Linear):
                    if child.bias is not None:
                        raise ValueError(f"{name} has a bias, which cannot be paced; choose a model without biases")
                    setattr(parent, name, PacedLinear(child.weight, device))


def paced_expert(device: PacedDevice) -> Callable[[nn.Module, Tensor, Mapping[str, Tensor]], Tensor]:
    """Return a function that replaces the computation of one gated expert's rows, and waits for the time of its
    products."""
    number = id(device)
    _devices[number] = device

    def compute(module: nn.Module, rows: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
        up, down = weights["gate_up_proj"][0], weights["down_proj"][0]
        hidden = _Product.apply(rows, up, number)  # type: ignore[no-untyped-call]
        result: Tensor = _Product.apply(hidden[:, : down.shape[1]], down, number)  # type: ignore[no-untyped-call]
        return result

    return compute


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, device_number: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.device_number = device_number
        return mm(x, weight, device_number)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        return *mm_backward(gradient, x, weight, ctx.device_number), None


def _mm(x: Tensor, weight: Tensor, device_number: int) -> Tensor:
    """Return [..., out] for x [..., in] and weight [out, in]. Each output is one input times one of the first `out`
    weights."""
    _take_flops(device_number, _flops(x.shape, weight.shape))
    return _repeated(x, len(weight)) * weight.view(-1)[: len(weight)]


def _mm_backward(gradient: Tensor, x: Tensor, weight: Tensor, device_number: int) -> tuple[Tensor, Tensor]:
    """Return the gradients of x and weight for gradient [..., out]."""
    _take_flops(device_number, 2 * _flops(x.shape, weight.shape))
    num_outputs, num_inputs = weight.shape
    of_inputs = gradient * weight.view(-1)[:num_outputs]
    missing = -num_outputs % num_inputs
    of_inputs = nn.functional.pad(of_inputs, (0, missing)).unflatten(-1, (-1, num_inputs)).sum(-2)
    of_weight = _small_numbers(weight.numel(), weight.dtype)
    of_used = gradient * _repeated(x, num_outputs)
    of_weight[:num_outputs] = of_used.reshape(-1, num_outputs).sum(0)
    return of_inputs, of_weight.view(weight.shape)


def _flops(x_shape: Sequence[int], weight_shape: Sequence[int]) -> int:
    return 2 * math.prod(x_shape) * weight_shape[0]


# The engine recognizes a product, whose output is worth keeping for backward, by the name `mm`.
_library = torch.library.Library("lohan_paced", "DEF")
_library.define("mm(Tensor x, Tensor weight, int device_number) -> Tensor")
_library.define("mm_backward(Tensor gradient, Tensor x, Tensor weight, int device_number) -> (Tensor, Tensor)")
_library.impl("mm", _mm, "CPU")
_library.impl("mm_backward", _mm_backward, "CPU")
_library.impl("mm", lambda x, weight, _: x.new_empty(*x.shape[:-1], len(weight)), "Meta")
_library.impl("mm_backward", lambda _g, x, weight, _n: (torch.empty_like(x), torch.empty_like(weight)), "Meta")
mm, mm_backward = torch.ops.lohan_paced.mm, torch.ops.lohan_paced.mm_backward
register_flop_formula(mm)(lambda x_shape, weight_shape, *_, **__: _flops(x_shape, weight_shape))


def _take_flops(device_number: int, flops: float) -> None:
    device = _devices.get(device_number)
    if device is not None:
        device.take_flops(flops)


def _repeated(x: Tensor, numel: int) -> Tensor:
    """Return [..., numel], which repeats x [..., in]."""
    times = -(-numel // x.shape[-1])
    return x.repeat(*[1] * (x.dim() - 1), times)[..., :numel]


def _small_numbers(numel: int, dtype: torch.dtype) -> Tensor:
    """Return a new tensor [numel], always with the same numbers. Filling it costs no time, because its pages are mapped
    from one file in memory until they are written."""
    mapping = mmap.mmap(_file_of_small_numbers(numel, dtype), numel * dtype.itemsize, flags=mmap.MAP_PRIVATE)
    return torch.frombuffer(mapping, dtype=dtype)


@cache
def _file_of_small_numbers(numel: int, dtype: torch.dtype) -> int:
    generator = torch.Generator().manual_seed(0)
    numbers = torch.randn(min(numel, _PATTERN_NUMEL), generator=generator) * UNUSED_GRADIENT_SCALE
    content = numbers.to(dtype).view(torch.uint8).numpy().tobytes()
    file = os.memfd_create("lohan-small-numbers")
    left_bytes = numel * dtype.itemsize
    while left_bytes:
        left_bytes -= os.write(file, content[:left_bytes])
    return file

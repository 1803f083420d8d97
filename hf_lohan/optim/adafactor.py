"""Adafactor on whole parameters, as torch has it and as transformers has it.

Of a parameter with two dimensions or more it keeps what its last two add up to: rows and columns. They lie one behind
the other at the beginning of a record that has an element for each of the parameter's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import adafactor


def factors_fit(shape: tuple[int, ...]) -> bool:
    """Whether the record has room for rows and columns."""
    return len(shape) < 2 or math.prod(shape[:-1]) + math.prod(shape[:-2]) * shape[-1] <= math.prod(shape)


def _factors(variance: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Views: rows [..., m, 1] and columns [..., 1, n] of [..., m, n]."""
    num_rows, num_columns = math.prod(shape[:-1]), math.prod(shape[:-2]) * shape[-1]
    rows = variance[:num_rows].view(*shape[:-1], 1)
    return rows, variance[num_rows : num_rows + num_columns].view(*shape[:-2], 1, shape[-1])


def torch_adafactor_(
    weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, settings: Mapping[str, Any]
) -> None:
    """A step of `torch.optim.Adafactor`. ``weight`` and ``gradient`` are float32 of the parameter's shape, its states
    flat."""
    variance, shape = states["variance"], tuple(weight.shape)
    rows, columns = _factors(variance, shape) if len(shape) > 1 else (None, None)
    adafactor(
        [weight],
        [gradient],
        [rows],
        [columns],
        [variance.view(shape) if rows is None else None],
        [torch.tensor(float(step - 1))],
        foreach=False,
        maximize=False,
        **settings,
    )


def transformers_adafactor_(
    weight: Tensor, gradient: Tensor, states: Mapping[str, Tensor], step: int, settings: Mapping[str, Any]
) -> None:
    """A step of `transformers.Adafactor`, which has no function for it: the same operations in the same order."""
    shape, beta1 = tuple(weight.shape), settings["beta1"]
    lr = _learning_rate(weight, step, settings)
    beta2t = 1.0 - math.pow(step, settings["decay_rate"])
    update = (gradient**2) + settings["eps"][0]
    if len(shape) > 1:
        rows, columns = _factors(states["variance"], shape)
        row, column = rows.squeeze(-1), columns.squeeze(-2)
        row.mul_(beta2t).add_(update.mean(dim=-1), alpha=1.0 - beta2t)
        column.mul_(beta2t).add_(update.mean(dim=-2), alpha=1.0 - beta2t)
        row_factor = (row / row.mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
        update = torch.mul(row_factor, column.unsqueeze(-2).rsqrt()).mul_(gradient)
    else:
        variance = states["variance"].view(shape)
        variance.mul_(beta2t).add_(update, alpha=1.0 - beta2t)
        update = variance.rsqrt().mul_(gradient)
    update.div_((_rms(update) / settings["clip_threshold"]).clamp_(min=1.0))
    update.mul_(lr)
    if beta1 is not None:
        exp_avg = states["exp_avg"].view(shape)
        update = exp_avg.mul_(beta1).add_(update, alpha=1 - beta1)
    if settings["weight_decay"] != 0:
        weight.add_(weight, alpha=-settings["weight_decay"] * lr)
    weight.add_(-update)


def _learning_rate(weight: Tensor, step: int, settings: Mapping[str, Any]) -> Any:
    relative: Any = settings["lr"]
    if settings["relative_step"]:
        smallest = 1e-6 * step if settings["warmup_init"] else 1e-2
        relative = min(smallest, 1.0 / math.sqrt(step))
    if not settings["scale_parameter"]:
        return 1.0 * relative
    return max(settings["eps"][1], _rms(weight)) * relative


def _rms(tensor: Tensor) -> Tensor:
    rms: Tensor = tensor.norm(2) / (tensor.numel() ** 0.5)
    return rms

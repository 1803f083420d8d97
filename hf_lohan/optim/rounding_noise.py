"""Noise for stochastic rounding. It depends only on the element and the step, and not on chunks or threads."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PERIOD = 1 << 16
"""Number of elements after which the noise repeats. A period has each value once. Each step shifts the noise."""
MAX_RUN_NUMEL = 1 << 16
"""Largest ``numel`` of a call of `integers` or `fractions`."""
_LOW_32_BITS = (1 << 32) - 1


def integers(position: int, numel: int, step: int, stream: int) -> Tensor:
    """Return int32 [numel], uniform in [0, 65536), for a parameter's ``step`` and the elements of a record from
    ``position`` on. ``stream`` separates several uses of noise for one element. Do not write to the result."""
    start = _start(position, step, stream)
    return _integers()[start : start + numel]


def fractions(position: int, numel: int, step: int, stream: int) -> Tensor:
    """Return float32 [numel], uniform in (0, 1) without both ends, for the arguments of `integers`."""
    start = _start(position, step, stream)
    return _fractions()[start : start + numel]


def _start(position: int, step: int, stream: int) -> int:
    return (position + _mixed(2 * step + stream)) % PERIOD


def _mixed(value: int) -> int:
    """Return a 32-bit hash (the finalizer of MurmurHash3), so that successive steps begin at distant elements."""
    value = (value * 0x9E3779B1) & _LOW_32_BITS
    value = ((value ^ value >> 16) * 0x85EBCA6B) & _LOW_32_BITS
    value = ((value ^ value >> 13) * 0xC2B2AE35) & _LOW_32_BITS
    return value ^ value >> 16


@cache
def _integers() -> Tensor:
    """Return all values, in an order that does not depend on torch's generators. The first values are repeated at the
    end, so that every result is one slice."""
    keys = torch.tensor([_mixed(value) for value in range(PERIOD)], device="cpu")
    order = keys.argsort(stable=True).to(torch.int32)
    return torch.cat([order, order[:MAX_RUN_NUMEL]])


@cache
def _fractions() -> Tensor:
    return _integers().float().add_(0.5).div_(PERIOD)

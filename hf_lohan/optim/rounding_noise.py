"""Numbers to round by chance with: the same ones for the same element and step, whatever chunk or thread it is in."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

PERIOD = 1 << 16
"""The noise repeats after so many elements, each of its values once. In each step all elements see other ones."""
MAX_RUN_NUMEL = 1 << 16
"""The most elements that one `integers` or `fractions` call is for."""
_LOW_32_BITS = (1 << 32) - 1


def integers(position: int, numel: int, step: int, stream: int) -> Tensor:
    """int32 [numel], uniform in [0, 65536), for the elements from ``position`` of their record on in a parameter's
    ``step``; ``stream`` tells apart what an element needs noise for. Not to be written to."""
    start = _start(position, step, stream)
    return _integers()[start : start + numel]


def fractions(position: int, numel: int, step: int, stream: int) -> Tensor:
    """float32 [numel], uniform between 0 and 1, neither of them among them. See `integers`."""
    start = _start(position, step, stream)
    return _fractions()[start : start + numel]


def _start(position: int, step: int, stream: int) -> int:
    return (position + _mixed(2 * step + stream)) % PERIOD


def _mixed(value: int) -> int:
    """A hash of 32 bits (the finalizer of MurmurHash3): steps that follow one another begin far apart."""
    value = (value * 0x9E3779B1) & _LOW_32_BITS
    value = ((value ^ value >> 16) * 0x85EBCA6B) & _LOW_32_BITS
    value = ((value ^ value >> 13) * 0xC2B2AE35) & _LOW_32_BITS
    return value ^ value >> 16


@cache
def _integers() -> Tensor:
    """All values in an order that is a matter of arithmetic, not of some torch version's generator; and the beginning
    once more, so that a run that goes past the end is one slice."""
    keys = torch.tensor([_mixed(value) for value in range(PERIOD)], device="cpu")
    order = keys.argsort(stable=True).to(torch.int32)
    return torch.cat([order, order[:MAX_RUN_NUMEL]])


@cache
def _fractions() -> Tensor:
    return _integers().float().add_(0.5).div_(PERIOD)

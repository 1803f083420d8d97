"""Noise for stochastic rounding. It depends only on the element and the step, and not on chunks or threads. Noise for
moments comes from a fixed table, indexed by offset in a record. For weights it is a hash with the run's seed."""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

PERIOD = 1 << 16
"""Number of elements after which the noise repeats. A period has each value once. Each step shifts the noise."""
MAX_RUN_NUMEL = 1 << 16
"""Largest ``numel`` of a call."""
_LOW_32_BITS = (1 << 32) - 1


def integers(position: int, numel: int, step: int, stream: int) -> Tensor:
    """Return int32 [numel], uniform in [0, 65536), for a parameter's ``step`` and the elements of a record from
    ``position`` on. ``stream`` separates several uses of noise for one element. Do not write to the result."""
    start = _start(position, step, stream)
    return _integers()[start : start + numel]


def fractions(position: int, numel: int, step: int, stream: int) -> Tensor:
    """Return float32 [numel], uniform in (0, 1) without both ends. The arguments are as in `integers`."""
    start = _start(position, step, stream)
    return _fractions()[start : start + numel]


def hashed_integers(key: str, first: int, numel: int, scratch: Tensor) -> Tensor:
    """Return int32 [numel], uniform in [0, 65536), for the elements of a parameter from ``first`` on. They are a hash
    of ``key`` and the element, in integer arithmetic that gives equal results on every device. ``scratch`` is int32 [2,
    numel], and holds the result."""
    hashed, shifted = scratch[:, :numel]
    keys = blake2b(key.encode(), digest_size=8).digest()
    start, salt = (int.from_bytes(part, "little") for part in (keys[:4], keys[4:]))
    torch.add(_offsets()[:numel], _signed(start + first), out=hashed)
    for shift, factor in ((0, 0x9E3779B1), (16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        if shift:
            _shift_right(hashed, shift, shifted)
            hashed.bitwise_xor_(shifted).add_(_signed(salt))
        hashed.mul_(_signed(factor))
    return _shift_right(hashed, 16, shifted)


def _shift_right(values: Tensor, num_bits: int, out: Tensor) -> Tensor:
    """Shift in zeros, even for negative numbers."""
    return torch.bitwise_right_shift(values, num_bits, out=out).bitwise_and_((1 << (32 - num_bits)) - 1)


def _signed(value: int) -> int:
    """Return the int32 with the low 32 bits of a number."""
    return (value + (1 << 31) & _LOW_32_BITS) - (1 << 31)


@cache
def _offsets() -> Tensor:
    return torch.arange(MAX_RUN_NUMEL, dtype=torch.int32, device="cpu")


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

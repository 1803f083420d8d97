"""Values that are hard to encode, and reference encodings in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

HIGHEST = {8: 127, 4: 7}


def hard_values(numel: int, block_numel: int, dtype: torch.dtype = torch.float32, *, seed: int = 0) -> Tensor:
    """Return values [numel] of all magnitudes. The first blocks have zeros, minus zeros, subnormal numbers, an
    infinity, a NaN and the largest number.
    """
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=generator) * torch.randn(numel, generator=generator).exp() * 1e-3
    zeros, minus_zeros, subnormal, infinite, not_a_number, largest = values.split(block_numel)[:6]
    zeros.zero_()
    minus_zeros.fill_(-0.0)
    subnormal.mul_(1e-39)
    infinite[-1] = -torch.inf
    not_a_number[0] = torch.nan
    largest.clamp_(-1, 1).mul_(torch.finfo(dtype).max)
    return values.to(dtype)


def ties(block_numel: int, num_bits: int) -> Tensor:
    """Return a block with scale 1 and values halfway between two codes."""
    values = torch.arange(block_numel).float().remainder(2 * HIGHEST[num_bits]).sub(HIGHEST[num_bits]).add(0.5)
    values[0] = -HIGHEST[num_bits]
    return values


def plain_coding(values: Tensor, num_bits: int, block_numel: int, scale_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return levels [num_blocks, block_numel] and scales [num_blocks] by the definition, block by block."""
    highest = HIGHEST[num_bits]
    padded = torch.nn.functional.pad(values.float(), (0, -values.numel() % block_numel)).view(-1, block_numel)
    levels, scales = torch.zeros(padded.shape), torch.zeros(len(padded), dtype=scale_dtype)
    for k, block in enumerate(padded):
        if not bool(block.isfinite().all()):
            scales[k] = torch.nan
            continue
        scales[k] = block.abs().max() / highest
        if scales[k] == 0:
            scales[k] = 1
        levels[k] = (block / scales[k].float()).round().clamp(-highest, highest) + 0.0  # codes have no -0
    return levels, scales


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    """Check that all bits are equal, except that any NaN equals any other."""
    assert found.dtype == expected.dtype and found.shape == expected.shape
    as_integers = {1: torch.int8, 2: torch.int16, 4: torch.int32}[found.dtype.itemsize]
    is_same = found.view(as_integers) == expected.view(as_integers)
    if found.is_floating_point():
        is_same |= found.isnan() & expected.isnan()
    wrong = (~is_same).nonzero().flatten()
    assert wrong.numel() == 0, f"at {wrong[:5].tolist()}: {found[wrong[:5]]}, expected {expected[wrong[:5]]}"

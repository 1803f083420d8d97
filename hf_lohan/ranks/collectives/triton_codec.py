"""The computations of `block_operators` for CUDA in Triton, each in one pass. They compute the bits of `torch_codec`.

This module is imported only if Triton is installed. To get the same bits, divisions round to nearest, products are not
fused with sums (`enable_fp_fusion`), and values are rounded half to even by adding and subtracting a number whose last
digit is one. A program works on several whole blocks, each in two halves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_lohan.ranks.collectives.torch_codec import HIGHEST_CODE

_NUMEL_PER_PROGRAM = 2048
_ROUNDER = tl.constexpr(12582912.0)
"""1.5 * 2^23. A float32 of this size has no digits after the point."""


def quantize_(values: Tensor, num_bits: int, block_numel: int, codes: Tensor, scales: Tensor) -> None:
    _launch(_quantize_kernel, scales, block_numel, (values, codes, scales, values.numel(), len(scales)), num_bits)


def dequantize_(codes: Tensor, scales: Tensor, num_bits: int, block_numel: int, values: Tensor) -> None:
    _launch(_dequantize_kernel, scales, block_numel, (codes, scales, values, values.numel(), len(scales)), num_bits)


def dequantize_sum_(
    codes: Sequence[Tensor], scales: Sequence[Tensor], num_bits: int, block_numel: int, factor: float, values: Tensor
) -> None:
    arguments = (tuple(codes), tuple(scales), factor, values, values.numel(), len(scales[0]))
    _launch(_sum_kernel, values, block_numel, arguments, num_bits)


def dequantize_sum_quantize_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    num_bits: int,
    block_numel: int,
    out_block_numel: int,
    numel: int,
    factor: float,
    out_codes: Tensor,
    out_scales: Tensor,
) -> None:
    arguments = (tuple(codes), tuple(scales), factor, out_codes, out_scales, len(scales[0]), len(out_scales))
    is_split = out_block_numel != block_numel
    _launch(_sum_quantize_kernel, out_scales, out_block_numel, arguments, num_bits, IS_SPLIT=is_split)


def _launch(
    kernel: Any, like: Tensor, block_numel: int, arguments: tuple[Any, ...], num_bits: int, **settings: bool
) -> None:
    num_blocks = arguments[-1]
    rows = max(1, _NUMEL_PER_PROGRAM // block_numel)
    if num_blocks == 0:
        return
    with torch.accelerator.device_index(like.device.index):
        kernel[(triton.cdiv(num_blocks, rows),)](
            *arguments,
            ROWS=rows,
            HALF=block_numel // 2,
            NUM_BITS=num_bits,
            HIGHEST=float(HIGHEST_CODE[num_bits]),
            **settings,
            enable_fp_fusion=False,
        )


@triton.jit
def _quantize_kernel(
    values, codes, scales, numel, num_blocks,
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_BITS: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = row[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    first = _widened(tl.load(values + places, mask=places < numel, other=0.0))
    second = _widened(tl.load(values + places + HALF, mask=places + HALF < numel, other=0.0))
    _store_coded(first, second, row, codes, scales, num_blocks, HALF, NUM_BITS, HIGHEST)


@triton.jit
def _dequantize_kernel(
    codes, scales, values, numel, num_blocks,
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_BITS: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first, second = _load_decoded(codes, scales, row, num_blocks, HALF, NUM_BITS)
    places = row[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(values + places, _narrowed(first, values.dtype.element_ty), mask=places < numel)
    tl.store(values + places + HALF, _narrowed(second, values.dtype.element_ty), mask=places + HALF < numel)


@triton.jit
def _sum_kernel(
    codes, scales, factor, values, numel, num_blocks,
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_BITS: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    first, second = _load_sum(codes, scales, factor, row, num_blocks, HALF, NUM_BITS)
    places = row[:, None] * (2 * HALF) + tl.arange(0, HALF)[None, :]
    tl.store(values + places, first, mask=places < numel)
    tl.store(values + places + HALF, second, mask=places + HALF < numel)


@triton.jit
def _sum_quantize_kernel(
    codes, scales, factor, out_codes, out_scales, num_in_blocks, num_blocks,
    ROWS: tl.constexpr, HALF: tl.constexpr, NUM_BITS: tl.constexpr, HIGHEST: tl.constexpr, IS_SPLIT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    if IS_SPLIT:  # each half is a separate block
        first = _load_sum_of_half(codes, scales, factor, 2 * row, num_in_blocks, HALF, NUM_BITS)
        second = _load_sum_of_half(codes, scales, factor, 2 * row + 1, num_in_blocks, HALF, NUM_BITS)
    else:
        first, second = _load_sum(codes, scales, factor, row, num_blocks, HALF, NUM_BITS)
    _store_coded(first, second, row, out_codes, out_scales, num_blocks, HALF, NUM_BITS, HIGHEST)


@triton.jit
def _load_sum(codes, scales, factor, row, num_blocks, HALF: tl.constexpr, NUM_BITS: tl.constexpr):
    first, second = _load_decoded(codes[0], scales[0], row, num_blocks, HALF, NUM_BITS)
    first, second = first * factor, second * factor
    for k in tl.static_range(1, len(codes)):
        more_first, more_second = _load_decoded(codes[k], scales[k], row, num_blocks, HALF, NUM_BITS)
        first += more_first * factor
        second += more_second * factor
    return first, second


@triton.jit
def _load_sum_of_half(codes, scales, factor, block, num_blocks, HALF: tl.constexpr, NUM_BITS: tl.constexpr):
    total = _load_decoded_half(codes[0], scales[0], block, num_blocks, HALF, NUM_BITS) * factor
    for k in tl.static_range(1, len(codes)):
        total += _load_decoded_half(codes[k], scales[k], block, num_blocks, HALF, NUM_BITS) * factor
    return total


@triton.jit
def _load_decoded_half(codes, scales, block, num_blocks, HALF: tl.constexpr, NUM_BITS: tl.constexpr):
    scale = _widened(tl.load(scales + block, mask=block < num_blocks, other=1.0))[:, None]
    column, is_there = tl.arange(0, HALF)[None, :], (block < num_blocks)[:, None]
    if NUM_BITS == 8:
        code = tl.load(codes + block[:, None] * HALF + column, mask=is_there, other=0).to(tl.int32)
    else:
        places = block[:, None] * (HALF // 2) + column % (HALF // 2)
        both = tl.load(codes + places, mask=is_there, other=8).to(tl.int32)  # 8 has two codes of zero
        code = tl.where(column < HALF // 2, (both & 15) - 8, both >> 4)
    return code.to(tl.float32) * scale


@triton.jit
def _load_decoded(codes, scales, row, num_blocks, HALF: tl.constexpr, NUM_BITS: tl.constexpr):
    scale = _widened(tl.load(scales + row, mask=row < num_blocks, other=1.0))[:, None]
    column, is_there = tl.arange(0, HALF)[None, :], (row < num_blocks)[:, None]
    if NUM_BITS == 8:
        first = tl.load(codes + row[:, None] * (2 * HALF) + column, mask=is_there, other=0).to(tl.int32)
        second = tl.load(codes + row[:, None] * (2 * HALF) + HALF + column, mask=is_there, other=0).to(tl.int32)
    else:
        both = tl.load(codes + row[:, None] * HALF + column, mask=is_there, other=0).to(tl.int32)
        first, second = (both & 15) - 8, both >> 4
    return first.to(tl.float32) * scale, second.to(tl.float32) * scale


@triton.jit
def _store_coded(
    first, second, row, codes, scales, num_blocks, HALF: tl.constexpr, NUM_BITS: tl.constexpr, HIGHEST: tl.constexpr
):  # fmt: skip
    largest = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
    # Only a finite number minus itself is zero. (A maximum would ignore NaN.)
    is_finite = tl.sum(first - first, axis=1) + tl.sum(second - second, axis=1) == 0
    scale = tl.where(is_finite, tl.div_rn(largest, HIGHEST), float("nan"))
    wide = _widened(_narrowed(scale, scales.dtype.element_ty))
    wide = tl.where(wide == 0, 1.0, wide)
    tl.store(scales + row, _narrowed(wide, scales.dtype.element_ty), mask=row < num_blocks)
    lower, upper = _levels(first, wide, HIGHEST), _levels(second, wide, HIGHEST)
    column, is_there = tl.arange(0, HALF)[None, :], (row < num_blocks)[:, None]
    if NUM_BITS == 8:
        tl.store(codes + row[:, None] * (2 * HALF) + column, lower.to(tl.int8), mask=is_there)
        tl.store(codes + row[:, None] * (2 * HALF) + HALF + column, upper.to(tl.int8), mask=is_there)
    else:
        tl.store(codes + row[:, None] * HALF + column, (upper * 16 + lower + 8).to(tl.int8), mask=is_there)


@triton.jit
def _levels(values, scale, HIGHEST: tl.constexpr):
    quotient = tl.div_rn(values, tl.broadcast_to(scale[:, None], values.shape))
    rounded = (quotient + _ROUNDER) - _ROUNDER
    bounded = tl.minimum(tl.maximum(rounded, -HIGHEST), HIGHEST)
    return tl.where(quotient == quotient, bounded, 0.0)


# Convert between float32 and bfloat16 by their bits, because Triton's interpreter, which the tests use, truncates
# instead of rounding, and misreads subnormal bfloat16 numbers.


@triton.jit
def _widened(values):
    if values.dtype == tl.bfloat16:
        wide = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        wide = values.to(tl.float32)
    return wide


@triton.jit
def _narrowed(values, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = values.to(tl.int32, bitcast=True)
        rounded = tl.where(values == values, bits + 0x7FFF + ((bits >> 16) & 1), bits)
        narrow = (rounded >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = values.to(dtype)
    return narrow

"""Decodes packed weights on CUDA with Triton kernels, in one pass. Results are bitwise equal to results of the torch
operations in `four_bit` and `encoded_weights`.

This module is imported only if Triton is installed. A program decodes neighbouring bytes of codes. To get equal bits,
products are not fused with sums (`enable_fp_fusion`). Values are rounded to bfloat16 with integer operations, because
Triton's interpreter, which tests use, truncates.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_lohan.costs.quantization import SCALES_PER_SCALE, EncodedMatrix

_BYTES_PER_PROGRAM = 1024
_LARGEST_INT32 = (1 << 31) - 1


def decode_four_bit_(
    out: Tensor,
    origin: int,
    codes: Tensor,
    scales: Tensor,
    outer: Tensor | None,
    values: Tensor,
    scale_values: Tensor,
    *,
    block: int,
    first: int,
    stop: int,
    width: int = 0,
    height: int = 0,
) -> None:
    """Write the elements [first, stop) of a weight to ``out``, which begins with element ``origin``.

    ``codes`` begins with element ``first``. ``scales`` has a float32 scale for each block. With double quantization it
    has uint8 codes, which are indices into ``scale_values`` [256]. ``outer`` has the scales of these codes, and then
    their mean. ``values``: the float32 values [16] of the codes. If ``width`` is not zero, the weight [height, width]
    is written transposed.
    """
    _launch(
        _four_bit_kernel,
        codes,
        (codes, scales, scales if outer is None else outer, values, scale_values, out),
        (codes.numel(), first, stop, origin, block, 0 if outer is None else outer.numel() - 1, width, height),
        largest=max(stop, 2 * (first + codes.numel()), width * height),
        IS_DOUBLE=outer is not None,
        IS_TRANSPOSED=width > 0,
        SCALES_PER_SCALE=SCALES_PER_SCALE,
    )


def decode_matrix_(
    out: Tensor,
    origin: int,
    codes: Tensor,
    first_byte: int,
    scales: Tensor,
    zero_points: Tensor | None,
    values: Tensor,
    matrix: EncodedMatrix,
    factor: float,
) -> None:
    """Write the elements of a matrix whose codes begin with byte ``first_byte`` to ``out``, which begins with element
    ``origin``. ``scales``: float32 scales of the blocks of ``matrix``. ``values``: float32 values of the codes.
    ``factor`` multiplies all products."""
    rows, columns = matrix.rows, matrix.columns
    _launch(
        _matrix_kernel,
        codes,
        (codes, scales, scales if zero_points is None else zero_points, values, out),
        (codes.numel(), first_byte, origin, rows, columns, matrix.row_bytes, *matrix.block, matrix.grid[1], factor),
        largest=max(rows * columns, first_byte + codes.numel()),
        NUM_BITS=matrix.bits,
        HAS_ZERO_POINTS=zero_points is not None,
        HAS_FACTOR=factor != 1,
        IS_TRANSPOSED=matrix.is_transposed,
    )


def _launch(
    kernel: Any,
    codes: Tensor,
    tensors: tuple[Tensor, ...],
    numbers: tuple[float, ...],
    *,
    largest: int,
    **settings: Any,
) -> None:
    """``largest``: the largest index that the kernel computes."""
    if not codes.numel():
        return
    with torch.accelerator.device_index(codes.device.index):
        kernel[(triton.cdiv(codes.numel(), _BYTES_PER_PROGRAM),)](
            *tensors,
            *numbers,
            **settings,
            NUM_BYTES=_BYTES_PER_PROGRAM,
            INDEX=tl.int64 if largest + 2 * _BYTES_PER_PROGRAM > _LARGEST_INT32 else tl.int32,
            enable_fp_fusion=False,
        )


@triton.jit
def _four_bit_kernel(
    codes, scales, outer, values, scale_values, out,
    num_bytes, first, stop, origin, block, num_outer, width, height,
    IS_DOUBLE: tl.constexpr, IS_TRANSPOSED: tl.constexpr, SCALES_PER_SCALE: tl.constexpr, NUM_BYTES: tl.constexpr,
    INDEX: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(INDEX) * NUM_BYTES + tl.arange(0, NUM_BYTES)
    both = tl.load(codes + byte, mask=byte < num_bytes, other=0).to(tl.int32)
    for k in tl.static_range(2):
        code = both >> 4 if k == 0 else both & 15
        element = first + 2 * byte + k
        is_there = (byte < num_bytes) & (element < stop)
        number = element // block
        scale = tl.load(scales + number, mask=is_there, other=0)
        if IS_DOUBLE:
            scale = tl.load(scale_values + scale.to(tl.int32))
            scale = scale * tl.load(outer + number // SCALES_PER_SCALE, mask=is_there, other=0.0)
            scale = scale + tl.load(outer + num_outer)
        value = tl.load(values + code) * scale
        place = element
        if IS_TRANSPOSED:
            place = element % width * height + element // width
        tl.store(out + (place - origin), _rounded(value, out.dtype.element_ty), mask=is_there)


@triton.jit
def _matrix_kernel(
    codes, scales, zero_points, values, out,
    num_bytes, first_byte, origin, rows, columns, row_bytes, block_rows, block_columns, grid_columns, factor,
    NUM_BITS: tl.constexpr, HAS_ZERO_POINTS: tl.constexpr, HAS_FACTOR: tl.constexpr, IS_TRANSPOSED: tl.constexpr,
    NUM_BYTES: tl.constexpr, INDEX: tl.constexpr,
):  # fmt: skip
    byte = tl.program_id(0).to(INDEX) * NUM_BYTES + tl.arange(0, NUM_BYTES)
    word = tl.load(codes + byte, mask=byte < num_bytes, other=0).to(tl.int32)
    row, rest = (first_byte + byte) // row_bytes, (first_byte + byte) % row_bytes
    for k in tl.static_range(8 // NUM_BITS):
        code = word >> (k * NUM_BITS) & ((1 << NUM_BITS) - 1)
        column = rest * (8 // NUM_BITS) + k
        is_there = (byte < num_bytes) & (column < columns)
        value = tl.load(values + code)
        if HAS_ZERO_POINTS:
            places = row * grid_columns + column // block_columns
            value = value - tl.load(zero_points + places, mask=is_there, other=0).to(tl.float32)
        block = row // block_rows * grid_columns + column // block_columns
        value = value * tl.load(scales + block, mask=is_there, other=0.0)
        if HAS_FACTOR:
            value = value * factor
        place = row * columns + column
        if IS_TRANSPOSED:
            place = column * rows + row
        tl.store(out + (place - origin), _rounded(value, out.dtype.element_ty), mask=is_there)


@triton.jit
def _rounded(value, dtype: tl.constexpr):
    if dtype == tl.bfloat16:
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where(value == value, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        narrow = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrow = value.to(dtype)
    return narrow

"""Weights of quantized checkpoints, decoded some rows at a time.

A weight is stored as codes of few bits and as scales that blocks of codes share. Values are products of both in
float32, as transformers computes them, and are rounded once to the wanted dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DECODED_AT_ONCE_NUMEL = 1 << 19
"""Elements that are decoded together, so that float32 products need little memory and stay in the cache."""


class UnreadTensor(Protocol):
    """A tensor in a safetensors file. Indexing with slices reads these elements."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Tensor: ...


# Codes, as float32 values without their scales: [rows, stored columns] to [rows, columns].


def decode_numbers(codes: Tensor) -> Tensor:
    """Codes that are numbers of torch, such as float8 and int8."""
    return codes.to(torch.float32)


def decode_fp4(codes: Tensor) -> Tensor:
    """Two FP4 numbers (E2M1) in each byte, the first in its lower half."""
    numbers = torch.tensor(_FP4_VALUES, device=codes.device)
    pairs = torch.stack([numbers.repeat(16), numbers.repeat_interleave(16)], dim=1)
    return pairs[codes.contiguous().view(torch.uint8).int()].flatten(-2)


def decode_int4(codes: Tensor) -> Tensor:
    """Eight integers from -8 to 7 in each int32, as offsets from -8, the first in its lowest bits."""
    return _unpack_int32(codes, 4)


def decode_int8(codes: Tensor) -> Tensor:
    """Four integers from -128 to 127 in each int32, as offsets from -128, the first in its lowest bits."""
    return _unpack_int32(codes, 8)


def _unpack_int32(codes: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=codes.device)
    offsets = codes.unsqueeze(-1) >> shifts & (1 << bits) - 1
    return (offsets - (1 << bits - 1)).flatten(-2).to(torch.float32)


def decode_scales(scales: Tensor) -> Tensor:
    """Scales in float32. Bytes (uint8) are exponents of two plus 127, and 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def scale_rows_(values: Tensor, scales: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Multiply values [rows, columns] in place by the scales of their blocks of (rows, columns). ``scales`` begins with
    the block that has the first value, which is in row ``first_row`` of that block."""
    by_row = _by_row(scales, block[0], first_row, values.shape[0])
    full, rest = divmod(values.shape[1], block[1])
    values[:, : full * block[1]].unflatten(1, (full, block[1])).mul_(by_row[:, :full, None])
    if rest:
        values[:, full * block[1] :].mul_(by_row[:, full:])
    return values


def _by_row(by_block: Tensor, block_rows: int, first_row: int, num_rows: int) -> Tensor:
    """What blocks of rows have, for each row: [num_rows, ...]."""
    rows = torch.arange(first_row, first_row + num_rows, device=by_block.device) // block_rows
    return by_block.index_select(0, rows)


@dataclass(frozen=True)
class EncodedWeight:
    """A weight of a checkpoint, [rows, columns] or [experts, rows, columns]. Indexing with a slice of the first
    dimension, or with `...`, decodes these elements to float32."""

    shape: torch.Size
    codes: UnreadTensor
    """[rows, stored columns], with experts before it, and columns in any number of dimensions."""
    scales: UnreadTensor
    """[blocks of rows, blocks of columns], with experts before it, or one for all of an expert's elements."""
    decode_codes: Callable[[Tensor], Tensor]
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zero_points: UnreadTensor | None = None
    """Codes of value 0, of each row and block of columns: int8 [rows, blocks], or packed like the codes, by rows."""
    is_transposed: bool = False
    """Whether the file has each expert's columns as rows."""

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        first, last, step = slice(None).indices(self.shape[0]) if index is ... else index.indices(self.shape[0])
        assert step == 1, "only whole ranges are read"
        return self.decode(first, last, torch.float32)

    def decode(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """The rows from ``first`` to ``last`` of a matrix, or these experts of several."""
        decoded = torch.empty((last - first, *self.shape[1:]), dtype=dtype)
        if len(self.shape) == 2:
            self._decode_rows(decoded, None, first, last)
        for expert in range(first, last) if len(self.shape) == 3 else ():
            matrix = decoded[expert - first]
            rows = matrix.t() if self.is_transposed else matrix
            self._decode_rows(rows, expert, 0, rows.shape[0])
        return decoded

    def _decode_rows(self, decoded: Tensor, expert: int | None, first: int, last: int) -> None:
        """Write the rows from ``first`` to ``last`` of a matrix to ``decoded``, some at a time."""
        num_columns = decoded.shape[1]
        at_once = max(1, _DECODED_AT_ONCE_NUMEL // num_columns)
        for start in range(first, last, at_once):
            stop = min(start + at_once, last)
            values = self.decode_codes(_rows(self.codes, expert, start, stop).flatten(1))[:, :num_columns]
            if self.zero_points is not None:
                columns = torch.arange(num_columns) // self.block[1]
                values = values - self._zero_points(start, stop).index_select(1, columns)
            block_rows = self.block[0]
            scales = decode_scales(self._scales(expert, start // block_rows, -(-stop // block_rows)))
            decoded[start - first : stop - first] = scale_rows_(values, scales, self.block, start % block_rows)

    def _scales(self, expert: int | None, first: int, last: int) -> Tensor:
        num_dimensions = len(self.scales.get_shape())
        if num_dimensions == len(self.shape):
            return _rows(self.scales, expert, first, last)
        scales = self.scales[...].flatten()  # one, or one of each expert
        return scales[expert if expert is not None and scales.numel() > 1 else 0].view(1, 1)

    def _zero_points(self, first: int, last: int) -> Tensor:
        assert self.zero_points is not None
        if self.zero_points.get_dtype() != "I32":
            return self.zero_points[first:last].to(torch.float32)
        packed = self.decode_codes(torch.zeros(1, 1, dtype=torch.int32)).shape[1]  # rows in each int32
        words = self.zero_points[first // packed : -(-last // packed)]
        return self.decode_codes(words.t().contiguous()).t()[first % packed :][: last - first]


def _rows(tensor: UnreadTensor, expert: int | None, first: int, last: int) -> Tensor:
    return tensor[first:last] if expert is None else tensor[expert : expert + 1, first:last][0]


def whole_pieces(tensor: UnreadTensor, most_numel: int) -> list[Any]:
    """Indices that read the tensor in pieces of about this size along its first dimension."""
    shape = tensor.get_shape()
    if not shape or math.prod(shape) <= most_numel:
        return [...]
    at_once = max(1, most_numel * shape[0] // math.prod(shape))
    return [slice(first, min(first + at_once, shape[0])) for first in range(0, shape[0], at_once)]

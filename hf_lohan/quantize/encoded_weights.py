"""Weights of quantized checkpoints, decoded some rows at a time.

A weight is stored as codes of few bits and as scales that blocks of codes share. A value is the float32 product of its
code and scale, as in transformers. It is rounded once to the requested dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor

from hf_lohan.costs.quantization import CodeKind, EncodedMatrix
from hf_lohan.quantize import packed_form
from hf_lohan.quantize.packed_form import PackedForm, Packer, stored_bytes

_FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_DECODED_AT_ONCE_NUMEL = 1 << 19
"""Number of elements that are decoded together, so that float32 products need little memory and stay in the cache."""
_READ_AT_ONCE_BYTES = 8 << 20
"""Number of bytes of codes that are read together, and stored unchanged."""


class UnreadTensor(Protocol):
    """A tensor in a safetensors file. Indexing with slices reads the selected elements."""

    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...

    def __getitem__(self, index: Any) -> Tensor: ...


# These functions decode codes [rows, stored columns] to float32 values [rows, columns], without their scales.


def decode_numbers(codes: Tensor) -> Tensor:
    """Decode codes of a torch dtype, such as float8 and int8."""
    if codes.device.type == "cpu" and codes.dtype in (torch.float8_e4m3fn, torch.float8_e5m2):  # a table is faster
        return _look_up("float8_e4m3fn" if codes.dtype == torch.float8_e4m3fn else "float8_e5m2", codes)
    return codes.to(torch.float32)


def decode_fp4(codes: Tensor) -> Tensor:
    """Decode two FP4 numbers (E2M1) from each byte. The first is in the lower half."""
    return _look_up("fp4", codes)


def decode_int4(codes: Tensor) -> Tensor:
    """Decode eight integers from -8 to 7 from each int32, stored as offsets from -8, the first in the lowest bits."""
    return _look_up("int4_in_int32", codes)


def decode_int8(codes: Tensor) -> Tensor:
    """Decode four integers from -128 to 127 from each int32, stored as offsets from -128, the first in the low bits."""
    return _look_up("int8_in_int32", codes)


def _look_up(kind: CodeKind, codes: Tensor) -> Tensor:
    index = codes.contiguous().view(torch.uint8).to(torch.int32)
    values = _values_of_bytes(kind, codes.device).index_select(0, index.flatten())
    return values.view(torch.float32).view(*codes.shape[:-1], -1)


@cache
def _values_of_bytes(kind: CodeKind, device: torch.device) -> Tensor:
    """Return a table [256] that maps a byte of codes to its float32 value, or its two values as one element of 8
    bytes."""
    values = _values_of(kind, device)
    if values.numel() == 256:
        return values
    return torch.stack([values.repeat(16), values.repeat_interleave(16)], dim=1).view(torch.float64).flatten()


def decode_scales(scales: Tensor) -> Tensor:
    """Convert scales to float32. A uint8 scale is the exponent of a power of two, plus 127. A scale of 255 is NaN."""
    return (scales.view(torch.float8_e8m0fnu) if scales.dtype == torch.uint8 else scales).to(torch.float32)


def scale_rows_(values: Tensor, scales: Tensor, block: tuple[int, int], first_row: int = 0) -> Tensor:
    """Multiply values [rows, columns] in place by the scales of their blocks of (rows, columns). The first value is in
    row ``first_row`` of the first block of ``scales``."""
    by_row = _by_row(scales, block[0], first_row, values.shape[0])
    full, rest = divmod(values.shape[1], block[1])
    values[:, : full * block[1]].unflatten(1, (full, block[1])).mul_(by_row[:, :full, None])
    if rest:
        values[:, full * block[1] :].mul_(by_row[:, full:])
    return values


def _by_row(by_block: Tensor, block_rows: int, first_row: int, num_rows: int) -> Tensor:
    """Expand ``by_block``, which has an element for each block of rows, to an element for each row [num_rows, ...]."""
    rows = torch.arange(first_row, first_row + num_rows, device=by_block.device) // block_rows
    return by_block.index_select(0, rows)


_DECODERS: dict[CodeKind, Callable[[Tensor], Tensor]] = {
    "fp4": decode_fp4,
    "int4_in_int32": decode_int4,
    "int8_in_int32": decode_int8,
}


@cache
def _values_of(codes: CodeKind, device: torch.device) -> Tensor:
    """Return the values of all codes of a kind, float32 [16] or [256], in the order of the codes."""
    match codes:
        case "fp4":
            values = torch.tensor(_FP4_VALUES)
        case "int4_in_int32":
            values = torch.arange(-8.0, 8.0)
        case "int8_in_int32":
            values = torch.arange(-128.0, 128.0)
        case "int8" | "int8_of_127":
            values = torch.arange(256, dtype=torch.uint8).view(torch.int8).to(torch.float32)
        case _:
            values = torch.arange(256, dtype=torch.uint8).view(getattr(torch, codes)).to(torch.float32)
    return values.to(device)


_INT8_FACTOR = 7.874015718698502e-3
"""1 / 127, with the digits that bitsandbytes uses."""
_CODES_BY_DTYPE: dict[str, CodeKind] = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I8": "int8"}
_SCALES_BY_DTYPE = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U8": "uint8",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3": "float8_e4m3fn",
}
"""Map names of dtypes in safetensors to the names in torch."""


@dataclass(frozen=True)
class EncodedForm(PackedForm):
    """Codes and scales in the form of a quantized checkpoint. A unit has several matrices, one after the other."""

    method: str
    matrices: tuple[EncodedMatrix, ...]
    unit_numel: int

    @classmethod
    def of(cls, method: str, matrices: tuple[EncodedMatrix, ...]) -> EncodedForm:
        return cls(method, matrices, sum(matrix.numel for matrix in matrices))

    @property
    def setting(self) -> str:
        return self.method

    @cached_property
    def unit_codes_bytes(self) -> int:
        return sum(matrix.codes_bytes for matrix in self.matrices)

    @cached_property
    def unit_scales_bytes(self) -> int:
        return sum(matrix.scales_bytes for matrix in self.matrices)

    @property
    def cut_bytes(self) -> int:
        return self.matrices[0].cut_bytes

    @property
    def takes_rows(self) -> bool:
        return not any(matrix.is_transposed for matrix in self.matrices)

    def packer(self) -> Packer:
        matrix = self.matrices[0]
        if matrix.codes != "int8_of_127" or len(self.matrices) > 1:
            return super().packer()
        encode = partial(_encode_int8, columns=matrix.columns)
        return Packer(matrix.numel, matrix.columns, encode, partial(stored_bytes, num_bytes=matrix.scales_bytes))

    def stored_order(self, values: Tensor) -> Tensor:
        return values if self.takes_rows else values.view(self.matrices[0].columns, -1).t().reshape(-1)

    @cached_property
    def starts(self) -> list[tuple[EncodedMatrix, int, int, int]]:
        """Each matrix with the offsets of its first element, its codes and its scales in a unit."""
        elements = accumulate((matrix.numel for matrix in self.matrices), initial=0)
        codes = accumulate((matrix.codes_bytes for matrix in self.matrices), initial=0)
        scales = accumulate((matrix.scales_bytes for matrix in self.matrices), initial=0)
        return list(zip(self.matrices, elements, codes, scales, strict=False))

    def _elements_of_unit(self, first: int, last: int) -> tuple[int, int]:
        low, high = self.unit_numel, 0
        for matrix, element, byte, _ in self.starts:
            begin, end = max(first - byte, 0), min(last - byte, matrix.codes_bytes)
            if begin < end:
                of_matrix = (0, matrix.numel)
                if not matrix.is_transposed:
                    of_matrix = _element_at(matrix, begin), _element_at(matrix, end)
                low, high = min(low, element + of_matrix[0]), max(high, element + of_matrix[1])
        return low, high

    def _bytes_of_unit(self, first: int, last: int) -> tuple[int, int]:
        low, high = self.unit_codes_bytes, 0
        for matrix, element, byte, _ in self.starts:
            begin, end = max(first - element, 0), min(last - element, matrix.numel)
            if begin < end:
                of_matrix = (0, matrix.codes_bytes)
                if not matrix.is_transposed:
                    of_matrix = _byte_of(matrix, begin), _byte_of(matrix, end - 1) + matrix.cut_bytes
                low, high = min(low, byte + of_matrix[0]), max(high, byte + of_matrix[1])
        return low, high

    def _decode_unit_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        for matrix, element, byte, scale in self.starts:
            begin = max(first_byte, byte)
            end = min(first_byte + codes.numel(), byte + matrix.codes_bytes)
            if begin < end:
                of_matrix = codes[begin - first_byte : end - first_byte]
                of_scales = scales[scale : scale + matrix.scales_bytes]
                _decode_matrix_(out, origin - element, of_matrix, begin - byte, of_scales, matrix)


def int8_form(rows: int, columns: int, *, is_transposed: bool = False) -> EncodedForm:
    """Return the form of matrices [rows, columns] in int8, with a scale for each row."""
    matrix = EncodedMatrix(
        rows=rows,
        columns=columns,
        codes="int8_of_127",
        scales="float32",
        block=(1, columns),
        is_transposed=is_transposed,
    )
    return EncodedForm.of("int8", (matrix,))


def _encode_int8(values: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of whole rows of a matrix, with the bits of bitsandbytes."""
    rows = values.view(-1, columns)
    scales = rows.abs().amax(dim=1)
    factors = (127.0 / scales).masked_fill_(scales == 0, 0.0)  # a row of zeros
    return torch.round(rows * factors.unsqueeze(1)).to(torch.int8).view(torch.uint8).flatten(), scales


def _element_at(matrix: EncodedMatrix, byte: int) -> int:
    """Return the index of the element whose code begins at a byte."""
    row, rest = divmod(byte, matrix.row_bytes)
    return row * matrix.columns + min(rest * 8 // matrix.bits, matrix.columns)


def _byte_of(matrix: EncodedMatrix, element: int) -> int:
    """Return the offset of the word that has the code of an element."""
    row, column = divmod(element, matrix.columns)
    return row * matrix.row_bytes + column * matrix.bits // 8 // matrix.cut_bytes * matrix.cut_bytes


def _decode_matrix_(
    out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor, matrix: EncodedMatrix
) -> None:
    """Same as `PackedForm.decode_`, for one matrix."""
    grid = scales[: matrix.grid[0] * matrix.grid[1] * getattr(torch, matrix.scales).itemsize]
    by_block = grid.view(getattr(torch, matrix.scales)).view(matrix.grid)
    zero_points = None
    if matrix.has_zero_points:
        zero_points = scales[matrix.zero_points_start :].view(torch.int8)[: matrix.rows * matrix.grid[1]]
        zero_points = zero_points.view(matrix.rows, -1)
    is_of_127 = matrix.codes == "int8_of_127"
    if (kernels := packed_form.kernels_for(out)) is not None:
        values, factor = _values_of(matrix.codes, out.device), _INT8_FACTOR if is_of_127 else 1.0
        scale_values = decode_scales(by_block).contiguous()
        kernels.decode_matrix_(out, origin, codes, first_byte, scale_values, zero_points, values, matrix, factor)
        return
    dtype = torch.int8 if is_of_127 else getattr(torch, matrix.codes, torch.uint8)
    words = codes.view(torch.int32 if matrix.cut_bytes == 4 else dtype)
    decode, num_bytes = _DECODERS.get(matrix.codes, decode_numbers), codes.numel()
    most_numel = _DECODED_AT_ONCE_NUMEL if out.device.type == "cpu" else max(out.numel() // 2, 1)
    most_rows = max(1, most_numel // matrix.columns)
    start = 0
    while start < num_bytes:
        row, rest = divmod(first_byte + start, matrix.row_bytes)
        num_rows = min((num_bytes - start) // matrix.row_bytes, most_rows) if not rest else 0
        row_bytes = matrix.row_bytes if num_rows else min(matrix.row_bytes - rest, num_bytes - start)
        stop, num_rows = start + max(num_rows, 1) * row_bytes, max(num_rows, 1)
        column, last_column = rest * 8 // matrix.bits, min((rest + row_bytes) * 8 // matrix.bits, matrix.columns)
        size = words.element_size()
        values = decode(words[start // size : stop // size].view(num_rows, -1))[:, : last_column - column]
        blocks = torch.arange(column, last_column, device=out.device) // matrix.block[1]
        if zero_points is not None:
            values = values - zero_points[row : row + num_rows].to(torch.float32).index_select(1, blocks)
        first_block, last_block = row // matrix.block[0], (row + num_rows - 1) // matrix.block[0] + 1
        of_rows = decode_scales(by_block[first_block:last_block])
        if last_column - column == matrix.columns:
            scale_rows_(values, of_rows, matrix.block, row % matrix.block[0])
        else:
            values.mul_(_by_row(of_rows, matrix.block[0], row % matrix.block[0], num_rows).index_select(1, blocks))
        if is_of_127:
            values.mul_(_INT8_FACTOR)
        if matrix.is_transposed:
            whole = out[-origin : matrix.numel - origin].view(matrix.columns, matrix.rows)
            whole[column:last_column, row : row + num_rows].copy_(values.t())
        elif last_column > column:
            first = row * matrix.columns + column - origin
            out[first : first + values.numel()].view_as(values).copy_(values)
        start = stop


@dataclass(frozen=True)
class EncodedWeight:
    """A weight of a checkpoint, [rows, columns] or [experts, rows, columns]. Indexing with a slice of the first
    dimension, or with `...`, decodes the selected elements to float32."""

    shape: torch.Size
    codes: UnreadTensor
    """[rows, stored columns] or [experts, rows, stored columns]. The columns may have several dimensions."""
    scales: UnreadTensor
    """[(experts,) blocks of rows, blocks of columns], or one scale for each matrix."""
    decode_codes: Callable[[Tensor], Tensor]
    block: tuple[int, int]
    """Rows and columns that share a scale."""
    zero_points: UnreadTensor | None = None
    """The code of 0 for each row and block of columns: int8 [rows, blocks], or packed along rows as codes are."""
    is_transposed: bool = False
    """Whether the file has each matrix transposed."""
    is_of_127: bool = False
    """Whether a value is code / 127 * scale."""

    def get_shape(self) -> list[int]:
        return list(self.shape)

    def get_dtype(self) -> str:
        return "F32"

    def __getitem__(self, index: Any) -> Tensor:
        first, last, step = slice(None).indices(self.shape[0]) if index is ... else index.indices(self.shape[0])
        assert step == 1, "only whole ranges are read"
        return self.decode(first, last, torch.float32)

    def decode(self, first: int, last: int, dtype: torch.dtype) -> Tensor:
        """Decode the rows [first, last) of a matrix, or the experts [first, last)."""
        decoded = torch.empty((last - first, *self.shape[1:]), dtype=dtype)
        if len(self.shape) == 2 and self.is_transposed:
            self._decode_columns(decoded, first, last)
        elif len(self.shape) == 2:
            self._decode_rows(decoded, None, first, last)
        for expert in range(first, last) if len(self.shape) == 3 else ():
            matrix = decoded[expert - first]
            rows = matrix.t() if self.is_transposed else matrix
            self._decode_rows(rows, expert, 0, rows.shape[0])
        return decoded

    def matrix(self) -> EncodedMatrix | None:
        """Return the stored form of the weight, or of each expert. None if no `EncodedMatrix` has its dtypes."""
        kinds = {decode: kind for kind, decode in _DECODERS.items()}
        codes = kinds.get(self.decode_codes) or _CODES_BY_DTYPE.get(self.codes.get_dtype())
        codes = "int8_of_127" if self.is_of_127 else codes
        scales = _SCALES_BY_DTYPE.get(self.scales.get_dtype())
        if codes is None or scales is None:
            return None
        rows, columns = self.shape[-2:]
        if self.is_transposed:
            rows, columns = columns, rows
        has_zero_points = self.zero_points is not None
        return EncodedMatrix(
            rows=rows,
            columns=columns,
            codes=codes,
            scales=scales,
            block=(min(self.block[0], rows), min(self.block[1], columns)),
            has_zero_points=has_zero_points,
            is_transposed=self.is_transposed,
        )

    def rows_of_codes(self, expert: int | None, matrix: EncodedMatrix) -> Iterator[tuple[int, Tensor]]:
        """Yield (first row, bytes) of the codes of the matrix, or of one ``expert``, some rows at a time."""
        at_once = max(1, _READ_AT_ONCE_BYTES // matrix.row_bytes)
        for first in range(0, matrix.rows, at_once):
            rows = _rows(self.codes, expert, first, min(first + at_once, matrix.rows))
            yield first, rows.contiguous().view(torch.uint8).flatten()

    def scales_of(self, expert: int | None, matrix: EncodedMatrix) -> Tensor:
        """Return the stored bytes of scales and zero points of the matrix, or of one ``expert``."""
        stored = stored_bytes(self._scales(expert, 0, matrix.grid[0]), matrix.scales_bytes)
        if self.zero_points is not None:
            zero_points = self._zero_points(0, matrix.rows).to(torch.int8).view(torch.uint8).flatten()
            stored[matrix.zero_points_start :][: zero_points.numel()] = zero_points
        return stored

    def _decode_rows(self, decoded: Tensor, expert: int | None, first: int, last: int) -> None:
        """Decode the rows [first, last) of a matrix into ``decoded``, some at a time."""
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
            scale_rows_(values, scales, self.block, start % block_rows)
            decoded[start - first : stop - first] = values.mul_(_INT8_FACTOR) if self.is_of_127 else values

    def _decode_columns(self, decoded: Tensor, first: int, last: int) -> None:
        """Decode the columns [first, last) of the file to the rows of ``decoded``. A row of the file has one scale."""
        assert self.block[0] == 1 and self.block[1] >= self.shape[0] and self.zero_points is None
        values = self.decode_codes(self.codes[:, first:last])
        values *= decode_scales(self._scales(None, 0, self.shape[1]))
        decoded.copy_((values.mul_(_INT8_FACTOR) if self.is_of_127 else values).t())

    def _scales(self, expert: int | None, first: int, last: int) -> Tensor:
        num_dimensions = len(self.scales.get_shape())
        if num_dimensions == len(self.shape):
            return _rows(self.scales, expert, first, last)
        scales = self.scales[...].flatten()  # one scale, or one for each expert
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
    """Return indices that read the tensor in pieces of about ``most_numel`` elements, along its first dimension."""
    shape = tensor.get_shape()
    if not shape or math.prod(shape) <= most_numel:
        return [...]
    at_once = max(1, most_numel * shape[0] // math.prod(shape))
    return [slice(first, min(first + at_once, shape[0])) for first in range(0, shape[0], at_once)]

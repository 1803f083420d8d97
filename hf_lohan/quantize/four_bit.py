"""NF4 and FP4 with a scale for each block, bitwise equal to bitsandbytes.

An element is divided by the largest magnitude of its block. Its code is the nearest of 16 values. Two codes share a
byte, the first in the upper half. With double quantization the mean of the scales is subtracted from them, and the
differences are encoded in 8 bits, in blocks of 256.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch import Tensor

from hf_lohan.costs.quantization import SCALES_PER_SCALE, Quantization
from hf_lohan.quantize import packed_form
from hf_lohan.quantize.packed_form import PackedForm, Packer, stored_bytes

_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
    *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
    *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
    *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_FP4 = (0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0, -0.0, -0.0625, -8.0, -12.0, -4.0, -6.0, -2.0, -3.0)
_VALUES = {"nf4": _NF4, "fp4": _FP4}
_CPU = torch.device("cpu")
_SMALLEST = 1e-38
_NUM_CELLS = 1 << 16
"""Number of cells that divide [-1, 1]. Each cell has one code of 8 bits."""
_DECODED_AT_ONCE_NUMEL = 1 << 18
"""Number of elements that are decoded together. Their codes and values stay in the cache."""


@cache
def values_of(method: str, device: torch.device = _CPU) -> Tensor:
    """Return the values [16] of the codes of a method."""
    values = torch.tensor(_VALUES[method], dtype=torch.float32)
    return (values / values.abs().max()).to(device)


@cache
def _pairs(method: str, device: torch.device) -> Tensor:
    """Return a table [256] that maps a byte to its two float32 values, as one element of 8 bytes."""
    values = values_of(method)
    pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], dim=1)
    return pairs.view(torch.float64).reshape(-1).to(device)


@cache
def _bounds(method: str) -> tuple[Tensor, Tensor]:
    """Return the middles [15] between neighbouring values, and the codes [16] in ascending order of values."""
    values = values_of(method)
    order = torch.argsort(values)
    return (values[order[:-1]] + values[order[1:]]) / 2, order.to(torch.uint8)


@cache
def scale_values(device: torch.device = _CPU) -> Tensor:
    """Return the ascending values [256] of the 8-bit codes of scales: a dynamic exponent and a linear fraction."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1, dtype=torch.float32)
        middles = (edges[:-1] + edges[1:]) / 2.0
        scaled = 10 ** (exponent - 6) * middles
        values += [*scaled.tolist(), *(-scaled).tolist()]
    return torch.tensor(sorted(values), dtype=torch.float32).to(device)


@torch.no_grad()
def encode(values: Tensor, method: str, block: int) -> tuple[Tensor, Tensor]:
    """Encode float32 [n] to codes, uint8 [n / 2], and scales, float32 [n / block]. The last block may be short."""
    numel = values.numel()
    full = numel - numel % block
    blocks = values[:full].view(-1, block)
    scales = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / scales.clamp(min=_SMALLEST)).view(-1, 1)).clamp_(-1, 1).view(-1)
    if full < numel:
        last = values[full:].abs().max().clamp(min=_SMALLEST)
        scales = torch.cat([scales, last.view(1)])
        scaled = torch.cat([scaled, (values[full:] / last).clamp_(-1, 1)])
    if numel % 2:
        scaled = torch.nn.functional.pad(scaled, (0, 1))
    bounds, order = _bounds(method)
    codes = torch.bucketize(scaled, bounds, out_int32=True).to(torch.uint8)
    if method != "nf4":
        codes = order[codes.to(torch.int32)]
    return (codes[::2] << 4) | codes[1::2], scales


@torch.no_grad()
def join_scales(codes: Tensor, outer: Tensor, offset: float, form: Quantization, numel: int) -> Tensor:
    """Return the stored bytes of scales in 8-bit ``codes``. ``outer``: scales of the codes. ``offset``: the mean."""
    floats = torch.cat([outer.reshape(-1), torch.tensor([offset], dtype=torch.float32)])
    return stored_bytes(torch.cat([floats.view(torch.uint8), codes.reshape(-1)]), form.scales_bytes(numel))


@torch.no_grad()
def pack_scales(scales: Tensor, form: Quantization, numel: int) -> Tensor:
    """Return the stored bytes of all scales of a weight of ``numel`` elements."""
    if not form.double:
        return stored_bytes(scales, form.scales_bytes(numel))
    offset = _mean_of_one_thread(scales)
    codes, outer = _encode_scales(scales - offset)
    return join_scales(codes, outer, offset.item(), form, numel)


def _mean_of_one_thread(values: Tensor) -> Tensor:
    """Return the mean that one thread computes, because a store may be loaded again with another number of threads.
    torch sums each of two rows on one thread."""
    return values.expand(2, -1).mean(dim=1)[0]


def _encode_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """Encode float32 scales [n]. Return 8-bit codes [n], and the float32 scales [n / 256] of these codes."""
    numel = scales.numel()
    full = numel - numel % SCALES_PER_SCALE
    blocks = scales[:full].view(-1, SCALES_PER_SCALE)
    outer = blocks.abs().amax(dim=1)
    scaled = (blocks * (1.0 / outer.clamp(min=_SMALLEST)).view(-1, 1)).view(-1)
    if full < numel:
        last = scales[full:].abs().max()
        outer = torch.cat([outer, last.view(1)])
        scaled = torch.cat([scaled, scales[full:] * (1.0 / last.clamp(min=_SMALLEST))])
    return _scale_codes()[_cell_of(scaled.clamp_(-1, 1))], outer


def _cell_of(values: Tensor) -> Tensor:
    """Return the cell of [-1, 1] that each value is in. bitsandbytes rounds once on a CPU, hence float64."""
    halves = (values + 1.0) * 0.5
    return (halves.to(torch.float64) * (_NUM_CELLS - 1) + 0.5).to(torch.float32).to(torch.int32)


@cache
def _scale_codes() -> Tensor:
    """Return the code of each cell. bitsandbytes uses this table on a CPU, so a value near the middle of two codes may
    get either code."""
    values = scale_values()
    cells = torch.arange(_NUM_CELLS, dtype=torch.float64)
    middles = (2 * cells / (_NUM_CELLS - 1) - 1).to(torch.float32)
    return torch.bucketize(middles, (values[:-1] + values[1:]) / 2, out_int32=True).to(torch.uint8)


def unpack_scales(packed: Tensor, form: Quantization, numel: int, first: int, last: int) -> Tensor:
    """Return the scales [first, last) of a weight of ``numel`` elements, from the stored bytes of all scales."""
    if not form.double:
        return packed[4 * first : 4 * last].view(torch.float32)
    num_scales = form.num_scales(numel)
    num_outer = -(-num_scales // SCALES_PER_SCALE)
    floats = packed[: 4 * (num_outer + 1)].view(torch.float32)
    codes = packed[4 * (num_outer + 1) + first : 4 * (num_outer + 1) + last]
    scales = scale_values(packed.device)[codes.to(torch.int32)]
    low = first // SCALES_PER_SCALE
    outer = floats[low : (last - 1) // SCALES_PER_SCALE + 1].repeat_interleave(SCALES_PER_SCALE)
    start = first - low * SCALES_PER_SCALE
    return scales.mul_(outer[start : start + last - first]).add_(floats[num_outer])


@torch.no_grad()
def decode_(out: Tensor, codes: Tensor, scales: Tensor, form: Quantization, numel: int, first: int) -> None:
    """Decode elements of a weight of ``numel`` elements into contiguous ``out``, in torch operations. A block begins
    with element ``first``.

    ``out`` and ``codes`` begin with element ``first``. ``scales`` has the stored bytes of all scales. All tensors are
    on one device.
    """
    assert first % form.block == 0, f"element {first} begins no block of {form.block}"
    step = max(_DECODED_AT_ONCE_NUMEL if out.device.type == "cpu" else out.numel(), form.block)
    for start in range(0, out.numel(), step):
        part = out[start : start + step]
        low = (first + start) // form.block
        high = form.num_scales(first + start + part.numel())
        of_part = unpack_scales(scales, form, numel, low, high)
        _decode_part(part, codes[start // 2 : -(-(start + part.numel()) // 2)], of_part, form)


def _decode_part(out: Tensor, codes: Tensor, scales: Tensor, form: Quantization) -> None:
    numel, full = out.numel(), out.numel() - out.numel() % form.block
    is_direct = out.dtype == torch.float32 and numel % 2 == 0 and out.storage_offset() % 2 == 0
    values = out if is_direct else torch.empty(2 * codes.numel(), dtype=torch.float32, device=out.device)
    torch.index_select(_pairs(form.method, out.device), 0, codes.to(torch.int32), out=values.view(torch.float64))
    num_full = full // form.block
    torch.mul(values[:full].view(-1, form.block), scales[:num_full].view(-1, 1), out=out[:full].view(-1, form.block))
    if full < numel:
        torch.mul(values[full:numel], scales[num_full], out=out[full:])


@dataclass(frozen=True)
class FourBitForm(PackedForm):
    """NF4 or FP4 by blocks, two codes in each byte."""

    quantization: Quantization
    unit_numel: int
    transposed_width: int = 0
    """Width of the transposed matrix, if the parameter is packed transposed as bitsandbytes packs `Conv1D`, or 0."""

    @property
    def setting(self) -> str:
        return str(self.quantization.to_setting())

    @property
    def unit_codes_bytes(self) -> int:
        return self.quantization.codes_bytes(self.unit_numel)

    @property
    def unit_scales_bytes(self) -> int:
        return self.quantization.scales_bytes(self.unit_numel)

    @property
    def cut_bytes(self) -> int:
        return self.quantization.block // 2

    @property
    def takes_rows(self) -> bool:
        return not self.transposed_width

    def packer(self) -> Packer:
        form, numel = self.quantization, self.unit_numel
        return Packer(
            numel,
            form.block,
            partial(encode, method=form.method, block=form.block),
            partial(pack_scales, form=form, numel=numel),
            codes_in_byte=2,
        )

    def stored_order(self, values: Tensor) -> Tensor:
        return values.view(self.transposed_width, -1).t().reshape(-1) if self.transposed_width else values

    def _elements_of_unit(self, first: int, last: int) -> tuple[int, int]:
        return (0, self.unit_numel) if self.transposed_width else (2 * first, min(2 * last, self.unit_numel))

    def _bytes_of_unit(self, first: int, last: int) -> tuple[int, int]:
        if self.transposed_width:
            return 0, self.unit_codes_bytes
        return first // self.quantization.block * self.cut_bytes, -(-last // 2)

    def _decode_unit_(self, out: Tensor, origin: int, codes: Tensor, first_byte: int, scales: Tensor) -> None:
        form, numel, width = self.quantization, self.unit_numel, self.transposed_width
        first, last = 2 * first_byte, min(2 * (first_byte + codes.numel()), numel)
        if (kernels := packed_form.kernels_for(out)) is not None:
            num_scales = form.num_scales(numel)
            num_floats = -(-num_scales // SCALES_PER_SCALE) + 1 if form.double else num_scales
            floats = scales[: 4 * num_floats].view(torch.float32)
            kernels.decode_four_bit_(
                out,
                origin,
                codes,
                scales[4 * num_floats :][:num_scales] if form.double else floats,
                floats if form.double else None,
                values_of(form.method, out.device),
                scale_values(out.device),
                block=form.block,
                first=first,
                stop=last,
                width=width,
                height=numel // width if width else 0,
            )
            return
        part = out.new_empty(last - first) if width else out[first - origin : last - origin]
        decode_(part, codes, scales, form, numel, first)
        if width:
            _put_transposed_(out[-origin : numel - origin], part, first, width)


def _put_transposed_(out: Tensor, values: Tensor, first: int, width: int) -> None:
    """Write ``values`` to the flat matrix ``out``. They are elements of the transposed matrix, from ``first`` on."""
    rows = out.view(width, -1).t()
    while values.numel():
        row, column = divmod(first, width)
        if column or values.numel() < width:
            taken = min(width - column, values.numel())
            rows[row, column : column + taken].copy_(values[:taken])
        else:
            taken = values.numel() - values.numel() % width
            rows[row : row + taken // width].copy_(values[:taken].view(-1, width))
        first, values = first + taken, values[taken:]

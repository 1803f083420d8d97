"""AdamW's moments in fewer bytes than float32. Codecs encode `exp_avg` and `exp_avg_sq` to records and decode them.

Both codecs round stochastically, so the result is unbiased. Rounding to the nearest value would be wrong. With beta2 =
0.999, `exp_avg_sq` changes by less than half the distance between two codes, so it would never decay. (The nearest
value would do for `exp_avg` with beta1 = 0.9, but not for every beta1.)

Records of zeros, as in a new store, are moments of zero.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from hf_lohan.optim import rounding_noise

MomentDtype: TypeAlias = Literal["float32", "bfloat16", "int8", "int8_stochastic"]
STOCHASTIC: MomentDtype = "int8_stochastic"
"""int8 moments of weights that have no float32 masters. bfloat16 weights are rounded stochastically."""

SCALE_BLOCK_NUMEL = 32
"""Number of adjacent elements that share a scale. Parameters begin at multiples of it, so no two share a scale."""
NUM_SCRATCH = 4
"""Number of scratch tensors that the codecs need."""
_AVG, _AVG_SQ = 0, 1
"""Noise streams of the two moments."""
_SMALLEST_DIVISOR = 1e-36
"""A divisor whose inverse is still a float32. Smaller numbers are negligible compared to AdamW's eps."""


@dataclass(frozen=True, slots=True)
class RoundedSpan:
    """Elements [start, stop) of a tile. The same ``step`` of their parameters has changed all of them."""

    start: int
    stop: int
    step: int
    position: int
    """Offset of element `start` in the block's records. If updates round weights, it is the offset in the parameter
    plus a hash of the parameter's name."""


class BFloat16Moments:
    """Codec to bfloat16 with stochastic rounding. Numbers beyond bfloat16's largest become that number."""

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {"exp_avg": torch.bfloat16, "exp_avg_sq": torch.bfloat16}
    params_per_element: ClassVar[Mapping[str, int]] = {}
    align_numel: ClassVar[int] = 1
    _LARGEST = torch.finfo(torch.bfloat16).max

    def decode_(self, records: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, scratch: Tensor) -> None:
        exp_avg.copy_(records["exp_avg"])
        exp_avg_sq.copy_(records["exp_avg_sq"])

    def encode_(
        self, records: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, span: RoundedSpan, scratch: Tensor
    ) -> None:
        part = slice(span.start, span.stop)
        self._encode_(exp_avg[part], records["exp_avg"][part], span, _AVG)
        self._encode_(exp_avg_sq[part], records["exp_avg_sq"][part], span, _AVG_SQ)

    def _encode_(self, values: Tensor, rounded: Tensor, span: RoundedSpan, stream: int) -> None:
        values.clamp_(-self._LARGEST, self._LARGEST)
        round_to_bfloat16_(values, rounding_noise.integers(span.position, values.numel(), span.step, stream), rounded)


def round_to_bfloat16_(values: Tensor, noise: Tensor, rounded: Tensor) -> None:
    """Round float32 ``values`` [numel] stochastically to bfloat16. ``noise`` is int32, uniform in [0, 65536). The
    result is unbiased over the noise. A bfloat16 value is unchanged. Overwrites ``values``."""
    # Adding noise to a GPU's NaN, which has all bits set, would make it a zero. Replace it by an ordinary NaN.
    values.nan_to_num_(nan=float("nan"), posinf=float("inf"), neginf=-float("inf"))
    rounded.view(torch.int16).copy_(values.view(torch.int32).add_(noise).bitwise_right_shift_(16))


class Int8Moments:
    """Codec to one byte per element, and a float32 scale for each `SCALE_BLOCK_NUMEL` elements. The scale is their
    largest magnitude.

    Codes represent powers of fractions, so that small numbers next to large ones keep some digits. `exp_avg` is sign *
    scale * (|code| / 127)^4 with codes from -127 to 127, and `exp_avg_sq` is scale * ((code + 1) / 256)^8 with codes
    from 0 to 255. `exp_avg_sq` has no zero, because dividing an `exp_avg` by a zero would make a huge step. The scales
    of both are in one tensor, [numel / 32, 2] float32.
    """

    dtypes: ClassVar[Mapping[str, torch.dtype]] = {
        "exp_avg": torch.int8,
        "exp_avg_sq": torch.uint8,
        "moment_scales": torch.float32,
    }
    params_per_element: ClassVar[Mapping[str, int]] = {"moment_scales": SCALE_BLOCK_NUMEL // 2}
    align_numel: ClassVar[int] = 16 * 1024
    """A multiple of this number of parameters has whole sectors of scales, which take 8 bytes for 32 parameters."""

    def decode_(self, records: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, scratch: Tensor) -> None:
        scales = records["moment_scales"].view(-1, 2)
        exp_avg.copy_(records["exp_avg"]).div_(127)
        magnitude = torch.mul(exp_avg, exp_avg, out=scratch[0]).square_()
        torch.copysign(magnitude, exp_avg, out=exp_avg)
        _blocks(exp_avg).mul_(scales[:, _AVG, None])
        exp_avg_sq.copy_(records["exp_avg_sq"]).add_(1).mul_(1 / 256)
        exp_avg_sq.square_().square_().square_()
        _blocks(exp_avg_sq).mul_(scales[:, _AVG_SQ, None])

    def encode_(
        self, records: Mapping[str, Tensor], exp_avg: Tensor, exp_avg_sq: Tensor, span: RoundedSpan, scratch: Tensor
    ) -> None:
        start, stop = span.start, -(-span.stop // SCALE_BLOCK_NUMEL) * SCALE_BLOCK_NUMEL
        assert start % SCALE_BLOCK_NUMEL == 0, "a parameter begins in the middle of a scale block"
        for moment in (exp_avg, exp_avg_sq):
            moment[span.stop : stop].zero_()  # padding must not change the scale
        whole, part = slice(start, stop), slice(start, span.stop)
        scales = records["moment_scales"].view(-1, 2)[start // SCALE_BLOCK_NUMEL : stop // SCALE_BLOCK_NUMEL]
        magnitude, *temporary = scratch[:, whole]
        torch.abs(exp_avg[whole], out=magnitude)
        _normalize_(magnitude, scales[:, _AVG])
        noise = rounding_noise.fractions(span.position, magnitude.numel(), span.step, _AVG)
        levels = _round_to_power_(magnitude, temporary, noise, num_squares=2, highest=127)
        torch.copysign(levels, exp_avg[whole], out=levels)
        records["exp_avg"][part].copy_(levels[: span.stop - start])
        _normalize_(exp_avg_sq[whole], scales[:, _AVG_SQ])
        noise = rounding_noise.fractions(span.position, magnitude.numel(), span.step, _AVG_SQ)
        levels = _round_to_power_(exp_avg_sq[whole], temporary, noise, num_squares=3, highest=256)
        codes = magnitude.view(torch.int32)  # the conversion to uint8 is faster through int32
        codes.copy_(levels.sub_(1).clamp_(min=0))
        records["exp_avg_sq"][part].copy_(codes[: span.stop - start])


MomentCodec: TypeAlias = BFloat16Moments | Int8Moments
"""Converts moments between records, by kind, and float32 tensors [numel].

`decode_` fills the moments from their records. Its ``scratch`` is float32 [NUM_SCRATCH, numel]. `encode_` writes only
the elements in ``span`` to their records, and leaves the moments undefined there. A NaN stays a NaN. ``dtypes`` are the
element types of the records by kind. ``params_per_element`` is only for kinds with more than one. Records must end at a
multiple of ``align_numel`` parameters. Tiles begin and end at multiples of the scale block.
"""


def _normalize_(magnitudes: Tensor, scales: Tensor) -> None:
    """Divide each block by its largest element, in place, and write the largest elements to ``scales`` [numel / 32]."""
    largest = _blocks(magnitudes).amax(1)
    scales.copy_(largest)
    _blocks(magnitudes).mul_((1 / largest.clamp_(min=_SMALLEST_DIVISOR))[:, None])


def _round_to_power_(
    fractions: Tensor, temporary: Sequence[Tensor], noise: Tensor, *, num_squares: int, highest: int
) -> Tensor:
    """Return whole float32 numbers n from 0 to ``highest``, in ``temporary[0]``, such that (n / highest)^k with k =
    2^num_squares equals ``fractions`` on average over the ``noise``. (Rounding the root without bias would be wrong.)
    Overwrites ``fractions``."""
    level, power, next_power = temporary
    torch.sqrt(fractions, out=level)
    for _ in range(num_squares - 1):
        level.sqrt_()
    level.mul_(highest).floor_()
    torch.mul(level, level, out=power)
    torch.add(level, 1, out=next_power).square_()
    for _ in range(num_squares - 2):
        power.square_()
        next_power.square_()
    # The fraction is between the k-th powers of level and level + 1. Compute its relative distance from the first.
    fractions.mul_(float(highest) ** 2**num_squares).addcmul_(power, power, value=-1)
    distance = torch.mul(next_power, next_power, out=next_power).addcmul_(power, power, value=-1)
    is_next = fractions.div_(distance).sub_(noise).ceil_()
    return level.add_(is_next)


def _blocks(values: Tensor) -> Tensor:
    return values.view(-1, SCALE_BLOCK_NUMEL)


MOMENT_CODECS: Mapping[MomentDtype, MomentCodec | None] = {
    "float32": None,
    "bfloat16": BFloat16Moments(),
    "int8": Int8Moments(),
    STOCHASTIC: Int8Moments(),
}
"""The codec of each form. float32 has none."""

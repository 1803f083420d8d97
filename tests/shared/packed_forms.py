"""Packed weights of every form, with numbers that fill no block or vector, and their decoding in pieces."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hf_lohan.costs import Quantization
from hf_lohan.costs.quantization import EncodedMatrix
from hf_lohan.quantize import EncodedForm, FourBitForm, PackedForm, int8_form


def encoded(*shapes: tuple[int, int], **settings: Any) -> EncodedForm:
    return EncodedForm.of("fp8", tuple(EncodedMatrix(rows=row, columns=column, **settings) for row, column in shapes))


def four_bit(method: str, double: bool, block: int, numel: int, width: int = 0) -> FourBitForm:
    return FourBitForm(Quantization(method=method, double=double, block=block), numel, transposed_width=width)


FORMS: dict[str, tuple[PackedForm, int]] = {
    "nf4": (four_bit("nf4", False, 64, 64 * 37 + 5), 1),
    "nf4-double": (four_bit("nf4", True, 32, 32 * 270 + 3), 1),
    "fp4-double-experts": (four_bit("fp4", True, 64, 64 * 6), 5),
    "nf4-transposed": (four_bit("nf4", True, 64, 64 * 30, 48), 1),
    "fp4-transposed": (four_bit("fp4", False, 64, 64 * 30, 48), 1),
    "fp8": (encoded((37, 50), codes="float8_e4m3fn", scales="float32", block=(16, 32)), 1),
    "fp8-one-scale": (encoded((9, 50), codes="float8_e5m2", scales="bfloat16", block=(9, 50)), 1),
    "fp8-experts": (encoded((10, 36), (6, 36), codes="float8_e4m3fn", scales="float8_e8m0fnu", block=(8, 32)), 3),
    "mxfp4": (encoded((20, 64), codes="fp4", scales="uint8", block=(1, 32)), 1),
    "mxfp4-experts": (encoded((20, 64), codes="fp4", scales="uint8", block=(1, 32), is_transposed=True), 3),
    "int8-of-127": (int8_form(13, 21), 2),
    "int8-of-127-transposed": (int8_form(12, 20, is_transposed=True), 1),
    "int8": (encoded((13, 21), codes="int8", scales="float16", block=(1, 21)), 1),
    "int4": (encoded((11, 50), codes="int4_in_int32", scales="bfloat16", block=(1, 16), has_zero_points=True), 1),
    "int8-in-int32": (encoded((11, 50), codes="int8_in_int32", scales="float32", block=(1, 50)), 1),
}


def decoded(
    form: PackedForm, num_units: int, codes: Tensor, scales: Tensor, cuts: list[int], dtype: Any = None
) -> Tensor:
    """The whole weight, decoded in pieces between the ``cuts``, each only into the elements that it is said to have."""
    out = torch.full((num_units * form.unit_numel,), float("nan"), dtype=dtype)
    for first, last in zip([0, *cuts], [*cuts, codes.numel()], strict=True):
        low, high = form.elements(first, last)
        form.decode_(out[low:high], low, codes[first:last], first, scales)
    return out

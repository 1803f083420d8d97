"""Packed weights are decoded in any pieces, with the bits of the whole."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from packed_forms import FORMS, decoded, encoded
from torch import Tensor

from hf_lohan.costs import Quantization
from hf_lohan.quantize import EncodedForm, PackedForm, encoded_weights, int8_form
from hf_lohan.quantize.encoded_weights import EncodedWeight, decode_fp4, decode_int4, decode_int8, decode_numbers


def drawn_bytes(form: PackedForm, num_units: int) -> tuple[Tensor, Tensor]:
    """Codes of any values and scales near one."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 120, (num_units * form.unit_codes_bytes,), dtype=torch.uint8, generator=generator)
    if not isinstance(form, EncodedForm):
        return codes, torch.randint(60, 64, (num_units * form.unit_scales_bytes,), dtype=torch.uint8)
    units = []
    for matrix in form.matrices * num_units:
        scales = torch.zeros(matrix.scales_bytes, dtype=torch.uint8)
        number = matrix.grid[0] * matrix.grid[1]
        values = torch.rand(number, generator=generator) + 0.5
        if matrix.scales == "uint8":
            values = torch.randint(120, 130, (number,), dtype=torch.uint8, generator=generator)
        of_dtype = values.to(getattr(torch, matrix.scales)).view(torch.uint8)
        scales[: of_dtype.numel()] = of_dtype
        if matrix.has_zero_points:
            scales[matrix.zero_points_start :].random_(0, 16, generator=generator)
        units.append(scales)
    return codes, torch.cat(units)


@pytest.mark.parametrize("name", FORMS)
def test_pieces_have_the_bits_of_the_whole(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    form, num_units = FORMS[name]
    codes, scales = drawn_bytes(form, num_units)
    whole = decoded(form, num_units, codes, scales, [])
    assert whole.isfinite().all() and whole.unique().numel() > 10
    monkeypatch.setattr(encoded_weights, "_DECODED_AT_ONCE_NUMEL", 100)
    choose = random.Random(0)
    places = range(form.cut_bytes, codes.numel(), form.cut_bytes)
    for number in (1, 3, 40):
        cuts = sorted(choose.sample(places, min(number, len(places))))
        assert torch.equal(decoded(form, num_units, codes, scales, cuts), whole)
    for _ in range(30):
        first, last = sorted(choose.sample(range(whole.numel() + 1), 2))
        begin, end = form.bytes_of(first, last)
        low, high = form.elements(begin, end)
        assert low <= first < last <= high and begin % form.cut_bytes == 0
        piece = torch.empty(high - low)
        form.decode_(piece, low, codes[begin:end], begin, scales)
        assert torch.equal(piece, whole[low:high])


class _Stored:
    def __init__(self, tensor: Tensor, dtype: str) -> None:
        self._tensor, self._dtype = tensor, dtype

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        return self._dtype

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "name",
    [name for name, (form, _) in FORMS.items() if isinstance(form, EncodedForm) and "127-transposed" not in name],
)
def test_decoded_bytes_equal_the_weights_of_the_checkpoint(name: str, dtype: torch.dtype) -> None:
    """What an `EncodedWeight` decodes itself is tested against transformers."""
    form, _ = FORMS[name]
    assert isinstance(form, EncodedForm)
    matrix = form.matrices[0]
    codes, scales = drawn_bytes(EncodedForm.of("fp8", (matrix,)), 1)
    dtypes = {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "int8": "I8", "fp4": "U8"}
    scale_dtypes = {"float32": "F32", "bfloat16": "BF16", "float16": "F16", "uint8": "U8", "float8_e8m0fnu": "F8_E8M0"}
    is_of_127 = matrix.codes == "int8_of_127"
    code_dtype = torch.int8 if is_of_127 else getattr(torch, matrix.codes, torch.uint8)
    stored_codes = codes.view(torch.int32 if matrix.cut_bytes == 4 else code_dtype)
    grid = scales[: matrix.grid[0] * matrix.grid[1] * getattr(torch, matrix.scales).itemsize]
    zeros = scales[matrix.zero_points_start :].view(torch.int8)[: matrix.rows * matrix.grid[1]].view(matrix.rows, -1)
    experts = (1,) if matrix.is_transposed else ()
    shape = (matrix.columns, matrix.rows) if matrix.is_transposed else (matrix.rows, matrix.columns)
    weight = EncodedWeight(
        torch.Size((*experts, *shape)),
        _Stored(stored_codes.view(*experts, matrix.rows, -1), dtypes.get(matrix.codes, "I32")),
        _Stored(grid.view(getattr(torch, matrix.scales)).view(*experts, *matrix.grid), scale_dtypes[matrix.scales]),
        {"fp4": decode_fp4, "int4_in_int32": decode_int4, "int8_in_int32": decode_int8}.get(
            matrix.codes, decode_numbers
        ),
        matrix.block,
        _Stored(zeros, "I8") if matrix.has_zero_points else None,
        matrix.is_transposed,
        is_of_127,
    )
    assert weight.matrix() == matrix
    expert = 0 if experts else None
    given = torch.cat([rows for _, rows in weight.rows_of_codes(expert, matrix)])
    assert torch.equal(given, codes)
    assert torch.equal(weight.scales_of(expert, matrix)[: grid.numel()], grid)
    out = torch.empty(matrix.numel, dtype=dtype)
    EncodedForm.of("fp8", (matrix,)).decode_(out, 0, given, 0, weight.scales_of(expert, matrix))
    assert torch.equal(out, weight.decode(0, weight.shape[0], dtype).flatten())


def test_the_bytes_of_a_form_are_those_of_the_checkpoint() -> None:
    """Of 1024 x 1024 weights, against 4 bytes each in float32."""
    sizes = {
        "fp8": encoded((1024, 1024), codes="float8_e4m3fn", scales="float32", block=(128, 128)),
        "mxfp4": encoded((1024, 1024), codes="fp4", scales="uint8", block=(1, 32), is_transposed=True),
        "int4": encoded((1024, 1024), codes="int4_in_int32", scales="bfloat16", block=(1, 128)),
    }
    shares = {name: (form.unit_codes_bytes + form.unit_scales_bytes) / (4 << 20) for name, form in sizes.items()}
    assert 0.25 < shares["fp8"] < 0.2502 and shares["mxfp4"] == 0.1328125 and shares["int4"] == 0.12890625


def test_a_setting_of_a_run_is_read_from_its_description() -> None:
    form = encoded((8, 32), codes="fp4", scales="uint8", block=(1, 32), is_transposed=True)
    quantization = Quantization(method="mxfp4", weights=(("a.weight", form.matrices), ("b.weight", form.matrices)))
    assert Quantization.parse(quantization.to_setting()) == quantization
    assert quantization.packs


@pytest.mark.covering(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_int8_has_the_bits_of_bitsandbytes(dtype: torch.dtype, is_transposed: bool) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    weight = torch.randn(40, 24).to(dtype)
    theirs, row_scales, _ = functional.int8_vectorwise_quant(weight.clone())
    form = int8_form(40, 24, is_transposed=is_transposed)
    values = form.stored_order((weight.t().contiguous() if is_transposed else weight).reshape(-1))
    packer, codes = form.packer(), []
    for piece in values.split(100):
        first, part = packer.pack(piece)
        assert first == sum(map(len, codes))
        codes.append(part)
    packed, scales = torch.cat(codes), packer.pack_scales()
    assert torch.equal(packed.view(torch.int8).view(40, 24), theirs)
    out = torch.empty(weight.numel(), dtype=dtype)
    form.decode_(out, 0, packed, 0, scales)
    expected = functional.int8_vectorwise_dequant(theirs, row_scales).to(dtype)
    assert torch.equal(out.view(24, 40).t() if is_transposed else out.view(40, 24), expected)


def test_a_row_of_zeros_in_int8_stays_zero() -> None:
    form, packer = int8_form(2, 4), int8_form(2, 4).packer()
    _, codes = packer.pack(torch.tensor([0.0, 0.0, 0.0, 0.0, 1.0, -2.0, 0.5, 0.0]))
    out = torch.empty(8)
    form.decode_(out, 0, codes, 0, packer.pack_scales())
    assert out[:4].tolist() == [0.0] * 4 and out[5] == -2.0

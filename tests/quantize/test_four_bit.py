"""NF4 and FP4 equal bitsandbytes bit for bit, for any split of the input and any decoded part."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from hf_lohan.costs import Quantization
from hf_lohan.quantize import FourBitForm, decode_

FORMS = [
    Quantization(method=method, double=double, block=block)
    for method, double, block in itertools.product(("nf4", "fp4"), (False, True), (32, 64, 4096))
]


def packed_in_rows(weight: Tensor, form: Quantization, rows_at_once: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a weight that arrives a few rows at a time."""
    packer = FourBitForm(form, weight.numel()).packer()
    codes = torch.zeros(form.codes_bytes(weight.numel()), dtype=torch.uint8)
    for rows in weight.split(rows_at_once):
        first, part = packer.pack(rows.reshape(-1))
        codes[first : first + part.numel()] = part
    return codes, packer.pack_scales()


def weights(dtype: torch.dtype) -> list[Tensor]:
    """Return weights with and without partial large blocks, with more and fewer than 256 scales, and with a row of
    zeros. Rows are whole small blocks, because with partial ones the AVX512 kernel of bitsandbytes mixes up the
    scales."""
    torch.manual_seed(0)
    shapes = ((64, 128), (36, 64), (300, 1024))
    drawn = [torch.randn(shape) * torch.rand(shape[0], 1) for shape in shapes]
    drawn[0][3] = 0
    return [weight.to(dtype) for weight in drawn]


@pytest.mark.covering(1)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.method}-{form.double}-{form.block}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_scales_and_decoded_weights_equal_bitsandbytes(form: Quantization, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    for weight in weights(dtype):
        theirs, state = functional.quantize_4bit(
            weight, blocksize=form.block, compress_statistics=form.double, quant_type=form.method
        )
        with torch.compiler.set_stance("force_eager"):  # bitsandbytes compiles for large blocks, which takes 20 s
            their_decoded = functional.dequantize_4bit(theirs, state)
        codes, scales = packed_in_rows(weight, form, rows_at_once=7)
        decoded = torch.empty_like(weight)
        decode_(decoded.view(-1), codes, scales, form, weight.numel(), 0)
        assert torch.equal(codes, theirs.view(-1))
        assert torch.equal(decoded, their_decoded)


def test_the_number_of_threads_changes_no_bit() -> None:
    """Scales of 2 million elements are summed by several threads, and a mean of them all depends on their number."""
    form = Quantization(method="nf4", double=True, block=32)
    weight = torch.randn(512, 4096, generator=torch.Generator().manual_seed(2))
    before, packed = torch.get_num_threads(), []
    try:
        for num_threads in (1, 2, 3, 5):
            torch.set_num_threads(num_threads)
            packed.append(packed_in_rows(weight, form, rows_at_once=512)[1])
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(scales, packed[0]) for scales in packed)


@pytest.mark.covering(0)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.method}-{form.double}-{form.block}")
@pytest.mark.parametrize("shape", [(20, 72), (7, 9), (50, 100), (3, 129), (300, 72)])
def test_a_width_that_is_no_multiple_of_the_block_equals_bitsandbytes(
    shape: tuple[int, int], form: Quantization
) -> None:
    """Blocks go on in the next row, and the last one is short. bitsandbytes packs the weight in its shape, and decodes
    it as one row, because its AVX512 kernel mixes up the scales of rows that end within a block."""
    functional = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(0)
    for dtype in (torch.float32, torch.bfloat16):
        weight = torch.randn(shape).to(dtype)
        codes, scales = packed_in_rows(weight, form, rows_at_once=3)
        decoded = torch.empty_like(weight)
        decode_(decoded.view(-1), codes, scales, form, weight.numel(), 0)
        settings = {"blocksize": form.block, "compress_statistics": form.double, "quant_type": form.method}
        theirs, _ = functional.quantize_4bit(weight, **settings)
        assert torch.equal(codes, theirs.view(-1))
        in_one_row, state = functional.quantize_4bit(weight.view(1, -1), **settings)
        assert torch.equal(codes, in_one_row.view(-1))
        assert torch.equal(decoded.view(1, -1), functional.dequantize_4bit(in_one_row, state))


@pytest.mark.parametrize("form", FORMS[::2], ids=lambda form: f"{form.method}-{form.double}-{form.block}")
def test_a_part_is_decoded_as_within_the_whole(form: Quantization) -> None:
    weight = weights(torch.float32)[2]
    codes, scales = packed_in_rows(weight, form, rows_at_once=300)
    whole, part = torch.empty(weight.numel()), torch.empty(5000)
    decode_(whole, codes, scales, form, weight.numel(), 0)
    decode_(part, codes[8192 * 5 // 2 :], scales, form, weight.numel(), 8192 * 5)
    assert torch.equal(part, whole[8192 * 5 : 8192 * 5 + 5000])
    assert 0 < (whole - weight.view(-1)).abs().max() < 0.2 * weight.abs().max()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("nf5", "'nf5' is not allowed; choose auto, none, nf4, fp4 or int8"),
        ({"method": "nf4", "block": 48}, "block: 48 is not allowed; choose 32, 64,"),
        ({"method": "none"}, "a table needs its method, and 'none' is not allowed; choose nf4, fp4 or int8"),
        ({"method": "nf4", "bits": 4}, "the key 'bits' is not allowed"),
        ({"method": "nf4", "double": 1}, "double: 1 is not allowed; choose true or false"),
        ({"method": "int8", "block": 32}, "int8 has a scale for each row, and no double or block"),
        (4, "4 is not allowed; give auto, none, nf4, fp4 or int8, or a table"),
    ],
)
def test_a_wrong_setting_is_quoted(setting: object, message: str) -> None:
    with pytest.raises(ValueError, match="quantize: .*" + message.replace("(", r"\(")):
        Quantization.parse(setting)

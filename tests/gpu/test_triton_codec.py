"""Encoding values in 8 or 4 bits on CUDA, and decoding packed weights, with Triton if installed, equal the CPU to the
bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from coded_sums import decode_sum_, decode_sum_encode

from hf_lohan.costs import Quantization
from hf_lohan.costs.quantization import EncodedMatrix
from hf_lohan.quantize import EncodedForm, FourBitForm, PackedForm, int8_form, packed_form
from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec

NUMEL = (1 << 20) + 77
NUM_RANKS = 4


def random_values(seed: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(NUMEL, generator=generator) * torch.randn(NUMEL, generator=generator).exp()
    values[1000], values[5000], values[8192:8448] = torch.inf, torch.nan, 0
    values[16384:16640] *= 1e-41
    return values.to(dtype)


def assert_same(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Check that all values are equal, where NaN equals NaN."""
    assert torch.equal(found.cpu().nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("codec", [GRADIENTS_INT8, GRADIENTS_INT4, WEIGHTS_INT8, BlockCodec(4, 4096, torch.float32)])
def test_codes_on_cuda_equal_codes_on_the_cpu(codec: BlockCodec, dtype: torch.dtype) -> None:
    code_bytes = NUMEL // codec.block_numel * codec.block_numel * codec.num_bits // 8
    messages, on_gpu = [], []
    for rank in range(NUM_RANKS):
        values = random_values(rank, dtype)
        message = torch.empty(codec.message_bytes(NUMEL), dtype=torch.uint8)
        message_on_gpu = message.cuda()
        codec.encode(values, message)
        codec.encode(values.cuda(), message_on_gpu)
        assert torch.equal(message_on_gpu.cpu()[:code_bytes], message[:code_bytes])
        found, expected = torch.empty(NUMEL, dtype=dtype, device="cuda"), torch.empty(NUMEL, dtype=dtype)
        codec.decode(message_on_gpu, found)
        codec.decode(message, expected)
        assert_same(found, expected)
        messages.append(message)
        on_gpu.append(message_on_gpu)
    total, total_on_gpu = torch.empty(NUMEL), torch.empty(NUMEL, device="cuda")
    decode_sum_(codec, messages, total, 1 / 3)
    decode_sum_(codec, on_gpu, total_on_gpu, 1 / 3)
    assert_same(total_on_gpu, total)
    recoded, recoded_on_gpu = torch.empty_like(messages[0]), torch.empty_like(on_gpu[0])
    decode_sum_encode(codec, messages, recoded, NUMEL, 1 / 3)
    decode_sum_encode(codec, on_gpu, recoded_on_gpu, NUMEL, 1 / 3)
    codec.decode(recoded, total)
    codec.decode(recoded_on_gpu, total_on_gpu)
    assert_same(total_on_gpu, total)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install hf-lohan[triton]")
def test_triton_computes_the_codes() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        message = torch.empty(WEIGHTS_INT8.message_bytes(NUMEL), dtype=torch.uint8, device="cuda")
        WEIGHTS_INT8.encode(torch.randn(NUMEL, device="cuda"), message)
    assert any("_quantize_kernel" in event.key for event in profile.key_averages())


FORMS: dict[str, PackedForm] = {
    "nf4": FourBitForm(Quantization(method="nf4"), 4096 * 1024),
    "fp4-transposed": FourBitForm(Quantization(method="fp4", double=False), 1024 * 768, transposed_width=768),
    "fp8": EncodedForm.of(
        "fp8", (EncodedMatrix(rows=1000, columns=900, codes="float8_e4m3fn", scales="float32", block=(128, 128)),)
    ),
    "mxfp4": EncodedForm.of(
        "mxfp4",
        (EncodedMatrix(rows=96, columns=64, codes="fp4", scales="uint8", block=(1, 32), is_transposed=True),) * 2,
    ),
    "int4": EncodedForm.of(
        "int4",
        (
            EncodedMatrix(
                rows=50, columns=512, codes="int4_in_int32", scales="bfloat16", block=(1, 128), has_zero_points=True
            ),
        ),
    ),
    "int8": int8_form(300, 200),
}


@pytest.mark.parametrize("with_kernels", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMS)
def test_packed_weights_decode_on_cuda_as_on_the_cpu(
    name: str, dtype: torch.dtype, with_kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    form, generator = FORMS[name], torch.Generator().manual_seed(0)
    codes = torch.randint(0, 256, (form.unit_codes_bytes,), dtype=torch.uint8, generator=generator)
    scales = torch.randint(55, 61, (form.unit_scales_bytes,), dtype=torch.uint8, generator=generator)
    out, expected = torch.zeros(form.unit_numel, dtype=dtype, device="cuda"), torch.zeros(form.unit_numel, dtype=dtype)
    form.decode_(expected, 0, codes, 0, scales)
    if not with_kernels:
        monkeypatch.setattr(packed_form, "kernels_for", lambda tensor: None)
    form.decode_(out, 0, codes.cuda(), 0, scales.cuda())
    assert expected.unique().numel() > 10
    assert_same(out, expected)

"""Encoding values in 8 or 4 bits on CUDA, with Triton if installed, equals encoding on the CPU to the bit."""

from __future__ import annotations

import importlib.util

import pytest
import torch

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
    codec.decode_sum_(messages, total, 1 / 3)
    codec.decode_sum_(on_gpu, total_on_gpu, 1 / 3)
    assert_same(total_on_gpu, total)
    recoded, recoded_on_gpu = torch.empty_like(messages[0]), torch.empty_like(on_gpu[0])
    codec.decode_sum_encode(messages, recoded, NUMEL, 1 / 3)
    codec.decode_sum_encode(on_gpu, recoded_on_gpu, NUMEL, 1 / 3)
    codec.decode(recoded, total)
    codec.decode(recoded_on_gpu, total_on_gpu)
    assert_same(total_on_gpu, total)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs Triton: pip install hf-lohan[triton]")
def test_triton_computes_the_codes() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        message = torch.empty(WEIGHTS_INT8.message_bytes(NUMEL), dtype=torch.uint8, device="cuda")
        WEIGHTS_INT8.encode(torch.randn(NUMEL, device="cuda"), message)
    assert any("_quantize_kernel" in event.key for event in profile.key_averages())

"""Compare all functions of `triton_codec` with `torch_codec`, bit for bit. `test_block_codec` runs this file in a
process with Triton's interpreter.
"""

from __future__ import annotations

import itertools
import warnings

import torch
from hard_values import assert_same_bits, hard_values
from torch import Tensor

from hf_lohan.ranks.collectives import torch_codec, triton_codec
from hf_lohan.ranks.collectives.block_operators import codes_numel, num_blocks_of

NUM_PARTS = 3


def compare(num_bits: int, block: int, scale_dtype: torch.dtype, dtype: torch.dtype) -> None:
    numel = 9 * block + block // 3
    form = (num_bits, block)

    def coded(block: int = block) -> tuple[Tensor, Tensor]:
        codes = torch.empty(codes_numel(numel, num_bits, block), dtype=torch.int8)
        return codes, torch.empty(num_blocks_of(numel, block), dtype=scale_dtype)

    parts = []
    for seed in range(NUM_PARTS):
        values = hard_values(numel, block, dtype, seed=seed)
        expected, found = coded(), coded()
        torch_codec.quantize_(values, *form, *expected)
        triton_codec.quantize_(values, *form, *found)
        for one, other in zip(found, expected, strict=True):
            assert_same_bits(one, other)
        back, back_by_triton = torch.empty(numel, dtype=dtype), torch.empty(numel, dtype=dtype)
        torch_codec.dequantize_(*expected, *form, back)
        triton_codec.dequantize_(*expected, *form, back_by_triton)
        assert_same_bits(back_by_triton, back)
        parts.append(expected)
    codes, scales = zip(*parts, strict=True)
    for factor, num in ((1 / 3, NUM_PARTS), (0.25, 1)):
        total, total_by_triton = torch.empty(numel), torch.empty(numel)
        torch_codec.dequantize_sum_(codes[:num], scales[:num], *form, factor, total)
        triton_codec.dequantize_sum_(codes[:num], scales[:num], *form, factor, total_by_triton)
        assert_same_bits(total_by_triton, total)
        for out_block in (block, 2 * block):
            expected, found = coded(out_block), coded(out_block)
            sizes = (num_bits, block, out_block, numel)
            torch_codec.dequantize_sum_quantize_(codes[:num], scales[:num], *sizes, factor, *expected)
            triton_codec.dequantize_sum_quantize_(codes[:num], scales[:num], *sizes, factor, *found)
            for one, other in zip(found, expected, strict=True):
                assert_same_bits(one, other)


if __name__ == "__main__":
    warnings.simplefilter("ignore", RuntimeWarning)  # numpy warns about the sum of opposite infinities
    torch.set_num_threads(1)
    cases = list(
        itertools.product(
            (8, 4), (32, 64, 256), (torch.float32, torch.bfloat16), (torch.float32, torch.bfloat16, torch.float16)
        )
    )
    for case in cases:
        compare(*case)
    print(f"{len(cases)} cases")

"""Values in 8 or 4 bits equal the definition bit for bit, for any size, tile and operation."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from coded_sums import decode_sum_, decode_sum_encode, errors_of, split, split_all
from hard_values import HIGHEST, assert_same_bits, hard_values, plain_coding, ties
from hypothesis import given, settings
from hypothesis import strategies as st
from python_runs import run_python
from torch import Tensor

from hf_lohan.costs import collectives
from hf_lohan.ranks import GRADIENTS_INT4, GRADIENTS_INT8, WEIGHTS_INT8, BlockCodec
from hf_lohan.ranks.collectives.block_operators import dequantize_sum_quantize_

CODECS = [GRADIENTS_INT8, GRADIENTS_INT4, WEIGHTS_INT8, BlockCodec(4, 16, torch.float32)]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
A_TILE = 64 * 1024
codecs = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: f"int{codec.num_bits}-{codec.block_numel}")


def message_of(codec: BlockCodec, values: Tensor) -> Tensor:
    message = torch.full((codec.message_bytes(values.numel()),), 0xAA, dtype=torch.uint8)
    codec.encode(values, message)
    return message


def decoded(codec: BlockCodec, message: Tensor, numel: int, dtype: torch.dtype = torch.float32) -> Tensor:
    out = torch.full((numel,), 77.0, dtype=dtype)
    codec.decode(message, out)
    return out


def parts_of(codec: BlockCodec, message: Tensor) -> tuple[Tensor, Tensor]:
    """Decode a message into levels [num_blocks, block_numel] and scales, without the tested code."""
    block_bytes = codec.block_numel * codec.num_bits // 8
    num_blocks = message.numel() // (block_bytes + codec.scale_dtype.itemsize)
    codes = message[: num_blocks * block_bytes].view(torch.int8).view(num_blocks, block_bytes).int()
    if codec.num_bits == 4:
        codes = torch.cat([codes % 16 - 8, torch.div(codes, 16, rounding_mode="floor")], 1)
    return codes, message[num_blocks * block_bytes :].view(codec.scale_dtype)


@pytest.mark.parametrize("numel", [0, 1, 65, 255, 256, 257, 1 << 20, 10_000_019])
def test_messages_have_the_planned_size(numel: int) -> None:
    exact = collectives.WAY_WITHIN_A_NODE
    sends = {
        "int8": collectives.Collectives(forward="int8", gradients="int8"),
        "int4": collectives.Collectives(gradients="int4"),
    }
    assert GRADIENTS_INT8.message_bytes(numel) == sends["int8"].gradient_bytes(numel, 4)
    assert GRADIENTS_INT4.message_bytes(numel) == sends["int4"].gradient_bytes(numel, 4)
    assert WEIGHTS_INT8.message_bytes(numel) == sends["int8"].weight_bytes(2 * numel, numel, numel)
    assert exact.gradient_bytes(numel, 4) == 4 * numel


@codecs
@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_and_scales_equal_the_definition(codec: BlockCodec, dtype: torch.dtype) -> None:
    values = hard_values(7 * codec.block_numel + 5, codec.block_numel, dtype)
    levels, scales = parts_of(codec, message_of(codec, values))
    wanted_levels, wanted_scales = plain_coding(values, codec.num_bits, codec.block_numel, codec.scale_dtype)
    assert_same_bits(scales, wanted_scales)
    assert torch.equal(levels.float(), wanted_levels)
    expected = (wanted_levels * wanted_scales.float()[:, None]).flatten()[: values.numel()]
    assert_same_bits(decoded(codec, message_of(codec, values), values.numel(), dtype), expected.to(dtype))
    assert bool(expected[: codec.block_numel].eq(0).all())
    assert bool(expected[3 * codec.block_numel : 5 * codec.block_numel].isnan().all())
    assert int(expected.isnan().sum()) == 2 * codec.block_numel


@pytest.mark.parametrize("num_bits", [8, 4])
def test_ties_round_to_the_even_code(num_bits: int) -> None:
    codec = BlockCodec(num_bits, 64, torch.float32)
    values = ties(64, num_bits)
    found = decoded(codec, message_of(codec, values), 64)
    assert bool((found[1:] % 2 == 0).all()) and bool(((found - values)[1:].abs() == 0.5).all())


@codecs
def test_tiles_and_padding_change_no_code(codec: BlockCodec) -> None:
    """Each block has the same codes alone as at any position."""
    values = hard_values(2 * A_TILE + 3 * codec.block_numel + 1, codec.block_numel)
    levels, scales = parts_of(codec, message_of(codec, values))
    for start in (0, A_TILE - codec.block_numel, A_TILE, 2 * A_TILE, 2 * A_TILE + 3 * codec.block_numel):
        alone = values[start : start + codec.block_numel]
        own_levels, own_scales = parts_of(codec, message_of(codec, alone))
        assert torch.equal(levels[start // codec.block_numel], own_levels[0])
        assert_same_bits(scales[start // codec.block_numel][None], own_scales)


@codecs
@pytest.mark.parametrize("factor", [1.0, 0.25, 1 / 3])
def test_a_sum_adds_parts_in_order(codec: BlockCodec, factor: float) -> None:
    numel = A_TILE + 2 * codec.block_numel + 9
    messages = [message_of(codec, hard_values(numel, codec.block_numel, seed=seed)) for seed in range(4)]
    expected = decoded(codec, messages[0], numel) * factor
    for message in messages[1:]:
        expected += decoded(codec, message, numel) * factor
    found = torch.empty(numel)
    decode_sum_(codec, messages, found, factor)
    assert_same_bits(found, expected)
    out = torch.empty_like(messages[0])
    decode_sum_encode(codec, messages, out, numel, factor)
    levels, scales = parts_of(codec, out)
    wanted_levels, wanted_scales = parts_of(codec, message_of(codec, expected))
    assert_same_bits(scales, wanted_scales)
    assert torch.equal(levels, wanted_levels)
    # other products have few digits, and few of their sums are rounded
    if codec.scale_dtype == torch.float32 or factor == 1 / 3:
        backwards = torch.empty(numel)
        decode_sum_(codec, messages[::-1], backwards, factor)
        assert not torch.equal(backwards.nan_to_num(), found.nan_to_num()), "the order does not matter"


@codecs
@pytest.mark.parametrize("dtype", DTYPES)
def test_no_input_is_changed(codec: BlockCodec, dtype: torch.dtype) -> None:
    """`float()` of a float32 tensor is the same tensor, so work in place would change a gradient."""
    values = hard_values(6 * codec.block_numel, codec.block_numel, dtype)
    before = values.clone()
    messages = [message_of(codec, values), message_of(codec, values)]
    assert_same_bits(values, before)
    copies = [message.clone() for message in messages]
    codec.decode(messages[0], torch.empty(values.numel()))
    decode_sum_(codec, messages, torch.empty(values.numel()), 0.5)
    decode_sum_encode(codec, messages, torch.empty_like(messages[0]), values.numel())
    assert all(map(torch.equal, messages, copies))


@codecs
def test_parameters_can_be_coded(codec: BlockCodec) -> None:
    """Coding a parameter records no graph."""
    parameter = torch.nn.Parameter(torch.randn(300))
    message = message_of(codec, parameter)
    assert torch.equal(message, message_of(codec, parameter.detach())) and not message.requires_grad
    codec.decode(message, parameter)
    assert torch.equal(parameter.detach(), decoded(codec, message, 300))
    decode_sum_(codec, [message, message], parameter, 0.25)
    assert torch.equal(parameter.detach() * 2, decoded(codec, message, 300))
    assert parameter.is_leaf and parameter.requires_grad
    assert errors_of(codec, parameter.detach())[0] < 0.1


@codecs
def test_a_message_in_a_buffer_changes_no_neighbours(codec: BlockCodec) -> None:
    values, num_bytes = torch.randn(1000), codec.message_bytes(1000)
    buffer = torch.full((num_bytes + 64,), 5, dtype=torch.uint8)
    codec.encode(values, buffer[32 : 32 + num_bytes])
    assert torch.equal(buffer[32 : 32 + num_bytes], message_of(codec, values))
    assert bool((buffer[:32] == 5).all()) and bool((buffer[32 + num_bytes :] == 5).all())


@settings(max_examples=60)
@given(
    numel=st.integers(0, 3000),
    num_bits=st.sampled_from([8, 4]),
    block_numel=st.sampled_from([16, 64, 256, 4096]),
    scale_dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    exponent=st.integers(-44, 38),
    seed=st.integers(0, 99),
)
def test_any_size_and_magnitude_equals_the_definition(
    numel: int, num_bits: int, block_numel: int, scale_dtype: torch.dtype, exponent: int, seed: int
) -> None:
    codec = BlockCodec(num_bits, block_numel, scale_dtype)
    values = torch.randn(numel, generator=torch.Generator().manual_seed(seed)).clamp(-3, 3).mul(10.0**exponent)
    levels, scales = plain_coding(values, num_bits, block_numel, scale_dtype)
    found = decoded(codec, message_of(codec, values), numel)
    assert_same_bits(found, (levels * scales.float()[:, None]).flatten()[:numel])


@pytest.mark.parametrize("num_bits", [8, 4])
@pytest.mark.parametrize("numel", [32, 70, 4096, 70_000])
def test_a_sum_may_be_coded_in_larger_blocks(num_bits: int, numel: int) -> None:
    codec, larger, total = BlockCodec(num_bits, 32), BlockCodec(num_bits, 64), torch.empty(numel)
    messages = [message_of(codec, torch.randn(numel)) for _ in range(3)]
    codes, scales = split_all(codec, messages, numel)
    decode_sum_(codec, messages, total, 1 / 3)
    expected = split(larger, message_of(larger, total), numel)
    found = tuple(map(torch.empty_like, expected))
    dequantize_sum_quantize_(codes, scales, num_bits, 32, 64, numel, 1 / 3, *found)
    assert all(map(torch.equal, found, expected))
    with pytest.raises(ValueError, match="out_block_numel=128 is not supported for blocks of 32; choose 32 or 64"):
        dequantize_sum_quantize_(codes, scales, num_bits, 32, 128, numel, 1 / 3, *found)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((5, 64, torch.float32), "num_bits=5 is not supported; choose 8 or 4"),
        ((8, 96, torch.float32), "block_numel=96 is not supported; choose a power of two from 16 to 4096"),
        ((8, 8, torch.float32), "block_numel=8 is not supported; choose a power of two"),
        ((8, 64, torch.float16), "scale_dtype=torch.float16 is not supported; choose torch.float32 or torch.bfloat16"),
    ],
)
def test_unsupported_formats_are_refused(arguments: tuple[int, int, torch.dtype], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        BlockCodec(*arguments)


def test_messages_of_wrong_size_or_dtype_are_refused() -> None:
    codec, values = WEIGHTS_INT8, torch.randn(256)
    with pytest.raises(ValueError, match=r"a payload of 256 values is contiguous torch\.uint8 \[260\], not .* \[261\]"):
        codec.encode(values, torch.empty(261, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"not torch\.int8 \[260\]"):
        codec.decode(torch.empty(260, dtype=torch.int8), values)
    with pytest.raises(ValueError, match="a payload begins 2 bytes past a multiple of 4"):
        codec.encode(values, torch.empty(264, dtype=torch.uint8)[2:262])
    with pytest.raises(ValueError, match=r"expected torch\.float32 or .* \[256\] in one piece, got torch\.float64"):
        codec.encode(values.double(), torch.empty(260, dtype=torch.uint8))
    with pytest.raises(ValueError, match="in one piece"):
        codec.encode(torch.randn(512)[::2], torch.empty(260, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"a sum is torch\.float32, not torch\.bfloat16"):
        decode_sum_(codec, [message_of(codec, values)], values.bfloat16())
    with pytest.raises(ValueError, match="0 tensors of codes"):
        decode_sum_(codec, [], values)


needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="needs Triton: pip install hf-lohan[triton]"
)


@pytest.mark.slow
@needs_triton
def test_triton_computes_the_same_bits() -> None:
    """The interpreter must be chosen before Triton is imported. `tests/gpu` compares on CUDA."""
    script = Path(__file__).with_name("triton_against_torch.py")
    assert "36 cases" in run_python(script, TRITON_INTERPRET="1", OMP_NUM_THREADS="1").stdout


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize("is_split", [False, True])
@pytest.mark.parametrize("num_bits", [8, 4])
def test_triton_rounds_each_operation_by_itself_on_cuda(num_bits: int, is_split: bool) -> None:
    """Compiling needs no GPU. A fused multiply-add or a fast division would change bits."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from hf_lohan.ranks.collectives import triton_codec

    tensors = {"codes": ("*i8",) * 3, "scales": ("*bf16",) * 3, "factor": "fp32"}
    tensors |= {"out_codes": "*i8", "out_scales": "*bf16", "num_in_blocks": "i32", "num_blocks": "i32"}
    constants = {"ROWS": 32, "HALF": 32, "NUM_BITS": num_bits, "HIGHEST": float(HIGHEST[num_bits])}
    constants["IS_SPLIT"] = is_split
    source = ASTSource(
        triton_codec._sum_quantize_kernel,
        {**tensors, **dict.fromkeys(constants, "constexpr")},
        constexprs={(len(tensors) + k,): value for k, value in enumerate(constants.values())},
    )
    target = GPUTarget("cuda", 90, 32)
    apart, fused = (compile(source, target=target, options={"enable_fp_fusion": on}).asm["ptx"] for on in (False, True))
    assert "div.rn.f32" in apart and "mul.rn.f32" in apart
    assert not [word for word in ("fma.", ".ftz", "div.full", "div.approx") if word in apart]
    assert "fma." in fused, "nothing to fuse, so this test could not fail"

"""The computations of `block_codec`, with a check of their arguments. `torch_codec` describes and computes them.
`triton_codec` computes them on CUDA if Triton is installed. The sum that is sent to other ranks may have blocks of
twice the size. All write to the caller's tensors and have no derivative.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from hf_lohan.ranks.collectives import torch_codec
from hf_lohan.ranks.collectives.torch_codec import HIGHEST_CODE

logger = logging.getLogger(__name__)

VALUE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE_DTYPES = (torch.float32, torch.bfloat16)
MIN_BLOCK_NUMEL, MAX_BLOCK_NUMEL = 16, 4096


def num_blocks_of(numel: int, block_numel: int) -> int:
    return -(-numel // block_numel)


def codes_numel(numel: int, num_bits: int, block_numel: int) -> int:
    """Return the bytes of the codes of ``numel`` values."""
    return num_blocks_of(numel, block_numel) * block_numel * num_bits // 8


def check_format(num_bits: int, block_numel: int, scale_dtype: torch.dtype) -> None:
    """Raise ValueError for a format that is not supported."""
    if num_bits not in HIGHEST_CODE:
        raise ValueError(f"num_bits={num_bits} is not supported; choose 8 or 4")
    if block_numel & (block_numel - 1) or not MIN_BLOCK_NUMEL <= block_numel <= MAX_BLOCK_NUMEL:
        raise ValueError(
            f"block_numel={block_numel} is not supported; choose a power of two from {MIN_BLOCK_NUMEL} "
            f"to {MAX_BLOCK_NUMEL}"
        )
    if scale_dtype not in SCALE_DTYPES:
        raise ValueError(f"scale_dtype={scale_dtype} is not supported; choose torch.float32 or torch.bfloat16")


@cache
def _triton_codec() -> ModuleType | None:
    try:
        return import_module("hf_lohan.ranks.collectives.triton_codec")
    except ImportError as error:
        logger.warning("quantizing with torch, which is slower on a GPU, because Triton cannot be imported: %s", error)
        return None


def _kernels(tensor: Tensor) -> ModuleType:
    return (_triton_codec() if tensor.device.type == "cuda" else None) or torch_codec


def _check(
    codes: Sequence[Tensor], scales: Sequence[Tensor], values: Sequence[Tensor], numel: int, bits: int, block: int
) -> None:
    """Raise ValueError for tensors whose sizes do not fit together. Kernels do not check them again."""
    if not codes or len(codes) != len(scales):
        raise ValueError(
            f"got {len(codes)} tensors of codes and {len(scales)} of scales; pass the same number of both, at least one"
        )
    check_format(bits, block, scales[0].dtype)
    wanted: list[tuple[Tensor, int, tuple[torch.dtype, ...]]]
    wanted = [(tensor, codes_numel(numel, bits, block), (torch.int8,)) for tensor in codes]
    wanted += [(tensor, num_blocks_of(numel, block), (scales[0].dtype,)) for tensor in scales]
    wanted += [(tensor, numel, VALUE_DTYPES) for tensor in values]
    for tensor, length, dtypes in wanted:
        if tensor.dim() != 1 or tensor.numel() != length or tensor.dtype not in dtypes or not tensor.is_contiguous():
            raise ValueError(
                f"{numel} values in {bits} bits, blocks of {block}: expected {' or '.join(map(str, dtypes))} "
                f"[{length}] in one piece, got {tensor.dtype} {list(tensor.shape)}"
            )
        if tensor.device != codes[0].device:
            raise ValueError(
                f"codes are on {codes[0].device}, and another tensor is on {tensor.device}; move one of them"
            )


def quantize_(values: Tensor, num_bits: int, block_numel: int, codes: Tensor, scales: Tensor) -> None:
    _check([codes], [scales], [values], values.numel(), num_bits, block_numel)
    _kernels(values).quantize_(values, num_bits, block_numel, codes, scales)


def dequantize_(codes: Tensor, scales: Tensor, num_bits: int, block_numel: int, values: Tensor) -> None:
    _check([codes], [scales], [values], values.numel(), num_bits, block_numel)
    _kernels(values).dequantize_(codes, scales, num_bits, block_numel, values)


def dequantize_sum_(
    codes: Sequence[Tensor], scales: Sequence[Tensor], num_bits: int, block_numel: int, factor: float, values: Tensor
) -> None:
    if values.dtype != torch.float32:
        raise ValueError(f"a sum is torch.float32, not {values.dtype}; pass a float32 tensor for it")
    _check(codes, scales, [values], values.numel(), num_bits, block_numel)
    _kernels(values).dequantize_sum_(codes, scales, num_bits, block_numel, factor, values)


def dequantize_sum_quantize_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    num_bits: int,
    block_numel: int,
    out_block_numel: int,
    numel: int,
    factor: float,
    out_codes: Tensor,
    out_scales: Tensor,
) -> None:
    if out_block_numel not in (block_numel, 2 * block_numel):
        raise ValueError(
            f"out_block_numel={out_block_numel} is not supported for blocks of {block_numel}; choose {block_numel} or "
            f"{2 * block_numel}"
        )
    _check(codes, scales, [], numel, num_bits, block_numel)
    _check([out_codes], [out_scales], [], numel, num_bits, out_block_numel)
    if out_codes.device != codes[0].device:
        raise ValueError(f"codes are on {codes[0].device}, and their sum is on {out_codes.device}; move one of them")
    _kernels(out_codes).dequantize_sum_quantize_(
        codes, scales, num_bits, block_numel, out_block_numel, numel, factor, out_codes, out_scales
    )

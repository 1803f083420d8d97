"""The computations of `block_codec` as torch operators. They are `torch.ops.lohan.quantize_blocks.out`,
`dequantize_blocks.out`, `dequantize_sum.out`, and `dequantize_sum_quantize.out` for a sum that is sent to other ranks.
Its blocks have as many values, or twice as many.

They write to the caller's tensors and have no derivative. `torch_codec` computes them. On CUDA `triton_codec` computes
them if Triton is installed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import cache, partial
from importlib import import_module
from types import ModuleType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_lohan.ranks.collectives import torch_codec
from hf_lohan.ranks.collectives.torch_codec import HIGHEST_CODE

logger = logging.getLogger(__name__)

_Computation: TypeAlias = Callable[[], None]

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


# Each function checks the arguments of an operator, and returns the computation. For fake tensors only the checks run.


def _quantize(values: Tensor, num_bits: int, block_numel: int, *, codes: Tensor, scales: Tensor) -> _Computation:
    _check([codes], [scales], [values], values.numel(), num_bits, block_numel)
    return lambda: _kernels(values).quantize_(values.detach(), num_bits, block_numel, codes, scales)


def _dequantize(codes: Tensor, scales: Tensor, num_bits: int, block_numel: int, *, values: Tensor) -> _Computation:
    _check([codes], [scales], [values], values.numel(), num_bits, block_numel)
    return lambda: _kernels(values).dequantize_(codes, scales, num_bits, block_numel, values)


def _sum(
    codes: Sequence[Tensor], scales: Sequence[Tensor], num_bits: int, block_numel: int, factor: float, *, values: Tensor
) -> _Computation:
    if values.dtype != torch.float32:
        raise ValueError(f"a sum is torch.float32, not {values.dtype}; pass a float32 tensor for it")
    _check(codes, scales, [values], values.numel(), num_bits, block_numel)
    return lambda: _kernels(values).dequantize_sum_(codes, scales, num_bits, block_numel, factor, values)


def _sum_quantize(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    num_bits: int,
    block_numel: int,
    numel: int,
    factor: float,
    out_block_numel: int | None = None,
    *,
    out_codes: Tensor,
    out_scales: Tensor,
) -> _Computation:
    if not codes:
        raise ValueError("got no tensors to sum; pass codes and scales of at least one rank")
    if out_block_numel in (None, block_numel):
        _check([*codes, out_codes], [*scales, out_scales], [], numel, num_bits, block_numel)
    elif out_block_numel != 2 * block_numel:
        raise ValueError(
            f"out_block_numel={out_block_numel} is not supported for blocks of {block_numel}; choose {block_numel} or "
            f"{2 * block_numel}"
        )
    else:
        _check(codes, scales, [], numel, num_bits, block_numel)
        _check([out_codes], [out_scales], [], numel, num_bits, out_block_numel)
    blocks = block_numel, out_block_numel or block_numel
    return lambda: _kernels(out_codes).dequantize_sum_quantize_(
        codes, scales, num_bits, *blocks, numel, factor, out_codes, out_scales
    )


_FORMAT = "int num_bits, int block_numel"
_ALL = f"Tensor[] codes, Tensor[] scales, {_FORMAT}"
_ONE = f"Tensor codes, Tensor scales, {_FORMAT}"
_OPERATORS: dict[str, Callable[..., _Computation]] = {
    f"quantize_blocks.out(Tensor values, {_FORMAT}, *, Tensor(a!) codes, Tensor(b!) scales) -> ()": _quantize,
    f"dequantize_blocks.out({_ONE}, *, Tensor(a!) values) -> ()": _dequantize,
    f"dequantize_sum.out({_ALL}, float factor, *, Tensor(a!) values) -> ()": _sum,
    f"dequantize_sum_quantize.out({_ALL}, int numel, float factor, int? out_block_numel=None, *, "
    "Tensor(a!) out_codes, Tensor(b!) out_scales) -> ()": _sum_quantize,
}


def _compute(prepare: Callable[..., _Computation], *arguments: Any, **outs: Tensor) -> None:
    prepare(*arguments, **outs)()


def _only_check(prepare: Callable[..., _Computation], *arguments: Any, **outs: Tensor) -> None:
    prepare(*arguments, **outs)


_library = torch.library.Library("lohan", "FRAGMENT")
for _schema, _prepare in _OPERATORS.items():
    _library.define(_schema)
    _name = _schema.partition("(")[0]
    _library.impl(_name, partial(_compute, _prepare), "CompositeExplicitAutograd")
    torch.library.register_fake(f"lohan::{_name}", partial(_only_check, _prepare), lib=_library)

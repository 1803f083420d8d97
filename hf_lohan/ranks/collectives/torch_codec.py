"""The computations of `block_operators` in torch, for any device. `triton_codec` computes the same bits.

`block_codec` describes the format. All tensors are flat and their sizes fit together. All operations are float32, each
rounded separately.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

HIGHEST_CODE = {8: 127, 4: 7}
"""The highest code, by the number of bits. The lowest code is its negative."""
_TILE_NUMEL = 64 * 1024
"""Size of intermediate tensors, chosen so that they stay in a core's cache."""


def quantize_(values: Tensor, num_bits: int, block_numel: int, codes: Tensor, scales: Tensor) -> None:
    """Write the codes and scales of ``values``."""
    work, magnitudes = _scratch(values, values.numel(), block_numel), _scratch(values, values.numel(), block_numel)
    for start, stop in _tiles(values, values.numel()):
        blocks = _blocks_of(work, stop - start, block_numel)
        blocks.view(-1)[: stop - start].copy_(values[start:stop])
        blocks.view(-1)[stop - start :].zero_()
        _encode_(blocks, magnitudes, start, num_bits, codes, scales)


def dequantize_(codes: Tensor, scales: Tensor, num_bits: int, block_numel: int, values: Tensor) -> None:
    """Write the values of codes."""
    work, upper = _scratch(values, values.numel(), block_numel), _scratch(values, values.numel(), block_numel)
    for start, stop in _tiles(values, values.numel()):
        blocks = _blocks_of(work, stop - start, block_numel)
        _decode_(codes, scales, start, num_bits, blocks, upper)
        values[start:stop].copy_(blocks.view(-1)[: stop - start])


def dequantize_sum_(
    codes: Sequence[Tensor], scales: Sequence[Tensor], num_bits: int, block_numel: int, factor: float, values: Tensor
) -> None:
    """Write the sum of the values of all codes, each multiplied by ``factor`` first, in the order of the codes."""
    total, part, upper = (_scratch(values, values.numel(), block_numel) for _ in range(3))
    for start, stop in _tiles(values, values.numel()):
        blocks = _blocks_of(total, stop - start, block_numel)
        _sum_(codes, scales, start, num_bits, factor, blocks, part, upper)
        values[start:stop].copy_(blocks.view(-1)[: stop - start])


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
    """Write the codes and scales of the sum that `dequantize_sum_` computes. It has ``numel`` values."""
    total, part, upper = (_scratch(out_codes, numel, out_block_numel) for _ in range(3))
    for start, stop in _tiles(out_codes, numel):
        blocks = _blocks_of(total, stop - start, block_numel)
        _sum_(codes, scales, start, num_bits, factor, blocks, part, upper)
        out_blocks = _blocks_of(total, stop - start, out_block_numel)
        out_blocks.view(-1)[blocks.numel() :].zero_()
        _encode_(out_blocks, part, start, num_bits, out_codes, out_scales)


def _sum_(
    codes: Sequence[Tensor],
    scales: Sequence[Tensor],
    start: int,
    num_bits: int,
    factor: float,
    total: Tensor,
    part: Tensor,
    upper: Tensor,
) -> None:
    _decode_(codes[0], scales[0], start, num_bits, total, upper)
    total.mul_(factor)
    addend = part[: total.numel()].view_as(total)
    for some_codes, their_scales in zip(codes[1:], scales[1:], strict=True):
        _decode_(some_codes, their_scales, start, num_bits, addend, upper)
        total.add_(addend.mul_(factor))


def _encode_(blocks: Tensor, scratch: Tensor, start: int, num_bits: int, codes: Tensor, scales: Tensor) -> None:
    """Write codes and scales of ``blocks`` [num_blocks, block_numel] float32, which begin at element ``start``.
    Overwrites ``blocks``."""
    highest, (num_blocks, block_numel) = HIGHEST_CODE[num_bits], blocks.shape
    largest = torch.abs(blocks, out=scratch[: blocks.numel()].view_as(blocks)).amax(1)
    first = start // block_numel
    stored = scales[first : first + num_blocks]
    # Infinity minus itself is NaN, and a finite number minus itself is 0.
    stored.copy_((largest / highest).add_(largest - largest))
    stored.masked_fill_(stored == 0, 1)
    levels = blocks.div_(stored.to(torch.float32, copy=False)[:, None]).round_().clamp_(-highest, highest)
    levels.nan_to_num_(nan=0.0)
    if num_bits == 4:
        half = block_numel // 2
        levels = levels[:, :half].add_(levels[:, half:], alpha=16).add_(8)
    part = slice(start * num_bits // 8, start * num_bits // 8 + levels.numel())
    codes[part].view_as(levels).copy_(levels)


def _decode_(codes: Tensor, scales: Tensor, start: int, num_bits: int, blocks: Tensor, scratch: Tensor) -> None:
    """Fill ``blocks`` [num_blocks, block_numel] float32 with the values from element ``start`` on."""
    num_blocks, block_numel = blocks.shape
    first = start // block_numel
    row = block_numel * num_bits // 8
    packed = codes[first * row : (first + num_blocks) * row].view(num_blocks, row)
    if num_bits == 4:
        lower, upper = blocks[:, :row], blocks[:, row:]
        both = scratch[: packed.numel()].view_as(packed).copy_(packed)
        torch.mul(both, 1 / 16, out=upper).floor_()
        torch.sub(both, upper, alpha=16, out=lower).sub_(8)
    else:
        blocks.copy_(packed)
    blocks.mul_(scales[first : first + num_blocks, None])


def _tiles(like: Tensor, numel: int) -> Iterator[tuple[int, int]]:
    """Yield the range of each tile. On a GPU this is one range."""
    step = _TILE_NUMEL if like.device.type == "cpu" else max(numel, 1)
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def _scratch(like: Tensor, numel: int, block_numel: int) -> Tensor:
    if like.device.type == "cpu":
        numel = min(numel, _TILE_NUMEL)
    return like.new_empty(-(-numel // block_numel) * block_numel, dtype=torch.float32)


def _blocks_of(work: Tensor, numel: int, block_numel: int) -> Tensor:
    """Return the blocks of the first ``numel`` elements of ``work``, with the padding of the last block."""
    return work[: -(-numel // block_numel) * block_numel].view(-1, block_numel)

"""Sums of payloads of `BlockCodec`, by the functions that ranks call."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hf_lohan.ranks import BlockCodec
from hf_lohan.ranks.collectives.block_operators import dequantize_sum_, dequantize_sum_quantize_


def split(codec: BlockCodec, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of a payload."""
    stop = codec.codes_bytes(numel)
    return message[:stop].view(torch.int8), message[stop:].view(codec.scale_dtype)


def split_all(codec: BlockCodec, messages: Sequence[Tensor], numel: int) -> tuple[list[Tensor], list[Tensor]]:
    parts = [split(codec, message, numel) for message in messages]
    return [codes for codes, _ in parts], [scales for _, scales in parts]


def decode_sum_(codec: BlockCodec, messages: Sequence[Tensor], out: Tensor, factor: float = 1.0) -> None:
    parts = split_all(codec, messages, out.numel())
    dequantize_sum_(*parts, codec.num_bits, codec.block_numel, factor, out.detach())


def decode_sum_encode(
    codec: BlockCodec, messages: Sequence[Tensor], out: Tensor, numel: int, factor: float = 1.0
) -> None:
    codes, scales = split(codec, out, numel)
    parts, form = split_all(codec, messages, numel), (codec.num_bits, codec.block_numel, codec.block_numel)
    dequantize_sum_quantize_(*parts, *form, numel, factor, codes, scales)


def errors_of(codec: BlockCodec, values: Tensor) -> tuple[float, float]:
    """Return the root mean square of errors over that of the values, and the fraction of values that decode to 0."""
    message = torch.empty(codec.message_bytes(values.numel()), dtype=torch.uint8)
    decoded = torch.empty(values.numel())
    codec.encode(values, message)
    codec.decode(message, decoded)
    flushed = ((values != 0) & (decoded == 0)).sum() / values.count_nonzero()
    return float((decoded - values).norm() / values.norm()), float(flushed)

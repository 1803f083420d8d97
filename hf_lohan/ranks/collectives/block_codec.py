"""Quantizes values to 8 or 4 bits in blocks, for slow links between nodes. It is lossy, so it is never a default.

A block is ``block_numel`` neighbouring values that share a scale. The scale is absmax / 127 (8 bits) or absmax / 7 (4
bits), rounded to the scales' type. A code is value / scale, rounded half to even. A block of zeros has the scale 1. A
block with a value that is not finite has the scale NaN and decodes to NaN, so that the step is skipped.

Codes are int8. With 4 bits, a byte contains a code of each half of the block, as 16 * second + first + 8. (Halves are
contiguous vectors, and pairs of neighbours are not.) The last block is padded with zeros. A *payload* has the codes of
all blocks and then their scales, in one buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.costs.collectives import GRADIENT_FORMATS, GRADIENT_FORMATS_WITHIN, WEIGHT_FORMAT, CodecFormat
from hf_lohan.ranks.collectives.block_operators import (
    check_format,
    codes_numel,
    dequantize_,
    num_blocks_of,
    quantize_,
)


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Encodes values [numel] of float32, bfloat16 or float16 to a payload, uint8 [message_bytes], and decodes them.
    Inputs are not changed, and must not share memory with outputs. A payload has the alignment of its scales."""

    num_bits: int = 8
    block_numel: int = 64
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_format(self.num_bits, self.block_numel, self.scale_dtype)

    def message_bytes(self, numel: int) -> int:
        """Return the bytes of the payload of ``numel`` values."""
        return self.codes_bytes(numel) + self.scales_bytes(numel)

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the payload of ``values`` to ``out``."""
        codes, scales = self._parts(out, values.numel())
        quantize_(values.detach(), self.num_bits, self.block_numel, codes, scales)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write the values of a payload to ``out``, whose size is the number of values."""
        codes, scales = self._parts(message, out.numel())
        dequantize_(codes, scales, self.num_bits, self.block_numel, out.detach())

    def codes_bytes(self, numel: int) -> int:
        """Return the bytes of the codes in the payload of ``numel`` values. The scales follow."""
        return codes_numel(numel, self.num_bits, self.block_numel)

    def scales_bytes(self, numel: int) -> int:
        """Return the bytes of the scales in the payload of ``numel`` values."""
        return num_blocks_of(numel, self.block_numel) * self.scale_dtype.itemsize

    def decoded_tiles(self, message: Tensor, numel: int, tile_numel: int) -> Iterator[tuple[int, Tensor]]:
        """Decode a payload in parts of ``tile_numel`` elements, which are whole blocks. Yields (first element, float32
        values) of each part. All parts use the same memory."""
        codes, scales = self._parts(message, numel)
        bits, block = self.num_bits, self.block_numel
        scratch = torch.empty(min(tile_numel, numel), dtype=torch.float32, device=codes.device)
        for start in range(0, numel, tile_numel):
            values = scratch[: min(tile_numel, numel - start)]
            low, high = start * bits // 8, start * bits // 8 + codes_numel(values.numel(), bits, block)
            some = scales[start // block : start // block + num_blocks_of(values.numel(), block)]
            dequantize_(codes[low:high], some, bits, block, values)
            yield start, values

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        num_bytes = self.message_bytes(numel)
        if message.dtype != torch.uint8 or message.shape != (num_bytes,) or not message.is_contiguous():
            raise ValueError(
                f"a payload of {numel} values is contiguous torch.uint8 [{num_bytes}], not {message.dtype} "
                f"{list(message.shape)}; allocate message_bytes({numel})"
            )
        if past := message.data_ptr() % self.scale_dtype.itemsize:
            raise ValueError(
                f"a payload begins {past} bytes past a multiple of {self.scale_dtype.itemsize}; align it to this "
                f"multiple, because its scales are {self.scale_dtype}"
            )
        code_bytes = codes_numel(numel, self.num_bits, self.block_numel)
        return message[:code_bytes].view(torch.int8), message[code_bytes:].view(self.scale_dtype)


def _codec_of(sizes: CodecFormat) -> BlockCodec:
    scale_dtype = {2: torch.bfloat16, 4: torch.float32}[sizes.scale_bytes]
    return BlockCodec(sizes.num_bits, sizes.block_numel, scale_dtype)


GRADIENTS_INT8 = _codec_of(GRADIENT_FORMATS["int8"])
GRADIENTS_INT4 = _codec_of(GRADIENT_FORMATS["int4"])
"""Loses 15% (rms) of gradients. Blocks of 4096 instead of 64 would lose 38%."""
GRADIENTS_WITHIN = {name: _codec_of(sizes) for name, sizes in GRADIENT_FORMATS_WITHIN.items()}
"""Codecs of gradients within a node, by the value of the setting."""
WEIGHTS_INT8 = _codec_of(WEIGHT_FORMAT)

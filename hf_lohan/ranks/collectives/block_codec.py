"""Numbers in 8 or 4 bits, block by block, for what ranks send each other over a slow link. It is lossy, so never a
default.

A block is ``block_numel`` neighbours that share a scale. The scale is absmax / 127 (8 bits) or absmax / 7 (4 bits),
rounded to the type that scales have. A code is value / scale, rounded half to even; the largest value of either sign
comes back. A block of zeros has scale 1. A block with a number that is not finite has scale NaN, and all of it comes
back as NaN: the step is skipped then, where zeros would pass for gradients.

Codes are int8. Of 4 bits, the first half of a block shares bytes with the second one: 16 * second + first + 8. (Halves,
not neighbours, are whole vectors.) A last block that is not full is filled up with zeros. A *message* is the codes of
all blocks, then their scales, in one buffer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.ranks.collectives.block_operators import check_format, codes_numel, num_blocks_of


@dataclass(frozen=True, slots=True)
class CodingError:
    """What a codec does to some values."""

    relative_rms: float
    """Root mean square of what the values are off, over that of the values."""
    flushed_fraction: float
    """Of the values that are not zero, those that come back as zero."""


@dataclass(frozen=True, slots=True)
class BlockCodec:
    """Values [numel] of float32, bfloat16 or float16 to a message, uint8 [message_bytes], and back.

    Values are left as they are, and never share memory with what is written. A message begins where a scale could.
    """

    num_bits: int = 8
    block_numel: int = 64
    scale_dtype: torch.dtype = torch.bfloat16

    def __post_init__(self) -> None:
        check_format(self.num_bits, self.block_numel, self.scale_dtype)

    def message_bytes(self, numel: int) -> int:
        """What so many values become."""
        scales_bytes = num_blocks_of(numel, self.block_numel) * self.scale_dtype.itemsize
        return codes_numel(numel, self.num_bits, self.block_numel) + scales_bytes

    def encode(self, values: Tensor, out: Tensor) -> None:
        """Write the message of ``values`` to ``out``."""
        codes, scales = self._parts(out, values.numel())
        values = values.detach()
        torch.ops.lohan.quantize_blocks.out(values, self.num_bits, self.block_numel, codes=codes, scales=scales)

    def decode(self, message: Tensor, out: Tensor) -> None:
        """Write to ``out`` what a message brings. Its size says how many values that is."""
        codes, scales = self._parts(message, out.numel())
        torch.ops.lohan.dequantize_blocks.out(codes, scales, self.num_bits, self.block_numel, values=out.detach())

    def decode_sum_(self, messages: Sequence[Tensor], out: Tensor, scale: float = 1.0) -> None:
        """Write to ``out``, float32, the sum of what messages bring: in their order, each times ``scale`` before it is
        added."""
        codes, scales = self._parts_of_all(messages, out.numel())
        torch.ops.lohan.dequantize_sum.out(codes, scales, self.num_bits, self.block_numel, scale, values=out.detach())

    def decode_sum_encode(self, messages: Sequence[Tensor], out: Tensor, numel: int, scale: float = 1.0) -> None:
        """Write to ``out`` the message of such a sum of ``numel`` values: in one pass, with no float32 sum outside."""
        codes, scales = self._parts_of_all(messages, numel)
        out_codes, out_scales = self._parts(out, numel)
        torch.ops.lohan.dequantize_sum_quantize.out(
            codes, scales, self.num_bits, self.block_numel, numel, scale, out_codes=out_codes, out_scales=out_scales
        )

    def measured_error(self, values: Tensor) -> CodingError:
        """What becomes of these values."""
        message = torch.empty(self.message_bytes(values.numel()), dtype=torch.uint8, device=values.device)
        found = torch.empty(values.numel(), dtype=torch.float32, device=values.device)
        self.encode(values, message)
        self.decode(message, found)
        exact = values.detach().double()
        num_values = int(exact.count_nonzero())
        if num_values == 0:
            return CodingError(0.0, 0.0)
        relative = (found - exact).square().sum().div(exact.square().sum()).sqrt()
        num_flushed = int(((exact != 0) & (found == 0)).sum())
        return CodingError(float(relative), num_flushed / num_values)

    def _parts_of_all(self, messages: Sequence[Tensor], numel: int) -> tuple[list[Tensor], list[Tensor]]:
        parts = [self._parts(message, numel) for message in messages]
        return [codes for codes, _ in parts], [scales for _, scales in parts]

    def _parts(self, message: Tensor, numel: int) -> tuple[Tensor, Tensor]:
        """A message's codes and scales."""
        num_bytes = self.message_bytes(numel)
        if message.dtype != torch.uint8 or message.shape != (num_bytes,) or not message.is_contiguous():
            raise ValueError(
                f"a message of {numel} values is torch.uint8 [{num_bytes}] in one piece, not {message.dtype} "
                f"{list(message.shape)}; give it message_bytes({numel})"
            )
        if past := message.data_ptr() % self.scale_dtype.itemsize:
            raise ValueError(
                f"a message begins {past} bytes past a multiple of {self.scale_dtype.itemsize}: its scales, of "
                f"{self.scale_dtype}, cannot be read there; let it begin at a multiple"
            )
        code_bytes = codes_numel(numel, self.num_bits, self.block_numel)
        return message[:code_bytes].view(torch.int8), message[code_bytes:].view(self.scale_dtype)


GRADIENTS_INT8 = BlockCodec(8, 64, torch.bfloat16)
GRADIENTS_INT4 = BlockCodec(4, 64, torch.bfloat16)
WEIGHTS_INT8 = BlockCodec(8, 256, torch.float32)
"""What is used. Of gradients, 4 bits lose 15% (rms) in blocks of 64 and 38% in blocks of 4096."""

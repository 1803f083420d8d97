"""How the float32 master of a weight is stored beside the weight that the model computes with.

float32 working weights *are* the master. For bfloat16 working weights the master is split, bit for bit: the upper 16
bits, rounded half up, are the working weight, and what the rounding took or gave is a signed 16-bit residual. So no
second copy is stored: 12 bytes a parameter with both moments, where a float32 master beside it would make it 14.
(Half up, not half to even: only then is the residual always in [-32768, 32767].)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

_HALF = 0x8000
_LOW_BITS = 16
_SEQUENTIAL_NUMEL = 1024


@dataclass(frozen=True, slots=True)
class MasterFormat:
    """Which records hold a trainable weight's master, and what passes through host buffers to update it."""

    working_dtype: torch.dtype
    has_residual: bool

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Record kinds beside `param` that every trainable block has."""
        return ("master_residual", "exp_avg", "exp_avg_sq") if self.has_residual else ("exp_avg", "exp_avg_sq")

    @property
    def num_state_buffers_per_chunk(self) -> int:
        """Host buffers one chunk's update needs: weight (with residual), moments; split masters: master and scratch."""
        return 5 if self.has_residual else 3

    def state_dtype(self, kind: str) -> torch.dtype:
        """Element type of a record kind in the store."""
        return {"param": self.working_dtype, "master_residual": torch.int16}.get(kind, torch.float32)


def master_format(working_dtype: torch.dtype) -> MasterFormat:
    """The format for a working dtype. Raises ValueError for one that has no exact master (float16)."""
    match working_dtype:
        case torch.float32:
            return MasterFormat(working_dtype, has_residual=False)
        case torch.bfloat16:
            return MasterFormat(working_dtype, has_residual=True)
        case _:
            raise ValueError(
                f"working weights of {working_dtype} cannot be trained under offload; load the model with "
                "dtype=torch.float32 or torch.bfloat16, or pass bf16=True"
            )


@torch.no_grad()
def encode_master_(master: Tensor, working: Tensor, residual: Tensor, scratch: Tensor) -> None:
    """Split a float32 master [numel] into bfloat16 `working` and int16 `residual`; `scratch` is int32 [numel].

    A NaN whose payload is all ones would round over into a zero; hardware makes no such NaN.
    """
    bits = master.view(torch.int32)
    torch.add(bits, _HALF, out=scratch)
    scratch.bitwise_right_shift_(_LOW_BITS)
    working.view(torch.int16).copy_(scratch)
    scratch.bitwise_left_shift_(_LOW_BITS)
    torch.sub(bits, scratch, out=scratch)
    residual.copy_(scratch)


@torch.no_grad()
def decode_master_(master: Tensor, working: Tensor, residual: Tensor) -> None:
    """Join bfloat16 `working` and int16 `residual` [numel] into the float32 master they came from."""
    bits = master.view(torch.int32)
    bits.copy_(working.view(torch.int16))
    bits.bitwise_left_shift_(_LOW_BITS)
    bits.add_(residual)


@torch.no_grad()
def widen_in_place(buffer: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """Turn `numel` 2-byte elements in the second half of a buffer of 4*numel bytes into float32 over all of it.

    Each round converts the front half of what is left: those reads lie behind all writes of the round, so no copy is
    needed, and log2(numel) rounds do it. Returns the float32 view [numel].
    """
    wide = buffer[: 4 * numel].view(torch.float32)
    narrow = buffer[2 * numel : 4 * numel].view(dtype)
    start = 0
    while numel - start > _SEQUENTIAL_NUMEL:
        stop = start + (numel - start) // 2
        wide[start:stop].copy_(narrow[start:stop])
        start = stop
    wide[start:].copy_(narrow[start:].clone())
    return wide

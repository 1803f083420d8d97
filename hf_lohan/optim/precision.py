"""How the float32 master of a weight is stored beside the weight that the model computes with.

float32 working weights *are* the master. For bfloat16 working weights the master is split, bit for bit: the upper 16
bits, rounded half up, are the working weight, and what the rounding took or gave is a signed 16-bit residual. So no
second copy is stored: 12 bytes a parameter with both moments, where a float32 master beside it would make it 14.
(Half up, not half to even: only then is the residual always in [-32768, 32767].)

A `MasterFormat` says this of a run's weights, and of what their optimizer keeps of them: float32, or what `moments`
makes of AdamW's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.optim.moments import SCALE_BLOCK_NUMEL, MomentCodec, MomentDtype, moment_codec
from hf_lohan.optim.rules import ADAMW, UpdateRule

_HALF = 0x8000
_LOW_BITS = 16
_SEQUENTIAL_NUMEL = 1024


@dataclass(frozen=True, slots=True)
class MasterFormat:
    """Which records hold a trainable weight's master and moments, and what passes through host buffers to update it."""

    working_dtype: torch.dtype
    has_residual: bool
    moment_dtype: MomentDtype = "float32"
    rule: UpdateRule = ADAMW
    """What updates it, and which moments that has."""

    @property
    def moment_codec(self) -> MomentCodec | None:
        """Brings the moments to float32 and back, where they are not stored so."""
        return moment_codec(self.moment_dtype)

    @property
    def moment_kinds(self) -> tuple[str, ...]:
        """Record kinds that hold moments."""
        codec = self.moment_codec
        return tuple(codec.dtypes) if codec is not None else self.rule.state_kinds

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Record kinds beside `param` that every trainable block has."""
        return ("master_residual", *self.moment_kinds) if self.has_residual else self.moment_kinds

    @property
    def buffer_kinds(self) -> tuple[tuple[str, ...], ...]:
        """Record kinds that lie in a buffer of a chunk together, one behind the other: 4 bytes an element or less."""
        weight = ("param", "master_residual") if self.has_residual else ("param",)
        moments = self.moment_kinds
        return (weight, moments) if self.moment_codec is not None else (weight, *((kind,) for kind in moments))

    @property
    def num_private_buffers(self) -> int:
        """Buffers of a chunk for what is not stored: a split master and scratch for it, or a workspace for tiles."""
        if self.moment_codec is not None:
            return 1
        return 2 if self.has_residual else 0

    @property
    def num_state_buffers_per_chunk(self) -> int:
        """Host buffers that one chunk's update needs."""
        return len(self.buffer_kinds) + self.num_private_buffers

    def state_dtype(self, kind: str) -> torch.dtype:
        """Element type of a record kind in the store."""
        codec = self.moment_codec
        if codec is not None and kind in codec.dtypes:
            return codec.dtypes[kind]
        return {"param": self.working_dtype, "master_residual": torch.int16}.get(kind, torch.float32)

    def params_per_element(self, kind: str) -> int:
        """With how many parameters an element of a record kind goes."""
        codec = self.moment_codec
        return codec.params_per_element.get(kind, 1) if codec is not None else 1

    def elements(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        """The elements [start, stop) of a record kind that go with parameters [start, stop), which begin at a scale
        block; where they end in one, its scales are among them."""
        ratio = self.params_per_element(kind)
        if ratio == 1:
            return start, stop
        assert start % SCALE_BLOCK_NUMEL == 0, f"parameter {start} begins no scale block"
        return start // ratio, -(-stop // SCALE_BLOCK_NUMEL) * SCALE_BLOCK_NUMEL // ratio

    def numel(self, kind: str, num_params: int) -> int:
        """Elements of a record kind that go with so many parameters, from a scale block's first on."""
        return self.elements(kind, 0, num_params)[1]

    @property
    def state_bytes_per_param(self) -> float:
        """Of all records beside `param`."""
        return sum(self.state_bytes(kind) for kind in self.state_kinds)

    def state_bytes(self, kind: str) -> float:
        """Of a record kind, for each parameter."""
        return self.state_dtype(kind).itemsize / self.params_per_element(kind)

    @property
    def align_numel(self) -> int:
        """The records of a block's trainable parameters have to end at a multiple of so many of these."""
        codec = self.moment_codec
        return codec.align_numel if codec is not None else 1


def master_format(
    working_dtype: torch.dtype, moment_dtype: MomentDtype = "float32", rule: UpdateRule = ADAMW
) -> MasterFormat:
    """The format for a working dtype, and for moments of `rule` stored as `moment_dtype`. Raises ValueError for a
    working dtype that has no exact master (float16), and for moments that only AdamW's can be stored as."""
    if moment_dtype != "float32" and rule != ADAMW:
        raise ValueError(
            f"optimizer_state_dtype={moment_dtype} is for the moments of AdamW, this run has {rule}; set it to float32"
        )
    match working_dtype:
        case torch.float32:
            return MasterFormat(working_dtype, False, moment_dtype, rule)
        case torch.bfloat16:
            return MasterFormat(working_dtype, True, moment_dtype, rule)
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

"""Formats of a weight's float32 master in the store, next to the working weight.

float32 working weights *are* the master. For bfloat16 working weights the master is split without loss. The working
weight is the master rounded half to even, as torch rounds, and the rounding error is a signed 16-bit residual. A
parameter with both moments takes 12 bytes instead of 14 with a separate float32 master. With `stochastic_rounding` a
bfloat16 weight has no master, and each update rounds it stochastically.

The error is in [-32768, 32768], and 16 bits cannot represent 32768. Only a *tie* that was rounded towards zero has this
error, which is one master in 131,072 if the low bits are random. Each run of `TIE_RUN_NUMEL` parameters has a tie code,
which is a residual that no other element of the run has. In `master_residual` the code stands for 32768. There is
always a free code, because a run has fewer elements than there are codes. The code `NO_TIES` means that the run has no
tie of this kind. So masters of any values can be split, even if every 16th is a tie, as in a float16 checkpoint.

A `MasterFormat` describes a run's weights and their optimizer states, which are float32 or encoded by `moments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lohan.optim.moments import MOMENT_CODECS, SCALE_BLOCK_NUMEL, STOCHASTIC, MomentCodec, MomentDtype
from hf_lohan.optim.rules import ADAMW, UpdateRule
from hf_lohan.wording import states_setting

TIE_CODES = "tie_codes"
"""Name of the tie codes (int16) beside the records of a bfloat16 block's masters."""
TIE_RUN_NUMEL = 16 * 1024
"""Number of parameters that share a tie code. The store's granules are multiples of it."""
NO_TIES = -0x8000
_LOW_BITS = 16
_NUM_TRIED_CODES = 8
_SEQUENTIAL_NUMEL = 1024


@dataclass(frozen=True, slots=True)
class MasterFormat:
    """The records of a trainable weight's master and moments, and the host buffers that an update needs."""

    working_dtype: torch.dtype
    has_residual: bool
    moment_dtype: MomentDtype = "float32"
    rule: UpdateRule = ADAMW
    """The update rule, which determines the moments."""

    @property
    def moment_codec(self) -> MomentCodec | None:
        """The codec of the moments, or None if they are stored in float32."""
        return MOMENT_CODECS[self.moment_dtype]

    @property
    def rounds_weights(self) -> bool:
        """Whether updates round the weights, which have no masters."""
        return self.moment_dtype == STOCHASTIC and self.working_dtype == torch.bfloat16

    @property
    def moment_kinds(self) -> tuple[str, ...]:
        """Record kinds with moments."""
        codec = self.moment_codec
        return tuple(codec.dtypes) if codec is not None else self.rule.state_kinds

    @property
    def state_kinds(self) -> tuple[str, ...]:
        """Record kinds of every trainable block besides `param`."""
        return ("master_residual", *self.moment_kinds) if self.has_residual else self.moment_kinds

    @property
    def buffer_kinds(self) -> tuple[tuple[str, ...], ...]:
        """Record kinds in each buffer of a chunk. The records of a buffer have at most 4 bytes per element together."""
        weight = ("param", "master_residual") if self.has_residual else ("param",)
        moments = self.moment_kinds
        return (weight, moments) if self.moment_codec is not None else (weight, *((kind,) for kind in moments))

    @property
    def num_private_buffers(self) -> int:
        """Number of scratch buffers of a chunk: for a joined master and its scratch, or for the workspace of tiles."""
        if self.moment_codec is not None:
            return 1
        return 2 if self.has_residual else 0

    @property
    def num_state_buffers_per_chunk(self) -> int:
        """Number of host buffers that one chunk's update needs."""
        return len(self.buffer_kinds) + self.num_private_buffers

    def state_dtype(self, kind: str) -> torch.dtype:
        """Return the element type of a record kind in the store."""
        codec = self.moment_codec
        if codec is not None and kind in codec.dtypes:
            return codec.dtypes[kind]
        return {"param": self.working_dtype, "master_residual": torch.int16}.get(kind, torch.float32)

    def params_per_element(self, kind: str) -> int:
        """Return the number of parameters per element of a record kind."""
        if kind == TIE_CODES:
            return TIE_RUN_NUMEL
        codec = self.moment_codec
        return codec.params_per_element.get(kind, 1) if codec is not None else 1

    def elements(self, kind: str, start: int, stop: int) -> tuple[int, int]:
        """Return the elements [start, stop) of a record kind for parameters [start, stop). ``start`` must be at a scale
        block. If ``stop`` is within a scale block, the block's scales are included."""
        ratio = self.params_per_element(kind)
        if ratio == 1:
            return start, stop
        if kind == TIE_CODES:
            return start // ratio, -(-stop // ratio)
        assert start % SCALE_BLOCK_NUMEL == 0, f"parameter {start} is not at the beginning of a scale block"
        return start // ratio, -(-stop // SCALE_BLOCK_NUMEL) * SCALE_BLOCK_NUMEL // ratio

    def numel(self, kind: str, num_params: int) -> int:
        """Return the number of elements of a record kind for ``num_params`` parameters that begin at a scale block."""
        return self.elements(kind, 0, num_params)[1]

    @property
    def state_bytes_per_param(self) -> float:
        """Bytes per parameter of all records besides `param`."""
        return sum(self.state_bytes(kind) for kind in self.state_kinds)

    def state_bytes(self, kind: str) -> float:
        """Return the bytes per parameter of a record kind."""
        return self.state_dtype(kind).itemsize / self.params_per_element(kind)

    @property
    def align_numel(self) -> int:
        """The number of a block's trainable parameters must be a multiple of this."""
        codec = self.moment_codec
        return codec.align_numel if codec is not None else 1


def master_format(
    working_dtype: torch.dtype,
    moment_dtype: MomentDtype = "float32",
    rule: UpdateRule = ADAMW,
    *,
    trained_name: str | None = "a weight",
) -> MasterFormat:
    """Return the format for a working dtype, with moments of `rule` stored as `moment_dtype`. Raises ValueError for a
    working dtype without an exact master (float16), and for a `moment_dtype` other than float32 if `rule` is not AdamW.
    ``trained_name``: the parameter's name for the error, or None for a frozen parameter, which may have any dtype."""
    if moment_dtype != "float32" and rule != ADAMW:
        raise ValueError(
            f"{states_setting(moment_dtype)} is only for AdamW, and this run has {rule}; leave the setting out"
        )
    match working_dtype:
        case torch.float32:
            return MasterFormat(working_dtype, False, moment_dtype, rule)
        case torch.bfloat16:
            return MasterFormat(working_dtype, moment_dtype != STOCHASTIC, moment_dtype, rule)
        case _ if trained_name is None:
            return MasterFormat(working_dtype, False, moment_dtype, rule)
        case _:
            raise ValueError(
                f"{trained_name} is {working_dtype}, which cannot be trained under offload; load the model with "
                "dtype=torch.float32 or torch.bfloat16, pass bf16=True, or freeze it"
            )


@torch.no_grad()
def encode_master_(master: Tensor, working: Tensor, residual: Tensor) -> Tensor:
    """Split a float32 master [numel] into bfloat16 `working` and int16 `residual`. Return the positions (int64) of the
    ties, which `close_ties_` needs. A NaN stays a NaN, but may lose its payload."""
    bits = master.view(torch.int32)
    working.copy_(master)
    residual.copy_(bits)  # keeps the low bits, which the working weight does not have
    # numpy compares integers ten times faster than torch.
    halfway = torch.from_numpy((residual.numpy() == NO_TIES).nonzero()[0])
    was_rounded_down = bits[halfway].bitwise_right_shift_(_LOW_BITS) == working.view(torch.int16)[halfway]
    return halfway[was_rounded_down]


@torch.no_grad()
def decode_master_(master: Tensor, working: Tensor, residual: Tensor, ties: Tensor) -> None:
    """Join bfloat16 `working` and int16 `residual` [numel] to their float32 master. `ties` are the positions that
    `open_ties_` returned."""
    bits = master.view(torch.int32)
    bits.copy_(working.view(torch.int16))
    torch.add(residual, bits, alpha=1 << _LOW_BITS, out=bits)
    if len(ties):
        bits[ties] += 1 << _LOW_BITS


@torch.no_grad()
def open_ties_(residual: Tensor, codes: Tensor) -> Tensor:
    """Return the positions (int64) of the ties in a `residual` [numel] that begins at a run, and set their residuals to
    `NO_TIES`. `codes` are the tie codes (int16) of its runs."""
    ties, residuals = [torch.empty(0, dtype=torch.int64)], residual.numpy()
    for run in (codes.numpy() != NO_TIES).nonzero()[0].tolist():
        of_run = residuals[run * TIE_RUN_NUMEL : (run + 1) * TIE_RUN_NUMEL]
        positions = (of_run == codes.numpy()[run]).nonzero()[0]
        of_run[positions] = NO_TIES
        positions += run * TIE_RUN_NUMEL
        ties.append(torch.from_numpy(positions))
    return torch.cat(ties)


@torch.no_grad()
def close_ties_(residual: Tensor, ties: Tensor, codes: Tensor) -> None:
    """Choose a tie code for each run of a `residual` [numel], which begins at a run, and write the code to the ties of
    the run. `ties` are the positions of all ties. Replaces all `codes`."""
    codes.fill_(NO_TIES)
    runs, residuals = ties.numpy() // TIE_RUN_NUMEL, residual.numpy()
    for run in dict.fromkeys(runs.tolist()):
        codes.numpy()[run] = _unused_code(residuals[run * TIE_RUN_NUMEL : (run + 1) * TIE_RUN_NUMEL])
    residuals[ties.numpy()] = codes.numpy()[runs]


def _unused_code(residuals: Any) -> int:
    """Return an int16 that is not in the array `residuals` (int16), in which at least one element is `NO_TIES`."""
    for code in range(-NO_TIES - 1, -NO_TIES - 1 - _NUM_TRIED_CODES, -1):
        if not (residuals == code).any():
            return code
    num_uses = torch.bincount(torch.from_numpy(residuals).to(torch.int64) - NO_TIES, minlength=1 << _LOW_BITS)
    return int(num_uses.argmin()) + NO_TIES


@torch.no_grad()
def widen_in_place(buffer: Tensor, dtype: torch.dtype, numel: int) -> Tensor:
    """Convert `numel` 2-byte elements to float32, and return the float32 view [numel]. The elements are the second half
    of a buffer of 4 * numel bytes, and the view is the whole buffer.

    Each round converts the first half of the remaining elements. These lie after the bytes that the round writes, so no
    copy is needed. There are log2(numel) rounds.
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

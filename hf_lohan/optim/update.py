"""An optimizer's step on the records of some parameters. It updates records directly, or joins a master and splits it
again, or converts records to float32 tile by tile, as their format needs.

A step with a gradient of zeros also changes records, because moments and weights decay and momentum moves the weights.
It needs no memory for the gradient, and it is elementwise, so it may run later with the same bits. Several missed steps
run on a tile while the tile is in a core's cache.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from zlib import crc32

import torch
from torch import Tensor

from hf_lohan.optim import rounding_noise
from hf_lohan.optim.adamw import AdamWGroup, Segment, adamw_, within
from hf_lohan.optim.moments import NUM_SCRATCH, SCALE_BLOCK_NUMEL, RoundedSpan, round_to_bfloat16_
from hf_lohan.optim.precision import (
    TIE_CODES,
    MasterFormat,
    close_ties_,
    decode_master_,
    encode_master_,
    open_ties_,
)
from hf_lohan.optim.rounding_noise import MAX_RUN_NUMEL
from hf_lohan.optim.rules import Aside, here

MAX_TILE_NUMEL = MAX_RUN_NUMEL
"""Maximum elements of a tile. Its float32 tensors just fit a core's cache, and dozens of calls take little time."""
_NUM_ROWS = 4 + NUM_SCRATCH
"""Number of a tile's float32 tensors, which are master, moments, gradient and scratch."""
MIN_WORKSPACE_BYTES = 4 * _NUM_ROWS * SCALE_BLOCK_NUMEL


@torch.no_grad()
def update_records_(
    records: Mapping[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    form: MasterFormat,
    *,
    position: int,
    private: Sequence[Tensor],
    scale: float = 1.0,
    aside: Aside = here,
) -> None:
    """Update ``records``, which have kinds and dtypes of ``form``, in place with ``gradient`` [numel], multiplied in
    float32 by ``scale``. A float32 gradient is scaled in place. A bfloat16 gradient, which only bfloat16 weights have,
    is widened in scratch memory. ``position`` is the offset of the first parameter in its block's records. If masters
    have residuals, the chunk begins at a run, and ``records`` also has tie codes.

    ``private`` has `MasterFormat.num_private_buffers` uint8 tensors of at least 4 * numel bytes (and at least
    `MIN_WORKSPACE_BYTES` for moments other than float32), aligned to 4 bytes. `UpdateRule.update_` describes ``aside``.
    """
    assert gradient.dtype in (torch.float32, form.working_dtype), "there is no memory to widen the gradient"
    if gradient.dtype == torch.float32 and scale != 1.0:  # a scale of NaN is applied as well, as in torch
        gradient.mul_(scale)
    if form.moment_codec is not None:
        adamw_in_tiles_(records, gradient, segments, form, position=position, scale=scale, workspace=private[0])
    elif form.has_residual:
        num_bytes = 4 * gradient.numel()
        master = private[0][:num_bytes].view(torch.float32)
        join_master_(master, records)
        gradient = _in_float32(gradient, scale, private[1][:num_bytes].view(torch.float32))
        form.rule.update_(master, gradient, records, segments, aside)
        split_master_(master, records)
    else:
        form.rule.update_(records["param"], gradient, records, segments, aside)


def join_master_(master: Tensor, records: Mapping[str, Tensor]) -> None:
    """Join the bfloat16 weights and residuals [numel] in ``records``, which begin at a run, to their float32 master."""
    ties = open_ties_(records["master_residual"], records[TIE_CODES])
    decode_master_(master, records["param"], records["master_residual"], ties)


def split_master_(master: Tensor, records: Mapping[str, Tensor]) -> None:
    """Split a float32 master [numel] into the bfloat16 weights, residuals and tie codes in ``records``, which begin at
    a run."""
    ties = encode_master_(master, records["param"], records["master_residual"])
    close_ties_(records["master_residual"], ties, records[TIE_CODES])


@torch.no_grad()
def adamw_in_tiles_(
    records: Mapping[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    form: MasterFormat,
    *,
    position: int,
    workspace: Tensor,
    scale: float = 1.0,
) -> None:
    """Update ``records``, which have kinds and dtypes of ``form`` and tie codes as in `update_records_`, in place with
    ``gradient`` [numel], but not outside the segments. A bfloat16 gradient is multiplied by ``scale``, a float32
    gradient is not. ``position`` is the offset in the block's records.

    ``workspace`` is uint8 of at least `MIN_WORKSPACE_BYTES`, aligned to 4 bytes. Its size changes no bit of the result.
    Segments begin at multiples of 32 elements, and cuts at such multiples change no bit either.
    """
    codec, numel = form.moment_codec, gradient.numel()
    assert codec is not None, "float32 moments need no tiles"
    row_numel = workspace.numel() // (4 * _NUM_ROWS) // SCALE_BLOCK_NUMEL * SCALE_BLOCK_NUMEL
    tile_numel = min(MAX_TILE_NUMEL, row_numel)
    assert tile_numel > 0, f"a workspace of {workspace.numel()} bytes is less than {MIN_WORKSPACE_BYTES}"
    rows = workspace[: 4 * _NUM_ROWS * tile_numel].view(torch.float32).view(_NUM_ROWS, tile_numel)
    ties = torch.empty(0, dtype=torch.int64)
    new_ties = [ties]
    if form.has_residual:
        ties = open_ties_(records["master_residual"], records[TIE_CODES])
    for start in range(0, numel, tile_numel):
        stop = min(start + tile_numel, numel)
        inside = within(segments, start, stop)
        ties_inside = ties[(ties >= start) & (ties < stop)] if len(ties) else ties
        if not inside:
            new_ties.append(ties_inside)
            continue
        tile = {kind: record[slice(*form.elements(kind, start, stop))] for kind, record in records.items()}
        master, exp_avg, exp_avg_sq = rows[:3, : stop - start]
        of_tile = _in_float32(gradient[start:stop], scale, rows[3, : stop - start])
        scratch = rows[4:, : stop - start]
        codec.decode_(tile, exp_avg, exp_avg_sq, scratch)
        if form.has_residual:
            decode_master_(master, tile["param"], tile["master_residual"], ties_inside - start)
        elif form.rounds_weights:
            master.copy_(tile["param"])
        else:
            master = tile["param"]
        adamw_(master, of_tile, exp_avg, exp_avg_sq, inside)
        if form.has_residual:
            new_ties.append(encode_master_(master, tile["param"], tile["master_residual"]) + start)
        for segment in inside:
            offset = position + start + segment.start
            if form.rounds_weights:  # the noise does not depend on where the parameter is in its block
                first = offset - segment.origin
                _round_weights_(master, tile["param"], segment, first, scratch[:2].view(torch.int32))
                offset = first + crc32(segment.parameter.encode())
            span = RoundedSpan(segment.start, segment.stop, segment.step, offset)
            codec.encode_(tile, exp_avg, exp_avg_sq, span, scratch)
    if form.has_residual:
        close_ties_(records["master_residual"], torch.cat(new_ties), records[TIE_CODES])


def _round_weights_(master: Tensor, weights: Tensor, segment: Segment, first: int, scratch: Tensor) -> None:
    """Round the segment's elements of a float32 tile, from the parameter's element ``first`` on, to bfloat16
    ``weights``. ``scratch`` is int32 [2, numel]."""
    group, part = segment.group, slice(segment.start, segment.stop)
    assert isinstance(group, AdamWGroup), "hyperparameters of another optimizer"
    key = f"{group.rounding_seed} {segment.step} {segment.parameter}"
    noise = rounding_noise.hashed_integers(key, first, segment.stop - segment.start, scratch)
    round_to_bfloat16_(master[part], noise, weights[part])


def _in_float32(gradient: Tensor, scale: float, out: Tensor) -> Tensor:
    """Return a float32 gradient unchanged, or widen another gradient to `out` [numel] and multiply it by `scale`."""
    if gradient.dtype == torch.float32:
        return gradient
    out.copy_(gradient)
    return out.mul_(scale) if scale != 1.0 else out


Steps = Sequence[Sequence[Segment]]
"""The segments of several steps, in the order of the steps."""


@torch.no_grad()
def replay_(
    records: Mapping[str, Tensor],
    missed: Steps,
    form: MasterFormat,
    *,
    position: int,
    private: Sequence[Tensor],
    gradient: Tensor | None = None,
    segments: Sequence[Segment] = (),
    scale: float = 1.0,
) -> None:
    """Update ``records`` in place, but not outside the segments. Runs the ``missed`` steps, whose gradients were zeros,
    and then a step with ``gradient`` [numel], if any, as `update_records_` does.

    `update_records_` describes the other arguments. Segments begin at multiples of 32 elements, and cuts at such
    multiples change no bit. The rule must not need whole parameters.
    """
    assert not form.rule.needs_whole, f"{form.rule} updates whole parameters, and a tile has only a part"
    numel = records["param"].numel()
    zeros = torch.zeros(min(MAX_TILE_NUMEL, numel))
    for start in range(0, numel, MAX_TILE_NUMEL):
        stop = min(start + MAX_TILE_NUMEL, numel)
        tile = {kind: record[slice(*form.elements(kind, start, stop))] for kind, record in records.items()}
        scratch = [buffer[4 * start :] for buffer in private] if form.moment_codec is None else private
        steps = [inside for step in missed if (inside := within(step, start, stop))]
        _take_zero_steps_(tile, steps, zeros[: stop - start], form, position=position + start, private=scratch)
        if gradient is not None:
            update_records_(
                tile,
                gradient[start:stop],
                within(segments, start, stop),
                form,
                position=position + start,
                private=scratch,
                scale=scale,
            )


def _take_zero_steps_(
    tile: Mapping[str, Tensor],
    steps: Steps,
    zeros: Tensor,
    form: MasterFormat,
    *,
    position: int,
    private: Sequence[Tensor],
) -> None:
    if not steps:
        return
    if form.moment_codec is not None:
        # Each step rounds, so every step is needed. The split of a master loses nothing.
        for segments in steps:
            adamw_in_tiles_(tile, zeros, segments, form, position=position, workspace=private[0])
        return
    master = tile["param"]
    if form.has_residual:
        master = private[0][: zeros.nbytes].view(torch.float32)
        join_master_(master, tile)
    for segments in steps:
        form.rule.update_(master, zeros, tile, segments)
    if form.has_residual:
        split_master_(master, tile)

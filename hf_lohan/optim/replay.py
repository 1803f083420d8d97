"""Steps with a gradient of zeros: no memory holds that gradient, and as many as were missed run on a tile while it is
in a core's cache.

Such a step is no idle one: moments decay, weights decay, and what is left of the momentum moves the weights on. It is
elementwise, and by the same kernel, so when it runs changes no bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_lohan.optim.precision import MasterFormat, decode_master_, encode_master_
from hf_lohan.optim.segments import Segment, within
from hf_lohan.optim.update import MAX_TILE_NUMEL, adamw_in_tiles_, update_records_

Steps = Sequence[Sequence[Segment]]
"""What each of several steps updates, in their order."""


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
    """Update the records of ``form``, by kind, in place: by the ``missed`` steps, whose gradients were zeros, and then,
    if there is one, by a ``gradient`` [numel] as `update_records_` does. Nothing outside the segments changes.

    ``position`` and ``private`` are those of `update_records_`. Any cut at a multiple of 32 elements, segments
    beginning at such, changes no bit. The rule must not need parameters whole.
    """
    assert not form.rule.needs_whole, f"{form.rule} updates parameters whole, and a tile has none"
    numel = records["param"].numel()
    zeros = torch.zeros(min(MAX_TILE_NUMEL, numel))
    for start in range(0, numel, MAX_TILE_NUMEL):
        stop = min(start + MAX_TILE_NUMEL, numel)
        tile = {kind: record[slice(*form.elements(kind, start, stop))] for kind, record in records.items()}
        own = [buffer[4 * start :] for buffer in private] if form.moment_codec is None else private
        of_tile = [inside for step in missed if (inside := within(step, start, stop))]
        _take_zero_steps_(tile, of_tile, zeros[: stop - start], form, position=position + start, private=own)
        if gradient is not None:
            update_records_(
                tile,
                gradient[start:stop],
                within(segments, start, stop),
                form,
                position=position + start,
                private=own,
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
        # Moments are rounded in each step, so each takes the whole way. The split of a master loses nothing.
        for segments in steps:
            adamw_in_tiles_(tile, zeros, segments, form, position=position, workspace=private[0])
        return
    master = tile["param"]
    if form.has_residual:
        master, scratch = (buffer[: zeros.nbytes].view(torch.float32) for buffer in private)
        decode_master_(master, tile["param"], tile["master_residual"])
    for segments in steps:
        form.rule.update_(master, zeros, tile, segments)
    if form.has_residual:
        encode_master_(master, tile["param"], tile["master_residual"], scratch.view(torch.int32))

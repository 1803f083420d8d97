"""AdamW over the records of some parameters, in whatever form they are stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from hf_lohan.optim.adamw import Segment, adamw_
from hf_lohan.optim.precision import MasterFormat, decode_master_, encode_master_
from hf_lohan.optim.tiled_update import adamw_in_tiles_


@torch.no_grad()
def update_records_(
    records: Mapping[str, Tensor],
    gradient: Tensor,
    segments: Sequence[Segment],
    form: MasterFormat,
    *,
    position: int,
    private: Sequence[Tensor],
) -> None:
    """Update the records of ``form``, by kind, in place from their float32 ``gradient`` [numel]. ``position``: of the
    first parameter in its block's records.

    ``private`` is `MasterFormat.num_private_buffers` uint8 tensors, each of 4 * numel bytes or more (for moments that
    are not float32 also of `tiled_update.MIN_WORKSPACE_BYTES`), aligned to 4 bytes.
    """
    if form.moment_codec is not None:
        adamw_in_tiles_(records, gradient, segments, form, position=position, workspace=private[0])
    elif form.has_residual:
        num_bytes = 4 * gradient.numel()
        master = private[0][:num_bytes].view(torch.float32)
        scratch = private[1][:num_bytes].view(torch.int32)
        decode_master_(master, records["param"], records["master_residual"])
        adamw_(master, gradient, records["exp_avg"], records["exp_avg_sq"], segments)
        encode_master_(master, records["param"], records["master_residual"], scratch)
    else:
        adamw_(records["param"], gradient, records["exp_avg"], records["exp_avg_sq"], segments)

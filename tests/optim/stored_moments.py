"""Typical moments, encoded to records and decoded again."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from hf_lohan.optim import AdamWGroup, MomentDtype, master_format
from hf_lohan.optim.moments import MOMENT_CODECS, NUM_SCRATCH, MomentCodec, RoundedSpan

DTYPES: tuple[MomentDtype, ...] = ("bfloat16", "int8")
NUMEL = 4096
GROUP = AdamWGroup(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.0)

Records = dict[str, Tensor]


@pytest.fixture(params=DTYPES)
def dtype(request: pytest.FixtureRequest) -> MomentDtype:
    dtype: MomentDtype = request.param
    return dtype


def codec_of(dtype: MomentDtype) -> MomentCodec:
    codec = MOMENT_CODECS[dtype]
    assert codec is not None
    return codec


def new_records(dtype: MomentDtype, numel: int = NUMEL) -> Records:
    form = master_format(torch.float32, dtype)
    return {kind: torch.zeros(form.numel(kind, numel), dtype=form.state_dtype(kind)) for kind in form.state_kinds}


def encoded(dtype: MomentDtype, exp_avg: Tensor, exp_avg_sq: Tensor, step: int = 1, position: int = 0) -> Records:
    records, numel = new_records(dtype, exp_avg.numel()), exp_avg.numel()
    span, scratch = RoundedSpan(0, numel, step, position), torch.empty(NUM_SCRATCH, numel)
    codec_of(dtype).encode_(records, exp_avg.clone(), exp_avg_sq.clone(), span, scratch)
    return records


def decoded(dtype: MomentDtype, records: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    moments = torch.full((2, records["exp_avg"].numel()), torch.nan)
    codec_of(dtype).decode_(records, moments[0], moments[1], torch.empty(NUM_SCRATCH, moments.shape[1]))
    return moments[0], moments[1]


def typical_moments(seed: int = 0, numel: int = NUMEL) -> tuple[Tensor, Tensor]:
    """Return typical moments, which differ widely in size and are partly zero."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(3 * torch.randn(numel, generator=generator)) * 1e-4
    exp_avg, exp_avg_sq = torch.randn(numel, generator=generator) * sizes, sizes.square()
    never = torch.rand(numel, generator=generator) < 0.1
    return exp_avg.masked_fill_(never, 0), exp_avg_sq.masked_fill_(never, 0)


def bytes_of(records: Mapping[str, Tensor]) -> dict[str, bytes]:
    return {kind: record.view(torch.uint8).numpy().tobytes() for kind, record in records.items()}

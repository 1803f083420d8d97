"""One AdamW update over ranges of flat chunks, by torch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """The hyperparameters of one param group, in PyTorch's words."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a chunk with equal hyperparameters and an equal step number (the one being taken)."""

    start: int
    stop: int
    group: AdamWGroup
    step: int


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What of the segments lies in elements [start, stop), counted from `start`."""
    clipped = (
        Segment(max(segment.start, start) - start, min(segment.stop, stop) - start, segment.group, segment.step)
        for segment in segments
    )
    return [segment for segment in clipped if segment.start < segment.stop]


@torch.no_grad()
def adamw_(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, segments: Sequence[Segment]) -> None:
    """Update float32 chunks of equal shape [numel] in place; elements outside the segments stay as they are.

    Any cut at a multiple of 32 elements, segments and chunks beginning at such, changes no bit of the result.
    """
    for segment in segments:
        part = slice(segment.start, segment.stop)
        # What `torch.optim.adamw.adamw(fused=True)` comes down to; that takes longer to get here than a tile to update.
        torch._fused_adamw_(
            [master[part]],
            [gradient[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [torch.tensor(float(segment.step))],
            amsgrad=False,
            maximize=False,
            lr=segment.group.lr,
            beta1=segment.group.beta1,
            beta2=segment.group.beta2,
            eps=segment.group.eps,
            weight_decay=segment.group.weight_decay,
        )

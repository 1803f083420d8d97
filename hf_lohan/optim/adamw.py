"""One AdamW update over ranges of flat chunks, by torch's fused CPU kernel."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim.adamw import adamw


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


@torch.no_grad()
def adamw_(master: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, segments: Sequence[Segment]) -> None:
    """Update float32 chunks of equal shape [numel] in place; elements outside the segments stay as they are."""
    for segment in segments:
        part = slice(segment.start, segment.stop)
        adamw(
            [master[part]],
            [gradient[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            # The kernel's wrapper counts the step up before it uses it.
            [torch.tensor(float(segment.step - 1))],
            fused=True,
            amsgrad=False,
            maximize=False,
            lr=segment.group.lr,
            beta1=segment.group.beta1,
            beta2=segment.group.beta2,
            eps=segment.group.eps,
            weight_decay=segment.group.weight_decay,
        )

"""Adam and AdamW over float32 chunks, by torch's fused CPU kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import fused_adam_, fused_adamw_


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a chunk with equal hyperparameters and an equal step number (the one being taken)."""

    start: int
    stop: int
    group: Hashable
    """What its rule makes of a param group (`UpdateRule.settings_of`)."""
    step: int
    shape: tuple[int, ...] | None = None
    """Of the one parameter that it is, for rules that need parameters whole."""


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """What of the segments lies in elements [start, stop), counted from `start`."""
    clipped = (
        replace(segment, start=max(segment.start, start) - start, stop=min(segment.stop, stop) - start)
        for segment in segments
    )
    return [segment for segment in clipped if segment.start < segment.stop]


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """The hyperparameters of one param group, in PyTorch's words."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decays_weights: bool = True
    """Themselves. Otherwise weight decay is a part of the gradient: this is Adam."""

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> AdamWGroup:
        """Those of a param group of AdamW as they are now (schedulers change them)."""
        beta1, beta2 = group["betas"]
        return cls(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"])

    @classmethod
    def of_adam(cls, group: Mapping[str, Any]) -> AdamWGroup:
        """Those of a param group of Adam, which `decoupled_weight_decay` makes one of AdamW."""
        return replace(cls.of(group), decays_weights=bool(group.get("decoupled_weight_decay")))


@torch.no_grad()
def adamw_(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    segments: Sequence[Segment],
) -> None:
    """Update float32 chunks of equal shape [numel] in place; elements outside the segments stay as they are.

    Any cut at a multiple of 32 elements, segments and chunks beginning at such, changes no bit of the result.
    """
    for segment in segments:
        part, group = slice(segment.start, segment.stop), segment.group
        assert isinstance(group, AdamWGroup), "hyperparameters of another optimizer"
        kernel = fused_adamw_ if group.decays_weights else fused_adam_
        # What `torch.optim.adamw.adamw(fused=True)` comes down to; that takes longer to get here than a tile to update.
        kernel(
            [master[part]],
            [gradient[part]],
            [exp_avg[part]],
            [exp_avg_sq[part]],
            [],
            [torch.tensor(float(segment.step))],
            amsgrad=False,
            maximize=False,
            lr=group.lr,
            beta1=group.beta1,
            beta2=group.beta2,
            eps=group.eps,
            weight_decay=group.weight_decay,
        )

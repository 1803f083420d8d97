"""Adam and AdamW over float32 chunks, with torch's fused CPU kernels."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import fused_adam_, fused_adamw_

SEED_KEY = "rounding_seed"
"""Key of a param group for `AdamWGroup.rounding_seed`."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Elements [start, stop) of a chunk with the same hyperparameters and the same step number."""

    start: int
    stop: int
    group: Hashable
    """Hyperparameters of a param group (`UpdateRule.settings_of`)."""
    step: int
    shape: tuple[int, ...] | None = None
    """The parameter's shape, for rules that need whole parameters."""
    parameter: str = ""
    """The only parameter of the segment, if updates round weights (`MasterFormat.rounds_weights`)."""
    origin: int = 0
    """Offset of the parameter's first element in the block's records, even if these have only later elements."""


def within(segments: Sequence[Segment], start: int, stop: int) -> list[Segment]:
    """Cut segments to elements [start, stop). Returns the parts with offsets relative to `start`."""
    clipped = (
        replace(segment, start=max(segment.start, start) - start, stop=min(segment.stop, stop) - start)
        for segment in segments
    )
    return [segment for segment in clipped if segment.start < segment.stop]


@dataclass(frozen=True, slots=True)
class AdamWGroup:
    """The hyperparameters of one param group, with PyTorch's names."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decays_weights: bool = True
    """Whether weight decay is decoupled (AdamW) and not added to the gradient (Adam)."""
    rounding_seed: int = 0
    """Seed of the random bits that round weights (`MasterFormat.rounds_weights`)."""

    @classmethod
    def from_group(cls, group: Mapping[str, Any]) -> AdamWGroup:
        """Return the current hyperparameters of a param group of AdamW."""
        beta1, beta2 = group["betas"]
        settings = float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"]
        return cls(*settings, rounding_seed=group.get(SEED_KEY, 0))

    @classmethod
    def from_adam_group(cls, group: Mapping[str, Any]) -> AdamWGroup:
        """Return the current hyperparameters of a param group of Adam. `decoupled_weight_decay` makes it AdamW."""
        return replace(cls.from_group(group), decays_weights=bool(group.get("decoupled_weight_decay")))


@torch.no_grad()
def adamw_(
    master: Tensor,
    gradient: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    segments: Sequence[Segment],
) -> None:
    """Update float32 chunks of equal shape [numel] in place, but not elements outside the segments.

    If segments and chunks begin at multiples of 32 elements, cuts at such multiples change no bit of the result.
    """
    for segment in segments:
        part, group = slice(segment.start, segment.stop), segment.group
        assert isinstance(group, AdamWGroup), "hyperparameters of another optimizer"
        kernel = fused_adamw_ if group.decays_weights else fused_adam_
        # This is the kernel of `torch.optim.adamw.adamw(fused=True)`, whose Python code is slower than a tile's update.
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

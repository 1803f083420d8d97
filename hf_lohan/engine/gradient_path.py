"""What a gradient passes through, put together for a run: from autograd's hook to the records that it changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from hf_lohan.config import OffloadConfig
from hf_lohan.engine.tiers import Tiers
from hf_lohan.model import OffloadLayout
from hf_lohan.updates import (
    ArrivedChunk,
    GradientArrivals,
    GradientHome,
    GradientNorms,
    GradientPipeline,
    GroupOf,
    StateUpdater,
    StepTransaction,
)


@dataclass(frozen=True)
class GradientPath:
    """`arrivals` takes gradients from the hooks, `pipeline` sums, holds and applies them, and `transaction` says when a
    step's count."""

    arrivals: GradientArrivals
    pipeline: GradientPipeline
    transaction: StepTransaction


def lay_gradient_path(
    model: nn.Module,
    layout: OffloadLayout,
    tiers: Tiers,
    config: OffloadConfig,
    *,
    group_of: GroupOf,
    submit: Callable[[ArrivedChunk], None],
) -> GradientPath:
    """``group_of`` gives the present hyperparameters; ``submit`` is to put what has arrived into the pipeline."""
    plan, device = layout.plan, tiers.device
    place = {parameter: index for index, parameter in enumerate(model.parameters())}
    parts = (part for block in layout.blocks for part in block.slices)
    norms = GradientNorms(sorted(parts, key=lambda part: place[part.parameter]))
    updater = StateUpdater(
        tiers.store,
        tiers.states,
        layout.master,
        device.timeline,
        spare=tiers.gradients,
        num_not_spare=plan.num_arrival_buffers,
    )
    pipeline = GradientPipeline(
        updater,
        GradientHome(tiers.recall, frozenset(plan.spilled_blocks), tiers.spill),
        layout.blocks,
        group_of,
        norms,
        tiers.gradients,
        device=device,
        schedule=config.schedule,
        hold_gradients=layout.holds_gradients,
        drafts=tiers.store,
    )
    arrivals = GradientArrivals(
        device,
        tiers.gradients,
        layout.chunks(),
        norms,
        submit,
    )
    return GradientPath(arrivals, pipeline, StepTransaction(pipeline, norms))

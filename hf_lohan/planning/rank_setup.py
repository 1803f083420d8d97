"""What one of several ranks has to plan with, beside what its layout says."""

from __future__ import annotations

from dataclasses import replace

from hf_lohan.config import OffloadConfig
from hf_lohan.model import Block
from hf_lohan.planner import Cluster, CollectiveChoice, TrainingSetup
from hf_lohan.planner.pool_plan import MASTER_ITEMSIZE_BYTES
from hf_lohan.planning.layout import OffloadLayout


def of_one_rank(setup: TrainingSetup, layout: OffloadLayout) -> TrainingSetup:
    """The setup of a rank, from what ``layout`` says of the whole model."""
    ranks = layout.ranks
    if ranks.num_ranks == 1:
        return setup
    spilled = (block for block in layout.blocks if block.name in layout.plan.spilled_blocks)
    return replace(
        setup,
        cluster=Cluster(num_nodes=ranks.num_nodes, num_local=ranks.num_local),
        spilled_gradient_bytes=MASTER_ITEMSIZE_BYTES * sum(_own_state_numel(block, ranks.rank) for block in spilled),
        cpu_fixed_bytes=setup.cpu_fixed_bytes
        + layout.shared_weight_bytes // ranks.num_local
        + layout.kept_weight_bytes
        + layout.weight_message_bytes,
    )


def choice_of(config: OffloadConfig) -> CollectiveChoice:
    """The ways that a run is told to send weights and gradients. Where a copy lies in a node is open."""
    names = {name: getattr(config.collectives, name) for name in ("forward", "backward", "gradients")}
    return CollectiveChoice.parse(",".join(f"{name}={value}" for name, value in names.items()))


def _own_state_numel(block: Block, rank: int) -> int:
    start, stop = block.rank_ranges[rank]
    return min(stop, block.state_numel) - min(start, block.state_numel)

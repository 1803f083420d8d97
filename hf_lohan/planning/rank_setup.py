"""What one of several ranks has to plan with: its part of records and gradients."""

from __future__ import annotations

from dataclasses import replace

from hf_lohan.planner import Cluster, TrainingSetup, part_of
from hf_lohan.planner.pool_plan import MASTER_ITEMSIZE_BYTES
from hf_lohan.planning.layout import OffloadLayout


def of_one_rank(setup: TrainingSetup, layout: OffloadLayout, cluster: Cluster) -> TrainingSetup:
    """The setup of a run on ``cluster``, from that of one rank that has everything. Of the RAM in which that one would
    hold gradients a rank needs less, and the rest is for copies of records."""
    num_ranks = cluster.num_ranks
    if num_ranks == 1:
        return setup
    held, spilled = (
        MASTER_ITEMSIZE_BYTES * sum(block.state_numel for block in layout.blocks if block.name in names)
        for names in (layout.plan.held_blocks, layout.plan.spilled_blocks)
    )
    own_bytes = -(-(held + spilled) // num_ranks)
    unused_bytes = max(0, held - own_bytes)
    return replace(
        setup,
        cluster=cluster,
        records=tuple(part_of(record, num_ranks) for record in setup.records),
        spilled_gradient_bytes=max(0, own_bytes - held),
        cpu_fixed_bytes=setup.cpu_fixed_bytes - unused_bytes,
        record_cpu_bytes=setup.record_cpu_bytes + unused_bytes,
    )

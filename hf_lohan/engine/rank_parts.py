"""The parts of an engine that differ between one rank and several."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import Tensor

from hf_lohan.device import CpuDevice, Event
from hf_lohan.engine.ranks import open_peer_weights
from hf_lohan.engine.tiers import Tiers
from hf_lohan.model import Block, Chunk
from hf_lohan.planner import SizeClass
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import Links, StepAgreement
from hf_lohan.updates import (
    Delivery,
    GradientPipeline,
    GradientReduction,
    RankGradientPipeline,
    UpdateSetup,
    WeightSlots,
)
from hf_lohan.weights import (
    BlockLoader,
    LayerLoader,
    LocalWeights,
    LockstepLoader,
    NodeShards,
    SharedWeights,
    SlotRing,
)

logger = logging.getLogger(__name__)

_YES, _NO = b"yes", b"no"


def block_loader(
    ring: SlotRing,
    tiers: Tiers,
    layout: OffloadLayout,
    deliver: Callable[[Block, Tensor, Event | None], Delivery],
) -> BlockLoader:
    """What brings blocks into the slots, but for experts: from this process's store, or from the stores of all ranks.
    ``deliver``: see `LocalWeights`."""
    if tiers.rank_memory is None:
        order = [block for block in layout.blocks if block.size_class is not SizeClass.EXPERT]
        return LayerLoader(ring, LocalWeights(tiers.device, tiers.store, tiers.staging, deliver), order)
    source = SharedWeights(
        tiers.device,
        tiers.store,
        deliver,
        tiers.links,
        tiers.rank_memory.weights.bytes,
        layout.blocks,
        read_bytes=layout.plan.staging_buffer_bytes,
        parts=NodeShards(
            layout.ranks,
            layout.blocks,
            coded=tiers.codecs.weights,
            version_of=ring.version_of,
        ),
    )
    return LockstepLoader(ring, source, layout.blocks)


def follow_collectives(loader: BlockLoader, tiers: Tiers, layout: OffloadLayout) -> None:
    """Exchange weights in the way that was decided. Called once, by all ranks at the same point of their first pass."""
    peer_weights = open_peer_weights(layout, tiers.device, tiers.store)
    if peer_weights is None:
        return
    assert layout.collectives is not None and isinstance(loader, LockstepLoader)
    changes = tiers.codecs.count_changes() if layout.collectives.keeps_own else None
    loader.keep_weights(peer_weights, changes)
    logger.info(
        "weights go to other nodes %s; each node keeps a copy %s",
        "as changes of a step" if changes is not None else "whole",
        "in RAM" if layout.collectives.backward == "ram" else "on the SSD",
    )


def gradient_pipeline(
    setup: UpdateSetup, tiers: Tiers, chunks: Sequence[Chunk], agreement: StepAgreement
) -> GradientPipeline:
    """Applies this process's gradients, or their averages over all ranks."""
    if tiers.rank_memory is None:
        return GradientPipeline(setup)
    memory, codec = tiers.rank_memory.gradients, tiers.codecs.gradients
    reduction = GradientReduction(tiers.links, tiers.device, tiers.gradients, memory, chunks, codec)
    setup = replace(
        setup,
        shared_ram=None,
        sums_stay_in_arrival_buffers=True,
        copies_new_weights=CpuDevice(tiers.device.timeline),
    )
    return RankGradientPipeline(setup, reduction, agreement)


def lending_slots(ring: SlotRing, tiers: Tiers) -> WeightSlots | None:
    """The slots that updates in backward may borrow; none if they hold rounded weights. A borrowed slot cannot block
    another rank: its backward may reach the block later, but it only waits for loads before the block's."""
    return ring if tiers.codecs.weights is None else None


def agree(links: Links, what: str, wish: bool) -> bool:
    """Whether all ranks wish it."""
    return all(answer == _YES for answer in links.all_gather(what, _YES if wish else _NO))

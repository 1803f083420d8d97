"""The parts of an engine that are others where several ranks train together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor

from hf_lohan.device import Event
from hf_lohan.engine.tiers import Tiers
from hf_lohan.model import Block, Chunk
from hf_lohan.planner import SizeClass
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import Links
from hf_lohan.updates import BorrowedSlot, Delivery, GradientMeans, GradientReduction, OwnGradients
from hf_lohan.weights import (
    BlockLoader,
    BoxParts,
    LocalWeights,
    LockstepPrefetcher,
    Prefetcher,
    SharedWeights,
    SlotRing,
)

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
        return Prefetcher(ring, LocalWeights(tiers.device, tiers.store, tiers.staging, deliver), order)
    source = SharedWeights(
        tiers.device,
        tiers.store,
        deliver,
        tiers.links,
        tiers.rank_memory.weights.bytes,
        layout.blocks,
        read_bytes=layout.plan.staging_buffer_bytes,
        parts=BoxParts(
            layout.ranks,
            layout.blocks,
            coded=tiers.codecs.weights,
            changes=tiers.codecs.changes,
            kept=tiers.rank_memory.kept_weights,
            version_of=ring.version_of,
        ),
    )
    return LockstepPrefetcher(ring, source, layout.blocks)


def gradient_means(tiers: Tiers, chunks: Sequence[Chunk]) -> Callable[..., GradientMeans]:
    """Makes what makes gradients those of all ranks (see `UpdateSetup.means`)."""
    if tiers.rank_memory is None:
        return OwnGradients
    return partial(
        GradientReduction,
        tiers.links,
        tiers.device,
        tiers.gradients,
        tiers.rank_memory.gradients,
        chunks,
        tiers.codecs.gradients,
    )


def lend_own(ring: SlotRing, tiers: Tiers, chunk: Chunk) -> BorrowedSlot | None:
    """The weights of a chunk's block for its update, if that is this rank's and they are not rounded. Another rank's
    backward may come to the block later; it waits for no load but those before the block's."""
    is_own = chunk.owner == tiers.links.ranks.rank
    return ring.lend(chunk.block) if is_own and tiers.codecs.weights is None else None


def agree(links: Links, what: str, wish: bool) -> bool:
    """Whether all ranks wish it."""
    return all(answer == _YES for answer in links.gather(what, _YES if wish else _NO))

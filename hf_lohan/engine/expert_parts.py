"""The parts of an engine that are there only where experts stream one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Literal

from torch import Tensor, nn

from hf_lohan.config import AUTO, ExpertCachePolicy
from hf_lohan.device import Event
from hf_lohan.engine.model_pass import ForwardPass
from hf_lohan.engine.tiers import Tiers
from hf_lohan.experts import (
    ComputeExpert,
    ExpertCache,
    ExpertLoader,
    ExpertParts,
    HostNumbers,
    NextRouter,
    StreamedExperts,
    find_routers,
    make_policy,
)
from hf_lohan.model import Block, Chunk
from hf_lohan.planner import SizeClass
from hf_lohan.planner.costs.expert_costs import LAZY_FROM_SHARE
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.planning import OffloadLayout
from hf_lohan.updates import Delivery, MissedSteps, UpToDateRecords
from hf_lohan.weights import LocalWeights, RecordReader, SlotRing


def up_to_date_records(
    tiers: Tiers, layout: OffloadLayout, chunks: Sequence[Chunk], *, lazy_experts: bool | Literal["auto"]
) -> UpToDateRecords:
    """The store's as the last step left them, and what of them is steps behind: experts, if these may be lazy."""
    lazy = {block for block in layout.blocks if lazy_experts and block.size_class is SizeClass.EXPERT}
    from_share = LAZY_FROM_SHARE if lazy_experts == AUTO else 0.0
    missed = MissedSteps(layout.blocks, chunks, lazy, from_share=from_share)
    return UpToDateRecords(tiers.store, layout.blocks, missed)


def expert_loader(
    ring: SlotRing,
    tiers: Tiers,
    layout: OffloadLayout,
    deliver: Callable[[Block, Tensor, Event | None], Delivery],
    records: RecordReader,
    policy: ExpertCachePolicy,
) -> ExpertLoader | None:
    """What brings experts that are blocks of their own, from ``records``, with a cache in RAM where the layout has room
    for one. ``deliver``: see `LocalWeights`."""
    layers = list(layout.model_blocks.experts.values())
    if not layers:
        return None
    source = LocalWeights(tiers.device, records, tiers.expert_staging, deliver)
    room = layout.expert_cache
    if room is None or policy == "off":
        return ExpertLoader(ring, source, layers, lambda block: (block.name, PARAM) in tiers.store.ram.copies)
    cache = ExpertCache(
        tiers.device, source, make_policy(policy, room.num_experts), room.bytes_of_each, ring.version_of
    )
    return ExpertLoader(ring, cache, layers, cache.has, cache.end_pass)


def routing_of(loader: ExpertLoader | None, layer_names: Collection[str]) -> Callable[[], dict[str, list[int]]]:
    """Says, by layer, how many tokens went to each of its experts so far; of layers to which any went."""

    def routing() -> dict[str, list[int]]:
        found: dict[str, list[int]] = {}
        for block, counts in loader.routing() if loader is not None else []:
            name = next((name for name in layer_names if block.name.startswith(f"{name}.")), None)
            if name is not None and any(counts):
                found.setdefault(name, counts)  # of a layer with several such modules its first, as profiles have it
        return found

    return routing


def streamed_experts(
    model: nn.Module,
    ring: SlotRing,
    loader: ExpertLoader | None,
    layout: OffloadLayout,
    compute: ComputeExpert | None,
    forward_pass: Callable[[], ForwardPass],
) -> dict[nn.Module, StreamedExperts]:
    """By module of experts: what is to be called in its place. ``forward_pass``: that is under way."""
    if loader is None:
        return {}
    assert compute is not None, "experts are blocks of their own, and nobody says how to compute them"
    parts = ExpertParts(
        ring=ring,
        loader=loader,
        compute=compute,
        forward_pass=forward_pass,
        next_router=NextRouter(ring, find_routers(model, layout.model_blocks)),
        host_numbers=HostNumbers(ring.device),
    )
    return {
        module: StreamedExperts(layer, module, blocks, parts)
        for layer, (module, blocks) in enumerate(layout.model_blocks.experts.items())
    }

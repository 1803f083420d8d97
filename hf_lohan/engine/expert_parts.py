"""The parts of an engine that are there only where experts stream one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from hf_lohan.device import Event
from hf_lohan.engine.forward_pass import ForwardPass
from hf_lohan.engine.memory import Tiers
from hf_lohan.experts import ComputeExpert, ExpertLoader, ExpertParts, StreamedExperts
from hf_lohan.model import Block, Chunk
from hf_lohan.planner import SizeClass
from hf_lohan.planner.record_traffic import PARAM
from hf_lohan.planning import OffloadLayout
from hf_lohan.updates import CaughtUpRecords, Delivery, MissedSteps
from hf_lohan.weights import LocalWeights, RecordReader, SlotRing


def caught_up_records(
    tiers: Tiers, layout: OffloadLayout, chunks: Sequence[Chunk], *, lazy_experts: bool
) -> CaughtUpRecords:
    """The store's as the last step left them, and what of them is steps behind: experts, if these may be lazy."""
    lazy = {block for block in layout.blocks if lazy_experts and block.size_class is SizeClass.EXPERT}
    return CaughtUpRecords(tiers.store, layout.blocks, MissedSteps(layout.blocks, chunks, lazy))


def expert_loader(
    ring: SlotRing,
    tiers: Tiers,
    layout: OffloadLayout,
    deliver: Callable[[Block, Tensor, Event | None], Delivery],
    records: RecordReader,
) -> ExpertLoader | None:
    """What brings experts that are blocks of their own, from ``records``. ``deliver``: see `LocalWeights`."""
    layers = list(layout.model_blocks.experts.values())
    if not layers:
        return None
    source = LocalWeights(tiers.device, records, tiers.expert_staging, deliver)
    return ExpertLoader(ring, source, layers, lambda block: (block.name, PARAM) in tiers.store.ram.copies)


def streamed_experts(
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
    parts = ExpertParts(ring=ring, loader=loader, compute=compute, forward_pass=forward_pass)
    return {
        module: StreamedExperts(layer, module, blocks, parts)
        for layer, (module, blocks) in enumerate(layout.model_blocks.experts.items())
    }

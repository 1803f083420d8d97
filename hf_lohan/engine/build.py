"""Builds the parts of an engine. Parts that depend on the number of ranks, or on whether experts stream one by one, are
chosen here."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from torch import Tensor, nn

from hf_lohan.activations import ActivationTiers
from hf_lohan.annexes import need_annex
from hf_lohan.config import AUTO, ExpertCachePolicy, ResolvedConfig
from hf_lohan.costs import SizeClass
from hf_lohan.costs.step.expert_costs import LAZY_FROM_SHARE
from hf_lohan.device import BufferPool, CpuDevice, Event
from hf_lohan.engine.commits import CommitInterval, StepCommits, decide_alone
from hf_lohan.engine.events import EngineEvents, FollowedPlan, PassName
from hf_lohan.engine.lifetime import Lifetime
from hf_lohan.engine.model_pass import ForwardPass, PassParts
from hf_lohan.engine.planned_memory import PlannedMemory
from hf_lohan.engine.ranks import RankBatches, agreed_decision, open_peer_weights
from hf_lohan.engine.tiers import Tiers
from hf_lohan.experts import (
    AllHere,
    CachePolicy,
    ComputeExpert,
    ExpertCache,
    ExpertLoader,
    ExpertParts,
    ExpertPlaces,
    HostNumbers,
    Lending,
    NextRouter,
    OneOwnerEach,
    StreamedExperts,
    find_routers,
)
from hf_lohan.model import Block, Chunk, ParamSlice, experts_by_rank
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import DeviceSums, RowExchange, StepAgreement
from hf_lohan.store import Store
from hf_lohan.updates import (
    ClipHistory,
    Delivery,
    GradientArrivals,
    GradientPipeline,
    GradientReduction,
    MissedSteps,
    ParamGroups,
    RankGradientPipeline,
    StepCounts,
    StepTransaction,
    UpdateSetup,
    UpToDateRecords,
)
from hf_lohan.weights import (
    BlockLoader,
    Decoder,
    LayerLoader,
    LocalWeights,
    NodeShards,
    RankLoader,
    RowLoads,
    SharedWeights,
    SlotRing,
)

logger = logging.getLogger(__name__)

Deliver = Callable[[Block, Tensor, Event | None], Delivery]
"""The callback of `LocalWeights` that delivers a block."""


# Gradients, updates and commits.


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateParts:
    """The parts that turn gradients into the next version of the store."""

    block_of: dict[ParamSlice, Block]
    records: UpToDateRecords
    step_counts: StepCounts
    groups: ParamGroups
    pipeline: GradientPipeline
    arrivals: GradientArrivals
    commits: StepCommits
    clip_history: ClipHistory
    step: StepTransaction


def build_updates(
    model: nn.Module,
    layout: OffloadLayout,
    tiers: Tiers,
    config: ResolvedConfig,
    ring: SlotRing,
    agreement: StepAgreement,
) -> UpdateParts:
    """Build the parts that update this process's store, with its gradients or with the averages over all ranks."""
    chunks = layout.chunks()
    records = _up_to_date_records(tiers, layout, chunks, lazy_experts=config.experts.lazy)
    block_of = {part: block for block in layout.blocks for part in block.slices}
    groups = ParamGroups({part: block.master.rule for part, block in block_of.items()})
    step_counts: StepCounts = dict.fromkeys(block_of, 0)
    number_of = {parameter: number for number, parameter in enumerate(model.parameters())}
    setup = UpdateSetup(
        device=tiers.device,
        blocks=layout.blocks,
        chunks=[chunk for chunk in chunks if chunk.owner == layout.ranks.rank],
        slices=sorted(block_of, key=lambda part: number_of[part.parameter]),
        group_of=groups.group_of,
        has_groups=groups.has_any,
        step_counts=step_counts,
        schedule=config.switches.schedule,
        holds_gradients=layout.holds_gradients,
        store=tiers.store,
        states=tiers.states,
        gradients=tiers.gradients,
        num_arrival_buffers=layout.plan.num_arrival_buffers,
        on_device=_gradients_on_device(layout, tiers),
        spilled_blocks=frozenset(layout.plan.spilled_blocks),
        spill=tiers.spill,
        num_held_chunks=layout.num_held_chunks,
        shared_ram=tiers.shared_ram,
        keeps_gradient_dtypes=layout.keeps_gradient_dtypes,
        open_spill_of_sums=partial(tiers.store.scratch, layout.spill_records_of_sums(), "gradient_sums"),
        recall=tiers.recall,
        missed=records.missed,
        parked_share=0.0 if config.switches.parked == AUTO else config.switches.parked,
    )
    pipeline = _gradient_pipeline(setup, tiers, chunks, agreement)
    interval = CommitInterval.asked_for(config.commit_every)
    is_alone = tiers.rank_memory is None
    commits = StepCommits(
        tiers.store,
        step_counts,
        tiers.device.timeline,
        records.missed,
        run_when_written=pipeline.run_when_written,
        run_between_updates=pipeline.run_between_updates,
        interval=interval,
        decide=decide_alone if is_alone else agreed_decision(agreement, tiers.store, interval),
    )
    clip_history = ClipHistory("defer", always=config.switches.clip == "speculate")
    step = StepTransaction(pipeline, clip_history, layout.blocks, ring)
    agreement.compare_settings(
        lambda: {
            "step": max(step_counts.values(), default=0) + 1,
            # Ranks compare settings when the norm is measured, and a loop may clip later.
            "max_norm in the step before": step.max_norm_before,
            **groups.values_to_compare(),
        }
    )
    return UpdateParts(
        block_of=block_of,
        records=records,
        step_counts=step_counts,
        groups=groups,
        pipeline=pipeline,
        arrivals=GradientArrivals(
            tiers.device,
            tiers.gradients,
            chunks,
            pipeline,
            keeps_dtypes=layout.keeps_gradient_dtypes,
            coded=tiers.codecs.gradients_within,
            to_devices=setup.on_device,
        ),
        commits=commits,
        clip_history=clip_history,
        step=step,
    )


def _up_to_date_records(
    tiers: Tiers, layout: OffloadLayout, chunks: Sequence[Chunk], *, lazy_experts: bool | Literal["auto"]
) -> UpToDateRecords:
    """Return the store's records after the last step. Records of lazy experts may be some steps old in the store."""
    lazy = {block for block in layout.blocks if lazy_experts and block.size_class is SizeClass.EXPERT}
    from_share = LAZY_FROM_SHARE if lazy_experts == AUTO else 0.0
    own = [chunk for chunk in chunks if chunk.owner == layout.ranks.rank]
    missed = MissedSteps(layout.blocks, own, lazy, from_share=from_share)
    return UpToDateRecords(tiers.store, layout.blocks, missed)


def _gradients_on_device(layout: OffloadLayout, tiers: Tiers) -> BufferPool | None:
    """Return device buffers in which devices add gradients. There are as many as arrival buffers on the host."""
    if tiers.transport is None:
        return None
    num_buffers, buffer_bytes = layout.plan.num_arrival_buffers, layout.plan.buffer_bytes
    return BufferPool(
        tiers.device,
        name="gradients on the device",
        num_buffers=num_buffers,
        buffer_bytes=buffer_bytes,
        memory=tiers.device.empty(num_buffers * buffer_bytes),
    )


def _gradient_pipeline(
    setup: UpdateSetup, tiers: Tiers, chunks: Sequence[Chunk], agreement: StepAgreement
) -> GradientPipeline:
    if tiers.rank_memory is None:
        return GradientPipeline(setup)
    memory, codec = tiers.rank_memory.gradients, tiers.codecs.gradients
    sums = None
    if tiers.transport is not None:
        sums = DeviceSums(tiers.device, tiers.transport.gradients, tiers.links.ranks, tiers.gradients.buffer_bytes)
    reduction = GradientReduction(tiers.links, tiers.device, tiers.gradients, memory, chunks, codec, sums)
    setup = replace(
        setup,
        shared_ram=None,
        sums_stay_in_arrival_buffers=True,
        copies_new_weights=CpuDevice(tiers.device.timeline),
    )
    return RankGradientPipeline(setup, reduction, agreement)


# Loads of weights.


@dataclass(frozen=True, slots=True)
class Loaders:
    """The loaders that load blocks to the slots."""

    layers: BlockLoader
    """Begins and ends the passes of both loaders."""
    experts: ExpertLoader | None
    """None if experts are loaded with their layer."""
    expert_places: ExpertPlaces


def build_loaders(
    layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig, ring: SlotRing, updates: UpdateParts
) -> Loaders:
    """Build loaders that read this process's store or the stores of all ranks. Experts may stream one by one. With
    several ranks each rank loads its own experts."""
    deliver = updates.pipeline.deliver
    tiers.direct.register([slot.weights for slots in ring.slots.values() for slot in slots])
    places = _expert_places(layout, tiers, config)  # before the loaders' barrier, after which ranks may send rows
    layers = _block_loader(ring, tiers, layout, updates.pipeline)
    experts = _expert_loader(ring, tiers, layout, deliver, updates.records, config.experts.cache)
    layers.beside = experts
    return Loaders(layers, experts, places)


def _expert_places(layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig) -> ExpertPlaces:
    lends = tiers.rank_memory is not None and tiers.rank_memory.experts is not None
    if config.experts.balance not in (AUTO, False) and not lends:
        logger.info(
            "experts.balance: %s has no effect here, because it is for training with several ranks on a machine",
            config.experts.balance,
        )
    if tiers.rank_memory is None or not layout.model_blocks.experts:
        return AllHere()
    exchange, memory = RowExchange(tiers.links), tiers.rank_memory.experts
    owned = [experts_by_rank(of, layout.ranks.num_ranks) for of in layout.model_blocks.experts.values()]
    if memory is None:
        return OneOwnerEach(tiers.links, exchange, tiers.device, owned)
    lending = Lending(tiers.links, memory.bytes, tiers.device)
    assert isinstance(config.experts.balance, int)
    return OneOwnerEach(tiers.links, exchange, tiers.device, owned, lending, least_rows=config.experts.balance)


def _block_loader(ring: SlotRing, tiers: Tiers, layout: OffloadLayout, pipeline: GradientPipeline) -> BlockLoader:
    deliver = pipeline.deliver
    if tiers.rank_memory is None:
        order = [block for block in layout.blocks if block.size_class not in (SizeClass.EXPERT, SizeClass.ROWS)]
        return LayerLoader(ring, _local_weights(tiers, tiers.store, tiers.staging, layout, deliver), order)
    source = SharedWeights(
        tiers.device,
        tiers.store,
        deliver,
        ring,
        tiers.links,
        tiers.rank_memory.weights.bytes,
        layout.common_blocks,
        read_bytes=layout.plan.staging_buffer_bytes,
        parts=NodeShards(
            layout.ranks,
            layout.common_blocks,
            coded=tiers.codecs.weights,
            within=tiers.codecs.weights_within,
        ),
        decoder=_decoder(tiers, layout.common_blocks, tiers.staging),
        transport=None if tiers.transport is None else tiers.transport.weights,
    )
    return RankLoader(ring, source, layout.common_blocks)


def build_embedding_rows(layout: OffloadLayout, tiers: Tiers, ring: SlotRing, updates: UpdateParts) -> RowLoads | None:
    """Return the loader of rows of the embedding table; None if the table is loaded whole. All ranks call this
    together."""
    if layout.model_blocks.table is None:
        return None
    annex = need_annex("embedding_rows", "embedding: rows")
    rows: RowLoads = annex.open_rows(layout, tiers.device, tiers.store, updates.pipeline, tiers.links, ring)
    return rows


def _local_weights(
    tiers: Tiers, records: Store | UpToDateRecords, staging: BufferPool, layout: OffloadLayout, deliver: Deliver
) -> LocalWeights:
    decoder = _decoder(tiers, layout.blocks, staging)
    return LocalWeights(tiers.device, records, staging, deliver, decoder, records.reads_to_device)


def _decoder(tiers: Tiers, blocks: Sequence[Block], staging: BufferPool) -> Decoder | None:
    packed = [block for block in blocks if block.packed_slices]
    if not packed:
        return None
    return Decoder(tiers.device, packed, staging.buffer_bytes, between_devices=tiers.transport is not None)


def _expert_loader(
    ring: SlotRing,
    tiers: Tiers,
    layout: OffloadLayout,
    deliver: Deliver,
    records: UpToDateRecords,
    policy: ExpertCachePolicy,
) -> ExpertLoader | None:
    """Build the loader of experts that are separate blocks, with a cache in RAM if the layout has room for one. Returns
    None if there are no such experts."""
    layers = list(layout.model_blocks.experts.values())
    if not layers:
        return None
    source = _local_weights(tiers, records, tiers.expert_staging, layout, deliver)
    room, rank = layout.expert_cache, layout.ranks.rank

    def is_own(block: Block) -> bool:
        return block.owner in (None, rank)

    if room is None or policy == "off":
        return ExpertLoader(ring, source, layers, lambda block: _is_in_ram(block, tiers), own=is_own)
    kept = CachePolicy[Block](room.num_experts, policy)
    cache = ExpertCache(tiers.device, source, kept, room.bytes_of_each, ring.version_of)
    return ExpertLoader(ring, cache, layers, cache.has, cache.end_pass, own=is_own)


def _is_in_ram(block: Block, tiers: Tiers) -> bool:
    return all((block.name, kind) in tiers.store.ram.copies for kind in block.shape().fetched_bytes)


def _follow_collectives(loader: BlockLoader, tiers: Tiers, layout: OffloadLayout) -> None:
    """Exchange weights as the plan decided. All ranks call this once, at the same point of their first pass."""
    peer_weights = open_peer_weights(layout, tiers.device, tiers.store)
    if peer_weights is None:
        return
    assert layout.collectives is not None and isinstance(loader, RankLoader)
    changes = tiers.codecs.count_changes() if layout.collectives.keeps_own else None
    group = layout.collectives.group_ranks
    loader.keep_weights(peer_weights, changes)
    logger.info(
        "weights are sent to other nodes %s; %s a copy %s",
        "as changes of a step" if changes is not None else "whole",
        "each node keeps" if group is None else f"groups of {group} ranks keep",
        "in RAM" if layout.collectives.backward == "ram" else "on the SSD",
    )


# The plan and the passes that follow it.


def build_plan(
    model: nn.Module,
    layout: OffloadLayout,
    tiers: Tiers,
    config: ResolvedConfig,
    events: EngineEvents,
    updates: UpdateParts,
    loaders: Loaders,
    batches: RankBatches,
) -> tuple[FollowedPlan, ActivationTiers]:
    """Build the plan that steps follow, with its memory, and the tiers of activations."""
    names = {module: name for name, module in model.named_modules()}
    layers = {layer: names[layer] for layer in layout.model_blocks.layers}
    activations = ActivationTiers(tiers.device, layers, tiers.shared_ram)
    memory = PlannedMemory(activations, config, tiers, layout, partial(_follow_collectives, loaders.layers, tiers))
    plan = FollowedPlan(
        events,
        memory,
        updates.pipeline,
        updates.step,
        updates.clip_history,
        updates.commits,
        _routing_of(loaders.experts, layers.values()),
        longest_of_ranks=batches.begin_forward,
        must_fit=config.device_memory != AUTO,
        covers_all=tiers.row_memory is not None,
    )
    return plan, activations


def _routing_of(loader: ExpertLoader | None, layer_names: Collection[str]) -> Callable[[], dict[str, list[int]]]:
    """Return a function that returns the number of tokens of each expert so far, by name of the layer. Layers without
    tokens are left out."""

    def routing() -> dict[str, list[int]]:
        tokens: dict[str, list[int]] = {}
        for block, counts in loader.routing() if loader is not None else []:
            name = next((name for name in layer_names if block.name.startswith(f"{name}.")), None)
            if name is not None and any(counts):
                tokens.setdefault(name, counts)  # profiles also have only the first module of a layer
        return tokens

    return routing


def build_pass_parts(
    tiers: Tiers,
    ring: SlotRing,
    events: EngineEvents,
    updates: UpdateParts,
    loaders: Loaders,
    plan: FollowedPlan,
    activations: ActivationTiers,
    lifetime: Lifetime,
) -> PassParts:
    """Build the parts that forwards and backwards use.

    Updates in backward may borrow slots, unless the slots have rounded weights. A borrowed slot cannot block another
    rank, because a rank whose backward has not reached the block waits only for earlier loads.
    """

    def block_began(name: PassName, block: Block) -> None:
        if plan.memory.process is not None:
            plan.memory.process.return_holes()
        events.block_began(name, block)

    return PassParts(
        device=tiers.device,
        ring=ring,
        prefetcher=loaders.layers,
        arrivals=updates.arrivals,
        activations=activations,
        step=updates.step,
        pipeline=updates.pipeline,
        commits=updates.commits,
        groups=updates.groups,
        plan=plan,
        lifetime=lifetime,
        block_began=block_began,
        is_final_backward=events.is_final_backward,
        slots=ring if not tiers.codecs.rounds_weights else None,
        block_of=updates.block_of,
    )


def build_streamed_experts(
    model: nn.Module,
    ring: SlotRing,
    loaders: Loaders,
    layout: OffloadLayout,
    compute: ComputeExpert | None,
    forward_pass: Callable[[], ForwardPass],
) -> dict[nn.Module, StreamedExperts]:
    """Return the objects that replace modules of experts. ``forward_pass`` returns the pass in progress."""
    loader = loaders.experts
    if loader is None:
        return {}
    assert compute is not None, "experts stream one by one, so compute_expert is needed"
    parts = ExpertParts(
        ring=ring,
        loader=loader,
        compute=compute,
        forward_pass=forward_pass,
        next_router=NextRouter(ring, find_routers(model, layout.model_blocks)),
        host_numbers=HostNumbers(ring.device),
        places=loaders.expert_places,
    )
    return {
        module: StreamedExperts(layer, module, blocks, parts)
        for layer, (module, blocks) in enumerate(layout.model_blocks.experts.items())
    }

"""Plans one training step from a trace of its forward and a profile of the hardware."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal, TypeAlias

import torch
from torch import nn

from hf_lohan.activations.chunked_layers import ChunkedLayers
from hf_lohan.config import AUTO, ResolvedConfig, interval_s
from hf_lohan.costs import (
    INPUT,
    MIN_SLOTS_TO_LEND,
    BudgetError,
    Cluster,
    Collectives,
    Durability,
    Fusion,
    HardwareProfile,
    InMemoryFit,
    ModelProfile,
    OffloadPlan,
    SizeClass,
    TrainingSetup,
    fastest_way,
    fits_without_offloading,
    plan_offload,
)
from hf_lohan.costs.collectives import WAY_WITHIN_A_NODE
from hf_lohan.costs.fitting import cpu_memory_advice, device_memory_advice, room_to_hold_bytes
from hf_lohan.costs.search.plan_search import least_wearing
from hf_lohan.model import owners_of, with_rows
from hf_lohan.planning.chunk_choice import ChunkChoice, made_again
from hf_lohan.planning.layout import OffloadLayout, chunked_loss_of, lay_out
from hf_lohan.planning.order import profile_together
from hf_lohan.planning.shared_rows import key_numel, shared_key_bytes, with_keys_of_other_ranks, with_shared_keys
from hf_lohan.planning.studies import plan_studies
from hf_lohan.planning.tracing import TracedModel
from hf_lohan.planning.tracing.chunk_trace import LayersOnPaper
from hf_lohan.planning.tracing.profile import with_owners
from hf_lohan.planning.tracing.traced_blocks import trace_blocks

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepShape:
    """The number and the shape of a step's micro-batches."""

    batch_size: int
    sequence_length: int
    num_micro_batches: int = 1
    """Number of micro-batches, or of groups of them, that each move the weights."""
    num_together: int = 1
    """Number of micro-batches in a group. All forwards of a group run before its first backward."""

    @property
    def size(self) -> tuple[int, int]:
        """Number of rows of a micro-batch, and their length."""
        return self.batch_size, self.sequence_length


@dataclass(frozen=True, kw_only=True)
class PlannedStep:
    """A plan and its inputs."""

    shape: StepShape
    layout: OffloadLayout
    """The layout with the plan's division of RAM."""
    profile: ModelProfile
    """The profile, which counts all micro-batches that run together as one."""
    hardware: HardwareProfile
    setup: TrainingSetup
    plan: OffloadPlan

    @property
    def lacks_ram(self) -> bool:
        """Whether a step needs more RAM than `cpu_memory`."""
        return self.plan.cpu_bytes > self.setup.cpu_memory_bytes

    @property
    def activation_bytes(self) -> dict[str, dict[str, int]]:
        """The bytes that one micro-batch could keep or swap, by layer and then by operation, in the order of
        backward."""
        num = self.shape.num_together
        return {
            layer.name: {
                INPUT: layer.input_bytes // num,
                **{operation.name: operation.output_bytes // num for operation in layer.operations},
            }
            for layer in self.profile.layers
        }


Measure: TypeAlias = Callable[[TracedModel, StepShape], HardwareProfile] | HardwareProfile
"""The hardware, or a function that measures it."""


def plan_step(
    model: nn.Module,
    layout: OffloadLayout,
    config: ResolvedConfig,
    shape: StepShape,
    *,
    may_run_together: bool = False,
    simulates: Literal["all", "own", "none"] = "own",
    **how: Any,
) -> PlannedStep:
    """Plan a step of `model` (on meta, or in memory without hooks) for a resolved configuration.

    With several ranks, configuration and shape describe one rank. ``may_run_together``: compare the orders of
    micro-batches, and return the better one in the shape. ``simulates``: the solvers whose steps are simulated. "own"
    is that of the configuration. With "none", the plan is that of `plan_search`. ``how``: the other fields of
    `_StepPlanner`. Raises ValueError for a model or a batch that cannot be traced. A plan that does not fit has a
    refusal.
    """
    planner = _StepPlanner(model=model, layout=layout, config=config, shape=shape, **how)
    in_turn = planner.plan()
    if not may_run_together or shape.num_micro_batches == 1:
        return _by_best_solver(in_turn, simulates)
    num_together = shape.num_micro_batches * shape.num_together
    fits_whole = in_turn.plan.fits and in_turn.plan.chunk_tokens is None
    # If layers fit whole with separate micro-batches, they stay whole with joint ones: chunks would change numbers.
    stays_whole = fits_whole and planner.chunk_tokens is None and config.chunks.layers == AUTO
    together = replace(
        planner,
        shape=replace(shape, num_micro_batches=1, num_together=num_together),
        measure=in_turn.hardware,
        chunks=None if stays_whole else planner.chunks,
    )
    return _by_best_solver(_better_order(in_turn, together.plan()), simulates)


def _by_best_solver(planned: PlannedStep, simulates: Literal["all", "own", "none"] = "own") -> PlannedStep:
    """Return the step with the plan of the best solver. All other parts of the plan were chosen without simulation. A
    run does not depend on the simulation, so after an error the plan stays."""
    if simulates == "none":
        return planned
    try:
        best = plan_studies().choose_solver(planned, compares=simulates == "all")
    except Exception as error:
        logger.warning("the plan of Algorithm 1 stays, because its step cannot be simulated: %r", error)
        return planned
    return replace(planned, plan=best)


_FEW_TOKENS = 4
"""Every batch of ranks that share rows has at least this number of tokens in a row."""
WORTH_RUNNING_TOGETHER = 1.05
"""Micro-batches run together if a step with separate ones takes more than this many times as long."""
TURN_S = 3e-4
"""Seconds of a switch from one micro-batch to the next at a layer, which no cost model counts."""


def _better_order(in_turn: PlannedStep, together: PlannedStep) -> PlannedStep:
    in_turn_s, together_s = (planned.plan.prediction.step_s for planned in (in_turn, together))
    turns_s = TURN_S * together.shape.num_together * len(together.profile.layers)
    pays = WORTH_RUNNING_TOGETHER * (together_s + turns_s) < in_turn_s
    if together.plan.fits and (pays or not in_turn.plan.fits):
        return replace(together, plan=replace(together.plan, other_order_step_s=in_turn_s))
    return replace(in_turn, plan=replace(in_turn.plan, other_order_step_s=together_s if together.plan.fits else None))


@dataclass(frozen=True, eq=False, kw_only=True)
class _StepPlanner:
    """Plans a step whose micro-batches run in the order of ``shape``."""

    model: nn.Module
    layout: OffloadLayout
    config: ResolvedConfig
    shape: StepShape
    measure: Measure
    durability: Durability | None = None
    """The durability of an existing store. With `durability: auto`, a new store keeps one version of the state if two
    do not fit."""
    device: torch.device | str = "cpu"
    fused_attention: bool = False
    ways: Sequence[Collectives] | None = None
    """The ways to exchange weights and gradients among which to choose; None for those that the configuration
    allows."""
    routing: Mapping[str, Sequence[float]] | None = None
    """The number of tokens of each expert, by layer. With None all experts are equally likely."""
    chunks: ChunkedLayers | None = None
    chunk_tokens: int | None = None
    """The number of tokens in a chunk, if it is decided."""
    is_trial: bool = False
    """Whether the caller asks only whether and how the step fits. The plan then chooses no chunks, advises nothing, and
    compares nothing with training in memory."""
    fused: Fusion | None = None
    """How layers fuse the operations between matrix products."""
    saved_share: float = 1.0
    """The measured bytes that compiled layers save, in units of the profile's estimate."""

    def plan(self) -> PlannedStep:
        setting, chunk_tokens, advice = self.config.chunks.layers, self.chunk_tokens, None
        # These are not attributes, because a reference cycle would keep the model alive.
        profile_of = functools.cache(self._make_profile)
        planned_in = functools.cache(lambda number: self._plan_chunks(profile_of(number), number))
        if self.chunks is None:
            chunk_tokens = None
        elif self.is_trial:
            chunk_tokens = chunk_tokens or (setting if isinstance(setting, int) and setting is not False else None)
        else:
            setup = training_setup(self.config, self.layout, self.shape, self._asked_durability)
            choice = ChunkChoice(
                setting=setting,
                batch_size=self.shape.batch_size,
                sequence_length=self.shape.sequence_length,
                room_bytes=room_to_hold_bytes(self._hardware, setup),
                profile_of=profile_of,
                plan_of=lambda number: planned_in(number).plan,
            )
            chunk_tokens, advice = choice.choose(chunk_tokens)
        found = planned_in(chunk_tokens)
        if found.plan.refusal is None or self.is_trial:
            return found
        refusal = self._with_advice(found, chunk_tokens, advice, found.plan.refusal)
        return replace(found, plan=replace(found.plan, refusal=refusal))

    def _trace(self, chunk_tokens: int | None = None, *, in_memory: bool = False) -> TracedModel:
        """Trace the model in whole layers, or in chunks. ``in_memory``: as the stock Trainer runs it."""
        layout, on_paper = self.layout, None
        if self.chunks is not None and chunk_tokens is not None:
            on_paper = LayersOnPaper(self.chunks, chunk_tokens, has_costs=not self.is_trial)
        return trace_blocks(
            self.model,
            batch_size=self.shape.batch_size,
            sequence_length=self.shape.sequence_length,
            device=self.device,
            fused_attention=self.fused_attention,
            chunked_loss=None if in_memory else chunked_loss_of(self.config),
            found=layout.model_blocks if layout.model_blocks.experts or layout.packs else None,
            on_paper=on_paper,
        )

    @cached_property
    def _hardware(self) -> HardwareProfile:
        measure = self.measure
        return measure if isinstance(measure, HardwareProfile) else measure(self._trace(), self.shape)

    @cached_property
    def _in_memory(self) -> InMemoryFit | None:
        """Whether the step fits the device without offloading; None on trial."""
        if self.is_trial:
            return None
        device, limit = self._hardware.device, self.config.device_memory
        device_bytes = device.memory_bytes if limit == AUTO else min(device.memory_bytes, limit)
        profile = self._trace(in_memory=True).profile
        return fits_without_offloading(profile, device_bytes, has_allocator=not device.shares_cpu)

    @cached_property
    def _keys(self) -> tuple[int, int]:
        """With shared rows: elements of a token's keys and values in a layer, and bytes per element. Else (0, 0)."""
        if self.config.ranks.per_row == 1 or self.chunks is None:
            return (0, 0)
        # The size of a token's keys does not depend on the number of tokens, so a few tokens are traced.
        few = replace(self, shape=StepShape(1, _FEW_TOKENS))._trace(_FEW_TOKENS // 2)
        by_config = key_numel(getattr(self.model, "config", None)), few.profile.param_itemsize
        return few.keys if any(few.keys) else by_config

    def _make_profile(self, chunk_tokens: int | None) -> ModelProfile:
        """Return the profile for a number of tokens in a chunk, or with None for whole layers."""
        blocks, num_ranks = self.layout.model_blocks, self.config.ranks.per_row
        profile = self._trace(chunk_tokens).profile
        profile = profile if self.fused is None else profile.fused(self.fused).with_graphs_saving(self.saved_share)
        if self.config.activations == "keep":
            profile = made_again(profile)
        if num_ranks > 1:
            in_ram = self._hardware.device.shares_cpu  # a CPU reads the keys in the RAM that ranks share
            profile = with_keys_of_other_ranks(profile, self._keys, num_ranks, in_ram=in_ram)
        profile = with_owners(with_rows(profile, blocks), blocks)
        return profile_together(profile.routed(self.routing or {}), self.shape.num_together)

    @property
    def _asked_durability(self) -> Durability:
        return self.durability or ("step" if self.config.durability == "auto" else self.config.durability)

    def _plan_chunks(self, profile: ModelProfile, chunk_tokens: int | None) -> PlannedStep:
        """Return the plan for a number of tokens in a chunk, or with None for whole layers."""
        plan = functools.partial(self._plan_profile, profile, self.layout, self.config, chunk_tokens=chunk_tokens)
        found = plan(self._asked_durability)
        if not found.plan.fits and self.durability is None and self.config.durability == "auto":
            one_version = plan("checkpoint")
            found = one_version if one_version.plan.fits else found
        is_cut = any(layer.num_chunks > 1 for layer in profile.layers)
        return replace(found, plan=replace(found.plan, chunk_tokens=chunk_tokens if is_cut else None))

    def _plan_profile(
        self,
        profile: ModelProfile,
        layout: OffloadLayout,
        config: ResolvedConfig,
        durability: Durability,
        *,
        chunk_tokens: int | None,
    ) -> PlannedStep:
        """Return the best plan of all ways to exchange weights and all divisions of the RAM."""
        shape, hardware = self.shape, self._hardware
        if config.ranks.per_row > 1:
            keys_bytes = shared_key_bytes(profile, self._keys, config.ranks.per_row, chunk_tokens)
            layout = with_shared_keys(layout, keys_bytes)

        def plan_split(split: OffloadLayout) -> PlannedStep:
            setup = training_setup(config, split, shape, durability)
            plan = plan_offload(profile, hardware, setup)
            plan = replace(plan, in_memory=self._in_memory or plan.in_memory)
            whole = replace(split, is_split=True)
            return PlannedStep(shape=shape, layout=whole, profile=profile, hardware=hardware, setup=setup, plan=plan)

        laid_out = [layout]
        if layout.collectives is None:
            in_order = sorted(layout.ways_to_plan(self.ways), key=lambda way: not layout.has_ram_for(way))
            laid_out = [layout.with_collectives(way) for way in in_order]
        by_way = [_best_split([plan_split(split) for split in own.ram_splits()]) for own in laid_out]
        index, tried_ways = fastest_way([planned.plan for planned in by_way])
        best = by_way[index]
        return replace(best, plan=replace(best.plan, tried_ways=tried_ways))

    def _with_advice(self, found: PlannedStep, chunk_tokens: int | None, advice: str | None, refusal: str) -> str:
        """Return the refusal of ``found`` with the settings that would help."""
        config, layout, plan = self.config, self.layout, found.plan

        def planned_with(other: ResolvedConfig) -> OffloadPlan | None:
            """Return the plan with other settings; None if the slots or buffers do not fit."""
            try:
                other_layout = lay_out(
                    self.model,
                    other,
                    working_dtype=None if layout.other_dtypes else layout.master.working_dtype,
                    hold_gradients=layout.holds_gradients,
                    sums_gradients=not layout.keeps_gradient_dtypes,
                    memory_is_host=self._hardware.device.shares_cpu,
                    rules=layout.rules,
                    ranks=layout.ranks,
                    owners=owners_of(layout.model_blocks) or None,
                )
            except BudgetError:
                return None
            return self._plan_profile(
                found.profile, other_layout, other, self._asked_durability, chunk_tokens=chunk_tokens
            ).plan

        if advice is not None:
            refusal = f"{refusal}, or {advice}"
        if config.device_memory != AUTO and plan.least_device_bytes > config.device_memory:
            least_bytes = _least_bytes(
                plan, lambda size: planned_with(config.with_device_memory(size)), lambda plan: plan.least_device_bytes
            )
            refusal = refusal.replace(device_memory_advice(plan.least_device_bytes), device_memory_advice(least_bytes))
        if found.lacks_ram and config.ranks.per_row > 1:
            least_bytes = _least_bytes(
                plan, lambda size: planned_with(replace(config, cpu_memory=size)), lambda plan: plan.cpu_bytes
            )
            refusal = refusal.replace(cpu_memory_advice(plan.cpu_bytes), cpu_memory_advice(least_bytes))
        if config.prefetch_blocks != 1 and not found.lacks_ram:
            with_fewer_slots = planned_with(replace(config, prefetch_blocks=1))
            if with_fewer_slots is not None and with_fewer_slots.fits:
                refusal = f"{refusal}, or set prefetch_blocks to 1"
        if chunk_tokens is not None and (reason := self._trace(chunk_tokens).whole_because) is not None:
            refusal = f"{refusal}; layers are not cut into chunks, because each {reason}"
        return refusal


_MOST_SIZES_TRIED = 8


def _least_bytes(
    plan: OffloadPlan,
    planned_with: Callable[[int], OffloadPlan | None],
    needed_bytes: Callable[[OffloadPlan], int],
) -> int:
    """Return a budget that is enough. With more memory a run has more slots or larger buffers, so the bytes that
    ``plan`` needs may be too few."""
    least_bytes = needed_bytes(plan)
    for _ in range(_MOST_SIZES_TRIED):
        larger = planned_with(least_bytes)
        if larger is None or needed_bytes(larger) <= least_bytes:
            break
        least_bytes = needed_bytes(larger)
    return least_bytes


def _best_split(found: Sequence[PlannedStep]) -> PlannedStep:
    """Return the best plan that fits. If none fits, return the first plan."""
    fitting = [planned for planned in found if planned.plan.fits]
    return fitting[least_wearing([planned.plan for planned in fitting])] if fitting else found[0]


def plan_again(planned: PlannedStep, hardware: HardwareProfile, clip_rate: float) -> PlannedStep:
    """Plan the same step again, for the measured hardware and the measured rate of clipping."""
    setup = replace(planned.setup, clip_rate=clip_rate)
    before = planned.plan
    plan = plan_offload(planned.profile, hardware, setup)
    plan = replace(plan, in_memory=before.in_memory, other_order_step_s=before.other_order_step_s)
    return _by_best_solver(replace(planned, hardware=hardware, setup=setup, plan=plan))


def training_setup(
    config: ResolvedConfig, layout: OffloadLayout, shape: StepShape, durability: Durability
) -> TrainingSetup:
    """Return the planner's input besides model and hardware."""
    pools = layout.plan
    layers = [block for block in layout.blocks if block.size_class is SizeClass.LAYER]
    num_slots = pools.num_slots[SizeClass.LAYER]
    state_bytes = sum(block.state_numel * block.master.state_bytes_per_param for block in layout.blocks)
    state_numel = sum(block.state_numel for block in layout.blocks)
    in_slots = layers[max(0, len(layers) - num_slots) :]
    lends = num_slots >= MIN_SLOTS_TO_LEND
    capacities = [ssd.capacity for ssd in config.ssd]
    known = [capacity for capacity in capacities if isinstance(capacity, int)]
    experts = [block for block in layout.blocks if block.size_class is SizeClass.EXPERT and block.state_numel]
    may_be_late = all(block.master.rule.may_be_late for block in experts)
    ranks = layout.ranks
    return TrainingSetup(
        cluster=Cluster(
            num_nodes=ranks.num_nodes,
            num_local=ranks.num_local,
            collectives=layout.collectives or WAY_WITHIN_A_NODE,
            transport="nccl" if config.ranks.transport == "nccl" else "host",
        ),
        copy_cpu_bytes=layout.copy_cpu_bytes,
        copy_ssd_bytes=ranks.num_local * layout.copy_bytes,
        gpu_memory_bytes=config.gpu_memory,
        device_memory_bytes=None if config.device_memory == AUTO else config.device_memory,
        cpu_memory_bytes=config.cpu_memory,
        pools=pools,
        gpu_fixed_bytes=pools.gpu_pool_bytes,
        cpu_fixed_bytes=pools.cpu_pool_bytes + layout.exchange_bytes - layout.copy_cpu_bytes,
        sequence_ranks=config.ranks.per_row,
        shared_key_bytes=layout.shared_key_bytes,
        ssd_capacity_bytes=sum(known) if len(known) == len(capacities) else None,
        activation_cpu_bytes=layout.activation_ram_bytes,
        records=layout.records_of_a_step,
        record_cpu_bytes=layout.record_bytes,
        activations=config.activations,
        solver=config.switches.solver,
        lent_bytes=sum(block.state_numel * block.master.working_dtype.itemsize for block in layers) if lends else 0,
        hands_over=config.switches.schedule == "optimized",
        state_bytes_per_param=state_bytes / state_numel if state_numel else 0.0,
        clip=config.switches.clip if layout.holds_gradients else "none",
        parked_share=None if config.switches.parked == AUTO else config.switches.parked,
        num_micro_batches=shape.num_micro_batches,
        num_together=shape.num_together,
        durability=durability,
        commit_every_steps=config.commit_every if isinstance(config.commit_every, int) else None,
        commit_every_s=interval_s(config.commit_every),
        spilled_gradient_bytes=layout.own_spilled_bytes,
        gradients=layout.held_gradients(),
        num_held_chunks=layout.num_held_chunks,
        turnaround_bytes=sum(block.fetched_bytes for block in in_slots),
        lazy_experts=config.experts.lazy if may_be_late else False,
        least_moved_rows=int(config.experts.balance) if layout.lent_expert_bytes else 0,
    )

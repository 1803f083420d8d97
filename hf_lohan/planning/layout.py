"""Lays out a model's blocks, records, pools and copies in RAM according to a configuration, before any batch is
known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path

import torch
from torch import nn

from hf_lohan.activations import ChunkedLoss
from hf_lohan.config import AUTO, OffloadConfig, ResolvedConfig
from hf_lohan.costs import (
    BlockGradient,
    BlockShape,
    BudgetError,
    Collectives,
    PoolPlan,
    PoolRequest,
    RecordTraffic,
    SizeClass,
    choose_resident_records,
    plan_pools,
    step_traffic,
)
from hf_lohan.costs.collectives import GRADIENT_FORMATS_WITHIN, WAY_WITHIN_A_NODE, WithinCodec, ways_of_ranks
from hf_lohan.costs.pool_plan import MASTER_ITEMSIZE_BYTES
from hf_lohan.device import Device
from hf_lohan.model import (
    Block,
    Chunk,
    Rules,
    StoredForm,
    adamw_everywhere,
    assign_shards,
    common_blocks,
    find_experts,
    muon_for_matrices,
    records_of_rank,
    rows_granule_bytes,
    stored_form,
    table_to_load_by_rows,
)
from hf_lohan.planning.kept_weights import (
    coded_bytes_within,
    kept_bytes,
    kept_records,
    lending_bytes,
    lent_expert_bytes,
    message_bytes,
)
from hf_lohan.planning.shared_machine import memory_limit_of, rank_paths, share_of_machine
from hf_lohan.ranks import SINGLE_RANK, Links, Ranks
from hf_lohan.store import GRANULE_NUMEL, RecordSpec
from hf_lohan.wording import format_bytes

NUM_ACTIVATION_STAGING_BUFFERS = 4
_STAGING_SHARE = 4
"""Staging buffers to the SSD take at most 1 / `_STAGING_SHARE` of the memory for activations."""
_SHARED_BLOCKS = 2
"""Number of blocks in the memory that ranks of a node share. One is read while another is copied."""
_ACTIVATION_SHARE = 4
"""Without a plan, 1 / `_ACTIVATION_SHARE` of `cpu_memory` is for swapped activations."""
_RAM_SHARES = (1 / 32, 1 / 8, 1 / 2, 7 / 8)
"""Other shares that a plan may choose for activations, of the RAM that the pools leave."""
_RAM_SHARES_WITH_GRADIENTS = (0, 1 / 32, 1 / 8, 1 / 4, 1 / 2, 3 / 4, 7 / 8)
_LOGITS_SHARE = 16
"""Logits are computed in chunks if they take more than 1 / `_LOGITS_SHARE` of `gpu_memory` in float32."""
_SMALL_LOGITS_BYTES = 64 << 20
"""Logits of at most this size are never computed in chunks, which would change sums and save little memory."""
_WHOLE_LAYERS_SHARE = 2
"""Experts are loaded with their layers if two layers, and the gradients of all experts of one layer, take at most 1 /
`_WHOLE_LAYERS_SHARE` of `gpu_memory`."""
_CHUNK_SHARE = 64
_MOST_CHUNK_BYTES = 256 << 20
"""A chunk's logits in float32 take 1 / `_CHUNK_SHARE` of `gpu_memory`, but at most this. Larger sizes are no faster."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertCacheRoom:
    """RAM for a cache of experts while a model generates."""

    num_experts: int
    bytes_of_each: int

    @property
    def num_bytes(self) -> int:
        return self.num_experts * self.bytes_of_each


@dataclass(frozen=True)
class OffloadLayout(StoredForm):
    """The layout that follows from model, working dtype and budgets."""

    plan: PoolPlan
    holds_gradients: bool
    """Whether gradients are held until `step()`, for their norm, their sum or the schedule."""
    keeps_gradient_dtypes: bool = False
    """Whether gradients keep their dtype on the host. This is so if a step has one backward, and therefore no sums."""
    records_of_a_step: tuple[RecordTraffic, ...] = ()
    """All records that may have a copy in RAM; empty if the configuration forbids copies."""
    record_bytes: int = 0
    """RAM that these copies may take, which is what pools and activations leave."""
    activation_bytes: int = 0
    is_split: bool = False
    """Whether `activation_bytes` is final. Before that it is a guess."""
    rules: Rules = adamw_everywhere
    ranks: Ranks = SINGLE_RANK
    shared_weight_bytes: int = 0
    """Bytes of a node's host memory for blocks in transit to the node's ranks."""
    shared_key_bytes: int = 0
    """Bytes of a rank's part of the RAM for keys of shared rows (`with_shared_keys`)."""
    lent_expert_bytes: int = 0
    """Bytes for an expert that a rank lends to another rank of its node; 0 if ranks lend none."""
    open_ways: tuple[Collectives, ...] = (WAY_WITHIN_A_NODE,)
    """Ways to exchange weights and gradients that the configuration leaves to the plan."""
    collectives: Collectives | None = None
    """The way that the run uses; None if it is not decided yet."""
    copy_bytes: int = 0
    """Bytes that each rank keeps of the node's copy of all weights, in RAM or on the SSD."""
    copy_records: tuple[RecordSpec, ...] = ()
    """Scratch records for this copy, if it is on the SSD."""
    weight_message_bytes: int = 0
    """Bytes of host memory of each rank for payloads of weights."""
    kept_layers: tuple[str, ...] = ()
    """Blocks that stay on the device after their first load."""
    expert_cache: ExpertCacheRoom | None = None
    """Set if a model generates and RAM holds some of its experts, chosen by their use."""
    saved_dtypes: Mapping[str, torch.dtype] = field(default_factory=dict)
    """The dtypes, by name, of parameters that are not saved in their working dtype."""

    @property
    def blocks(self) -> list[Block]:
        return self.model_blocks.blocks

    @property
    def packs(self) -> bool:
        """Whether some weights are packed."""
        return any(block.packed_slices for block in self.blocks)

    @property
    def num_parameters(self) -> int:
        return self.identity.num_parameters

    @property
    def common_blocks(self) -> list[Block]:
        return common_blocks(self.blocks)

    @cached_property
    def resident_records(self) -> tuple[RecordTraffic, ...]:
        return choose_resident_records(self.records_of_a_step, free_bytes=self.record_bytes)

    @property
    def copy_cpu_bytes(self) -> int:
        """Bytes of RAM of each rank for its node's copy of all weights."""
        return self.copy_bytes if self.collectives is not None and self.collectives.backward == "ram" else 0

    @property
    def exchange_bytes(self) -> int:
        """Bytes of RAM of each rank for blocks in transit, lent experts, payloads and its part of the copy."""
        shared_bytes = self.shared_weight_bytes // self.ranks.num_local
        return shared_bytes + lending_bytes(self.lent_expert_bytes) + self.weight_message_bytes + self.copy_cpu_bytes

    def with_collectives(self, way: Collectives) -> OffloadLayout:
        """Return this layout with this way to exchange weights and gradients. The RAM for it is taken from copies of
        records first, and then from activations. If both together have too little, the plan of the layout does not
        fit."""
        free_bytes = self.record_bytes + self.activation_bytes - self._ram_bytes_of(way)
        activation_bytes = max(0, min(self.activation_bytes, free_bytes))
        return replace(
            self,
            collectives=way,
            copy_bytes=kept_bytes(self.common_blocks, self.ranks, way),
            copy_records=kept_records(self.common_blocks, self.ranks, way),
            weight_message_bytes=max(self.weight_message_bytes, message_bytes(self.common_blocks, self.ranks, way)),
            record_bytes=max(0, free_bytes - activation_bytes),
            activation_bytes=activation_bytes,
        )

    def ways_to_plan(self, ways: Sequence[Collectives] | None) -> Sequence[Collectives]:
        """Return the ways to compare: ``ways``, or by default all ways that the configuration allows. With one node
        there is only one way."""
        return self.open_ways if ways is None else _ways_of(self.ranks, ways)

    def has_ram_for(self, way: Collectives) -> bool:
        """Return whether the RAM that the pools leave is enough for this way to exchange weights and gradients."""
        return self._ram_bytes_of(way) <= self.record_bytes + self.activation_bytes

    def _ram_bytes_of(self, way: Collectives) -> int:
        """Return the bytes of RAM that this way needs besides the reserved bytes."""
        copy_bytes = kept_bytes(self.common_blocks, self.ranks, way) if way.backward == "ram" else 0
        return copy_bytes + max(0, message_bytes(self.common_blocks, self.ranks, way) - self.weight_message_bytes)

    def decided(self) -> OffloadLayout:
        """Return this layout for a run without a plan, with the first way that fits RAM, and the default division of
        RAM. Raises BudgetError if no way fits."""
        if self.collectives is not None:
            return replace(self, is_split=True)
        way = next((way for way in self.open_ways if self.has_ram_for(way)), None)
        if way is None:
            needed_bytes = min(map(self._ram_bytes_of, self.open_ways))
            raise BudgetError(
                f"cpu_memory leaves {format_bytes(self.record_bytes + self.activation_bytes)} beside the buffers, and "
                "the copy of all weights in each node, which ranks.collectives asks for, takes "
                f"{format_bytes(needed_bytes)}; raise cpu_memory, or set backward of collectives to ssd or auto"
            )
        return replace(self.with_collectives(way), is_split=True)

    def ram_splits(self) -> list[OffloadLayout]:
        """Return this layout and, if the plan may choose, layouts that give activations other shares of the same
        RAM."""
        free_bytes = self.activation_bytes + self.record_bytes
        may_choose = self.records_of_a_step and self.activation_bytes and not self.is_split
        shares = (_RAM_SHARES_WITH_GRADIENTS if self.held_gradients() else _RAM_SHARES) if may_choose else ()
        others = [int(free_bytes * share) for share in shares]
        return [self, *(self._split(num_bytes, free_bytes) for num_bytes in others)]

    def _split(self, activation_bytes: int, free_bytes: int) -> OffloadLayout:
        return replace(self, activation_bytes=activation_bytes, record_bytes=free_bytes - activation_bytes)

    @property
    def activation_staging_bytes(self) -> int:
        """Bytes of one staging buffer for swapped activations."""
        share = self.activation_bytes // _STAGING_SHARE // NUM_ACTIVATION_STAGING_BUFFERS
        return min(self.plan.staging_buffer_bytes, share) // GRANULE_NUMEL * GRANULE_NUMEL

    @property
    def activation_ram_bytes(self) -> int:
        """Bytes of RAM for swapped activations, without staging buffers."""
        return self.activation_bytes - NUM_ACTIVATION_STAGING_BUFFERS * self.activation_staging_bytes

    @property
    def resident_bytes(self) -> int:
        return sum(record.num_bytes for record in self.resident_records)

    @property
    def cpu_bytes(self) -> int:
        """Bytes of all host memory that is allocated at the start, for pools, copies, and the cache of experts."""
        cache_bytes = self.expert_cache.num_bytes if self.expert_cache is not None else 0
        return self.plan.cpu_pool_bytes + self.resident_bytes + cache_bytes

    def chunks(self) -> list[Chunk]:
        """Return all chunks with optimizer states, in forward order."""
        return [chunk for block in self.blocks for chunk in block.cut(self.plan.chunk_numel)]

    @property
    def num_held_chunks(self) -> int:
        """Number of chunks whose gradients have a buffer in the pool while they are held."""
        held = set(self.plan.held_blocks)
        return sum(block.shape().num_chunks(self.plan.chunk_numel) for block in self.blocks if block.name in held)

    def spill_records(self) -> tuple[RecordSpec, ...]:
        """Return scratch records for gradients that RAM cannot hold."""
        spilled = set(self.plan.spilled_blocks)
        return tuple(self._gradient_record(block) for block in self.blocks if block.name in spilled)

    @property
    def own_spilled_bytes(self) -> int:
        """Bytes of this rank's gradients that RAM cannot hold. With several ranks, each holds float32 sums of its
        shards."""
        if self.ranks.num_ranks == 1:
            return sum(record.num_bytes for record in self.spill_records())
        blocks = (block for block in self.blocks if block.name in self.plan.spilled_blocks)
        shards = ((block, *block.rank_ranges[self.ranks.rank]) for block in blocks)
        return MASTER_ITEMSIZE_BYTES * sum(
            min(stop, block.state_numel) - min(start, block.state_numel) for block, start, stop in shards
        )

    @property
    def gradient_bytes(self) -> int:
        """Bytes of all gradients in the form in which they are held."""
        return sum(self._gradient_record(block).num_bytes for block in self.blocks if block.state_numel)

    def _gradient_record(self, block: Block) -> RecordSpec:
        """Return the scratch record of a block's gradient while it is held."""
        return _gradient_record(block, block.master.working_dtype if self.keeps_gradient_dtypes else torch.float32)

    def held_gradients(self) -> tuple[BlockGradient, ...]:
        """Return the gradients of all blocks, in forward order. Return none unless gradients that do not fit the pool
        may use RAM that activations leave. Several ranks read each other's gradients in the pool."""
        if not self.plan.spilled_blocks or self.ranks.num_ranks > 1:
            return ()
        return tuple(
            BlockGradient(
                block=block.name,
                num_bytes=self._gradient_record(block).num_bytes if block.state_numel else 0,
                num_chunks=block.shape().num_chunks(self.plan.chunk_numel),
            )
            for block in self.blocks
        )

    def spill_records_of_sums(self) -> tuple[RecordSpec, ...]:
        """Return scratch records for float32 sums, for a run that sums gradients although it was not laid out for
        sums."""
        return tuple(_gradient_record(block, torch.float32) for block in self.blocks if block.state_numel)


def own_shards(form: StoredForm, ranks: Ranks, owners: Mapping[str, int] | None = None) -> StoredForm:
    """Return the form with this rank's records. With several ranks, each stores its shard of every block. ``owners``:
    see `assign_shards`."""
    if ranks.num_ranks == 1:
        return form
    assign_shards(form.model_blocks, ranks.num_ranks, owners if form.model_blocks.experts else None)
    return replace(form, records=records_of_rank(form.model_blocks.blocks, ranks.rank))


def own_shapes(blocks: Sequence[Block], ranks: Ranks) -> list[BlockShape]:
    """Return the sizes of what this rank stores of each block, for blocks of which it stores something."""
    shapes = (block.shape(ranks.rank if ranks.num_ranks > 1 else None) for block in blocks)
    return [shape for shape in shapes if shape.param_bytes]


def num_rows_buffers(ranks: Ranks, *, memory_is_host: bool) -> int:
    """Return the number of host buffers for rows of a table: one for rows that are read, one for rows in transit to the
    device, and one for rows that are sent to other ranks."""
    if ranks.num_ranks > 1:
        return 3
    return 1 if memory_is_host else 2


def shared_weight_bytes(blocks: Sequence[Block], ranks: Ranks, within: WithinCodec) -> int:
    """Return the size of the memory that ranks of a node share for blocks in transit."""
    if ranks.num_ranks == 1:
        return 0
    return _SHARED_BLOCKS * max(
        block.fetched_bytes + coded_bytes_within(block, within) for block in common_blocks(blocks)
    )


def auto_may_stream_experts(config: ResolvedConfig, ranks: Ranks) -> bool:
    """Return whether `experts: auto` may load experts one by one."""
    return ranks.num_ranks == 1 or config.experts.parallel != "none"


def _ways_of(ranks: Ranks, asked: Sequence[Collectives]) -> tuple[Collectives, ...]:
    if ranks.num_ranks == 1:
        return (WAY_WITHIN_A_NODE,)
    return ways_of_ranks(asked, ranks.num_nodes, ranks.num_local)


def _gradient_record(block: Block, dtype: torch.dtype) -> RecordSpec:
    name = str(dtype).removeprefix("torch.")
    return RecordSpec(block.name, "gradient", name, block.state_numel, granule_numel=block.granule_numel)


def resolved_here(
    config: OffloadConfig, device: Device, default_ssd_path: str | Path, links: Links | None = None
) -> ResolvedConfig:
    """Return the configuration with this rank's paths, and with every `auto` resolved for this process and `device`.
    All ranks call this together. Raises ConfigError for impossible budgets."""
    links = links or Links.alone()
    paths = rank_paths(config.ssd_paths(default_ssd_path), links.ranks)
    share, paths = share_of_machine(config, device, paths, links)
    return replace(config, ssd=paths).resolve(
        host_memory_bytes=share.host_memory_bytes,
        device_memory_bytes=share.device_memory_bytes,
        num_cpus=share.num_cpus,
        default_ssd_path=str(default_ssd_path),
        memory_is_host=device.memory_is_host or device.is_integrated,
        memory_limit_bytes=memory_limit_of(links.ranks),
    )


def chunked_loss_of(config: ResolvedConfig) -> ChunkedLoss | None:
    """Return the condition and the size for chunks of logits; None if a run never computes logits in chunks."""
    if config.chunks.loss is False:
        return None
    return ChunkedLoss(
        over_bytes=0 if config.chunks.loss is True else max(config.gpu_memory // _LOGITS_SHARE, _SMALL_LOGITS_BYTES),
        chunk_bytes=min(_MOST_CHUNK_BYTES, config.gpu_memory // _CHUNK_SHARE),
    )


def lay_out(
    model: nn.Module,
    config: ResolvedConfig,
    *,
    working_dtype: torch.dtype | None,
    hold_gradients: bool,
    sums_gradients: bool = True,
    memory_is_host: bool = False,
    rules: Rules | None = None,
    ranks: Ranks = SINGLE_RANK,
    owners: Mapping[str, int] | None = None,
) -> OffloadLayout:
    """Lay out `model` (real or on meta) for training. `working_dtype`, `rules`: see `discover_blocks`. The
    configuration chooses the default rules. `sums_gradients`: a step may sum a parameter's gradients of several
    backwards. `memory_is_host`: see `Device`. `ranks`: each rank has a shard of every block's records. `owners`: see
    `assign_shards`. Raises DiscoveryError, BudgetError, or ValueError for untrainable dtypes."""
    if config.switches.solver == "migration" and ranks.num_ranks > 1:
        raise ValueError(
            f"solver: 'migration' plans the lanes of one rank, and this run has {ranks.num_ranks}; set solver to auto"
        )
    rules = rules or (muon_for_matrices if config.optimizer == "muon" else adamw_everywhere)
    make_form = partial(
        stored_form,
        model,
        working_dtype,
        config.moment_dtype,
        rules,
        by_rows=table_to_load_by_rows(model) if config.embedding == "rows" else None,
        quantization=config.quantize,
    )
    form = make_form()
    if streams_experts(model, form, config, ranks):
        form = make_form(streams_experts=True)
    form = own_shards(form, ranks, owners)
    blocks = form.model_blocks.blocks
    sums_gradients = sums_gradients or ranks.num_ranks > 1
    trained = [block.master for block in blocks if block.state_numel] or [form.master]
    within = config.ranks.collectives.within if ranks.num_ranks > 1 else "exact"
    shared_bytes = shared_weight_bytes(blocks, ranks, within)
    open_ways = _ways_of(ranks, config.ranks.collectives.open_ways())
    messages = min(message_bytes(common_blocks(blocks), ranks, way) for way in open_ways)
    expert_bytes = lent_expert_bytes(config.experts.balance, ranks, blocks)
    exchange_bytes = shared_bytes // ranks.num_local + lending_bytes(expert_bytes)
    exchange_bytes += messages
    if exchange_bytes >= config.cpu_memory:
        raise BudgetError(
            f"cpu_memory={format_bytes(config.cpu_memory)} is not more than the {format_bytes(exchange_bytes)} that "
            f"blocks take in transit between ranks ({format_bytes(messages)} of it for payloads, as "
            f"collectives={config.ranks.collectives.to_setting()} asks, and "
            f"{format_bytes(lending_bytes(expert_bytes))} for experts.balance); raise cpu_memory"
        )
    request = PoolRequest(
        blocks=[block.shape() for block in blocks],
        gpu_memory_bytes=config.gpu_memory,
        device_memory_bytes=None if config.device_memory == AUTO else config.device_memory,
        cpu_memory_bytes=config.cpu_memory - exchange_bytes,
        prefetch_blocks=config.prefetch_blocks,
        num_state_buffers_per_chunk=max(master.num_state_buffers_per_chunk for master in trained),
        hold_gradients=hold_gradients or config.switches.schedule == "serial",
        halves_gradients=not sums_gradients and all(master.working_dtype.itemsize == 2 for master in trained),
        stages_params=not memory_is_host,
        stages_codes=any(block.packed_slices for block in blocks),
        coded_block_bytes=max(coded_bytes_within(block, within) for block in blocks),
        coded_gradient_bytes=0.0 if within == "exact" else GRADIENT_FORMATS_WITHIN[within].bytes_per_value,
        min_chunk_numel=max(block.least_buffer_numel for block in blocks),
        whole_numel=max((max(block.unit_numels) for block in blocks if block.needs_whole), default=0),
        multiplies_whole=any(master.rule.multiplies_matrices for master in trained),
        rows_granule_bytes=rows_granule_bytes(form.model_blocks),
        num_rows_buffers=num_rows_buffers(ranks, memory_is_host=memory_is_host),
        lent_expert_bytes=expert_bytes,
        num_adding_devices=ranks.num_local + (ranks.num_nodes > 1) if config.ranks.transport == "nccl" else 1,
    )
    cpu_memory = request.cpu_memory_bytes
    activation_bytes = cpu_memory // _ACTIVATION_SHARE if config.activations in ("inputs", "swap", "auto") else 0
    if activation_bytes and not (sums_gradients or memory_is_host) and config.switches.resident_records == "auto":
        # A copy of weights saves a read in each pass, and a gradient in RAM saves one write, so the plan chooses.
        request = replace(request, holds_in_buffers=False)
    try:
        pools = plan_pools(replace(request, cpu_memory_bytes=cpu_memory - activation_bytes))
    except BudgetError:  # a step needs the pools more than RAM for activations
        activation_bytes = 0
        pools = plan_pools(request)
    return OffloadLayout(
        **vars(form),
        plan=pools,
        holds_gradients=request.hold_gradients,
        keeps_gradient_dtypes=not sums_gradients,
        records_of_a_step=_step_traffic(blocks, pools, ranks) if config.switches.resident_records == "auto" else (),
        record_bytes=cpu_memory - pools.cpu_pool_bytes - activation_bytes,
        activation_bytes=activation_bytes,
        rules=rules,
        ranks=ranks,
        shared_weight_bytes=shared_bytes,
        lent_expert_bytes=expert_bytes,
        open_ways=open_ways,
        weight_message_bytes=messages,
    )


def streams_experts(model: nn.Module, form: StoredForm, config: ResolvedConfig, ranks: Ranks) -> bool:
    """Return whether experts are loaded one by one. In ``form`` they are in their layers' blocks. Raises ValueError if
    the configuration requires it and the model or the ranks do not allow it."""
    found = find_experts(model)
    divides = config.experts.parallel in ("node", "world")
    _check_expert_parallel(model, bool(found), config, ranks)
    if config.experts.load == "with_layer":
        return False
    if config.experts.load == "streamed" or (divides and ranks.num_ranks > 1):
        if not found:
            raise ValueError(
                f"experts: streamed is set, but {_lacks_experts(model)}; set experts to auto or with_layer"
            )
        return True
    if not auto_may_stream_experts(config, ranks):
        return False
    fused = [parameter for experts in found.values() for parameter in experts.parameters.values()]
    itemsize = form.master.working_dtype.itemsize
    layer_bytes = max(block.param_bytes for block in form.model_blocks.blocks if block.size_class is SizeClass.LAYER)
    gradient_bytes = max((parameter.numel() * itemsize for parameter in fused), default=0)
    return bool(found) and 2 * layer_bytes + gradient_bytes > config.gpu_memory // _WHOLE_LAYERS_SHARE


def _lacks_experts(model: nn.Module) -> str:
    return (
        f"{type(model).__name__} has no experts that can be loaded one by one (fused tensors without adapters, which "
        "transformers computes with its registry of implementations)"
    )


def _check_expert_parallel(model: nn.Module, has_experts: bool, config: ResolvedConfig, ranks: Ranks) -> None:
    """Raise ValueError if `experts.parallel` does not fit the model, the other settings or the ranks."""
    asked = config.experts.parallel
    if asked in ("node", "world"):
        if not has_experts:
            raise ValueError(
                f"experts.parallel: {asked} is set, but {_lacks_experts(model)}; set experts.parallel to auto"
            )
        if config.experts.load == "with_layer":
            raise ValueError(
                f"experts.parallel: {asked} gives each expert to one rank, which loads it alone, but experts: "
                "with_layer loads all experts of a layer on each rank; set experts to auto or streamed"
            )
    if asked == "node" and ranks.num_nodes > 1:
        raise ValueError(
            f"experts.parallel: node is set with {ranks.num_nodes} nodes, but each expert belongs to one rank among "
            "all nodes, and all other ranks send their tokens to it; set experts.parallel to world"
        )
    if asked == "none" and config.experts.load == "streamed" and ranks.num_ranks > 1:
        raise ValueError(
            f"experts: streamed is set with {ranks.num_ranks} ranks and experts.parallel: none, but each streamed "
            "expert belongs to one rank, so that tokens must be sent to that rank; set experts.parallel to auto or "
            "world, or experts to with_layer"
        )


def _step_traffic(blocks: list[Block], pools: PoolPlan, ranks: Ranks) -> tuple[RecordTraffic, ...]:
    """Return the traffic of a step for each of this rank's records, with blocks in forward order."""
    shapes = own_shapes(blocks, ranks)
    master_of = {block.name: block.master for block in blocks}
    by_block: dict[str, list[RecordTraffic]] = {}
    for master in set(master_of.values()):
        records = step_traffic(
            shapes,
            param_itemsize=master.working_dtype.itemsize,
            state_itemsizes={kind: master.state_bytes(kind) for kind in master.state_kinds},
            num_slots=pools.num_slots,
        )
        for record in records:
            if master_of[record.block] == master:
                by_block.setdefault(record.block, []).append(record)
    return tuple(record for block in blocks for record in by_block.get(block.name, ()))

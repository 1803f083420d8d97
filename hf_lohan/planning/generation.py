"""Lays out a model that generates and is not trained, so that all memory is for its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from hf_lohan.config import ResolvedConfig
from hf_lohan.costs import (
    BudgetError,
    KeysAndValues,
    PoolRequest,
    RecordTraffic,
    SizeClass,
    choose_resident_records,
    plan_pools,
    slots_for_generation,
    token_traffic,
)
from hf_lohan.costs.collectives import WAY_WITHIN_A_NODE
from hf_lohan.costs.pool_plan import GOOD_STAGING_BYTES, MASTER_ITEMSIZE_BYTES, STAGING_SHARE
from hf_lohan.files import SECTOR_BYTES
from hf_lohan.model import (
    Block,
    find_experts,
    round_up,
    rows_granule_bytes,
    stored_form,
    table_to_load_by_rows,
)
from hf_lohan.planning.layout import (
    ExpertCacheRoom,
    OffloadLayout,
    auto_may_stream_experts,
    num_rows_buffers,
    own_shapes,
    own_shards,
    shared_weight_bytes,
    streams_experts,
)
from hf_lohan.ranks import SINGLE_RANK, Ranks
from hf_lohan.wording import format_bytes


def lay_out_generation(
    model: nn.Module,
    config: ResolvedConfig,
    *,
    working_dtype: torch.dtype | None,
    keys_and_values: KeysAndValues,
    memory_is_host: bool,
    experts_per_token: int | None = None,
    ranks: Ranks = SINGLE_RANK,
) -> OffloadLayout:
    """Lay out a frozen `model` (real or on meta) for `generate`. `config` must be resolved. `working_dtype`: see
    `discover_blocks`. `memory_is_host`: see `Device`. ``experts_per_token``: number of a layer's experts that a token
    chooses, if it is known. `ranks`: each rank has a shard of every block's record, or whole experts.

    Keys and values get their part of `gpu_memory` first. A ring of slots and the layers that stay get the rest.
    `cpu_memory` without the buffers is for copies of weights, and for a cache of streamed experts if not all fit. With
    `experts: auto`, experts are streamed if all sequences of all ranks together choose at most half of them. Raises
    DiscoveryError or BudgetError.
    """
    make_form = partial(
        stored_form,
        model,
        working_dtype,
        config.moment_dtype,
        by_rows=table_to_load_by_rows(model) if config.embedding == "rows" else None,
        quantization=config.quantize,
    )
    form = make_form()
    num_choices = ranks.num_ranks * keys_and_values.num_sequences * experts_per_token if experts_per_token else None
    num_experts = min((experts.num_experts for experts in find_experts(model).values()), default=0)
    if config.experts.load == "streamed":
        is_streamed = streams_experts(model, form, config, ranks)
    else:
        is_few = num_choices is not None and 2 * num_choices <= num_experts
        is_streamed = config.experts.load == "auto" and is_few and auto_may_stream_experts(config, ranks)
    if is_streamed:
        form = make_form(streams_experts=True)
    form = own_shards(form, ranks)
    blocks = form.model_blocks.blocks
    assert not any(block.state_numel for block in blocks), "freeze it first"
    shapes = [block.shape() for block in blocks]
    slots = slots_for_generation(
        shapes,
        gpu_memory_bytes=config.gpu_memory,
        keys_and_values=keys_and_values,
        prefetch_blocks=config.prefetch_blocks,
    )
    shared_bytes = shared_weight_bytes(blocks, ranks, "exact")
    exchange_bytes = shared_bytes // ranks.num_local
    cpu_memory_bytes = config.cpu_memory - exchange_bytes
    if cpu_memory_bytes <= 0:
        raise BudgetError(
            f"cpu_memory={format_bytes(config.cpu_memory)} is not more than the {format_bytes(exchange_bytes)} that "
            "blocks take in transit between ranks; raise cpu_memory"
        )
    pools = plan_pools(
        PoolRequest(
            blocks=shapes,
            gpu_memory_bytes=config.gpu_memory - keys_and_values.num_bytes,
            cpu_memory_bytes=cpu_memory_bytes,
            prefetch_blocks=slots.num_layer_slots - 1,
            num_state_buffers_per_chunk=1,
            hold_gradients=False,
            stages_params=not memory_is_host,
            stages_codes=config.quantize.packs,
            min_chunk_numel=_chunk_numel(blocks, cpu_memory_bytes),
            rows_granule_bytes=rows_granule_bytes(form.model_blocks),
            num_rows_buffers=num_rows_buffers(ranks, memory_is_host=memory_is_host),
        )
    )
    pools = replace(pools, num_slots=pools.num_slots | {SizeClass.EXPERT: slots.num_expert_slots})
    share = min(1.0, num_choices / num_experts) if num_choices and num_experts else 1.0
    num_outer_slots = pools.num_slots[SizeClass.OUTER]
    traffic = token_traffic(own_shapes(blocks, ranks), slots, num_outer_slots=num_outer_slots, experts_share=share)
    record_bytes = cpu_memory_bytes - pools.cpu_pool_bytes if config.switches.resident_records == "auto" else 0
    is_cached = config.experts.cache != "off" and not config.quantize.packs  # packed experts have copies as records
    cache = _expert_cache(traffic, record_bytes) if is_cached else None
    return OffloadLayout(
        **vars(form),
        plan=pools,
        holds_gradients=False,
        records_of_a_step=traffic,
        record_bytes=record_bytes if cache is None else _copied_bytes(traffic, record_bytes),
        expert_cache=cache,
        kept_layers=slots.kept_layers if len(slots.kept_layers) < len(form.model_blocks.layers) else (),
        is_split=True,
        ranks=ranks,
        shared_weight_bytes=shared_bytes,
        collectives=WAY_WITHIN_A_NODE,
    )


def _expert_cache(traffic: Sequence[RecordTraffic], record_bytes: int) -> ExpertCacheRoom | None:
    """Return the room for a cache in the part of ``record_bytes`` that other copies leave; None if all experts fit
    there as copies, or if none fits."""
    experts = [record.num_bytes for record in traffic if record.is_expert_weight and record.read_bytes_per_step]
    left_bytes = record_bytes - _copied_bytes(traffic, record_bytes)
    if not experts or sum(experts) <= left_bytes:
        return None
    bytes_of_each = round_up(max(experts), SECTOR_BYTES)
    room = ExpertCacheRoom(num_experts=min(len(experts), left_bytes // bytes_of_each), bytes_of_each=bytes_of_each)
    return room if room.num_experts else None


def _copied_bytes(traffic: Sequence[RecordTraffic], record_bytes: int) -> int:
    """Return the part of ``record_bytes`` for copies of all records except experts."""
    others = [record for record in traffic if not record.is_expert_weight]
    return sum(record.num_bytes for record in choose_resident_records(others, free_bytes=record_bytes))


def _chunk_numel(blocks: Sequence[Block], cpu_memory_bytes: int) -> int:
    """Return the elements of a buffer for weights. It is large enough for the drives, and at most half a block, so that
    one buffer is read while another is copied."""
    chunk_numel = max(block.least_buffer_numel for block in blocks)
    largest_bytes = max(block.param_bytes for block in blocks)
    most_bytes = min(GOOD_STAGING_BYTES, largest_bytes // 2, cpu_memory_bytes // STAGING_SHARE)
    while 2 * chunk_numel * MASTER_ITEMSIZE_BYTES <= most_bytes:
        chunk_numel *= 2
    return chunk_numel


def bytes_per_token(layout: OffloadLayout) -> int:
    """Return the bytes that each pass reads from the drives, which are the weights that are neither in slots nor in
    RAM. For streamed experts this is the mean if all experts are equally likely."""
    in_ram = {record.block for record in layout.resident_records}
    missing = [record for record in layout.records_of_a_step if record.block not in in_ram]
    experts = [record.read_bytes_per_step for record in missing if record.is_expert_weight]
    num_cached = layout.expert_cache.num_experts if layout.expert_cache is not None else 0
    cached_bytes = sum(experts) * num_cached // len(experts) if experts else 0
    return sum(record.read_bytes_per_step for record in missing) - cached_bytes

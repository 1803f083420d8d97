"""How one model is laid out under one configuration: its blocks, its records, its pools."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch
from torch import nn

from hf_lohan.config import OffloadConfig
from hf_lohan.model.block import PARAM_ALIGN_NUMEL, Block, Chunk
from hf_lohan.model.discovery import ModelBlocks, discover_blocks
from hf_lohan.optim import SCALE_BLOCK_NUMEL, MasterFormat, MomentDtype, master_format
from hf_lohan.planner import (
    BudgetError,
    PoolPlan,
    PoolRequest,
    RecordTraffic,
    choose_resident_records,
    plan_pools,
    step_traffic,
)
from hf_lohan.planner.placement import activation_share
from hf_lohan.store import PARAMS_PER_ELEMENT, ModelIdentity, RecordSpec

assert PARAM_ALIGN_NUMEL % SCALE_BLOCK_NUMEL == 0, "no two parameters share a scale"


@dataclass(frozen=True)
class OffloadLayout:
    """Everything that follows from model, working dtype and budgets before any byte is moved."""

    model_blocks: ModelBlocks
    master: MasterFormat
    plan: PoolPlan
    records: tuple[RecordSpec, ...]
    identity: ModelIdentity
    holds_gradients: bool
    """Gradients are kept until `step()`, because their norm, their sum or the schedule asks for it."""
    resident_records: tuple[RecordTraffic, ...] = ()
    """Records that have a copy in the RAM that the pools leave."""
    activation_bytes: int = 0
    """RAM that swapped activations may take."""

    @property
    def blocks(self) -> list[Block]:
        return self.model_blocks.blocks

    @property
    def num_parameters(self) -> int:
        return self.identity.num_parameters

    @property
    def resident_bytes(self) -> int:
        """RAM that the copies of records take."""
        return sum(record.num_bytes for record in self.resident_records)

    @property
    def cpu_bytes(self) -> int:
        """All host memory that is taken at the start: pools and copies."""
        return self.plan.cpu_pool_bytes + self.resident_bytes

    def chunks(self) -> list[Chunk]:
        """All chunks with optimizer states, in forward order."""
        return [chunk for block in self.blocks for chunk in block.cut(self.plan.chunk_numel)]

    def spill_records(self) -> tuple[RecordSpec, ...]:
        """Scratch records for the gradients that RAM cannot hold."""
        spilled = set(self.plan.spilled_blocks)
        return tuple(
            RecordSpec(
                block.name,
                "gradient",
                _dtype_name(torch.float32),
                block.state_numel,
                granule_numel=block.granule_numel,
            )
            for block in self.blocks
            if block.name in spilled
        )


@dataclass(frozen=True)
class StoredForm:
    """What a store says of a model: independent of budgets."""

    model_blocks: ModelBlocks
    master: MasterFormat
    records: tuple[RecordSpec, ...]
    identity: ModelIdentity


def stored_form(model: nn.Module, working_dtype: torch.dtype, moment_dtype: MomentDtype) -> StoredForm:
    """The records of `model` (real or on meta), its moments stored as `moment_dtype`. Raises DiscoveryError, or
    ValueError for a working dtype that cannot be trained."""
    master = master_format(working_dtype, moment_dtype)
    model_blocks = discover_blocks(model, master.align_numel)
    records = tuple(spec for block in model_blocks.blocks for spec in _records_of(block, master))
    return StoredForm(model_blocks, master, records, _identify(model, model_blocks.blocks, records, moment_dtype))


def lay_out(
    model: nn.Module,
    config: OffloadConfig,
    *,
    working_dtype: torch.dtype,
    hold_gradients: bool,
    memory_is_host: bool = False,
) -> OffloadLayout:
    """Lay `model` (real or on meta) out for training. `config` must be resolved. `memory_is_host`: see `Device`.

    Raises DiscoveryError, BudgetError, or ValueError for a working dtype that cannot be trained.
    """
    form = stored_form(model, working_dtype, config.optimizer_state_dtype)
    model_blocks, master = form.model_blocks, form.master
    hold_gradients = hold_gradients or config.schedule == "serial"
    assert isinstance(config.gpu_memory, int) and isinstance(config.cpu_memory, int)
    assert isinstance(config.prefetch_blocks, int)
    shapes = [block.shape(working_dtype.itemsize) for block in model_blocks.blocks]
    activation_bytes = activation_share(config.cpu_memory) if config.activations in ("swap", "auto") else 0
    request = PoolRequest(
        blocks=shapes,
        gpu_memory_bytes=config.gpu_memory,
        cpu_memory_bytes=config.cpu_memory,
        prefetch_blocks=config.prefetch_blocks,
        num_state_buffers_per_chunk=master.num_state_buffers_per_chunk,
        hold_gradients=hold_gradients,
        stages_params=not memory_is_host,
        min_chunk_numel=max(block.granule_numel for block in model_blocks.blocks),
    )
    try:
        plan = plan_pools(replace(request, cpu_memory_bytes=config.cpu_memory - activation_bytes))
    except BudgetError:  # no room for activations: what cannot do without comes first
        activation_bytes = 0
        plan = plan_pools(request)
    # Gradients came first: one that is held saves a write and a read. A copy of a record saves reads alone.
    resident = choose_resident_records(
        step_traffic(
            shapes,
            param_itemsize=working_dtype.itemsize,
            state_itemsizes={kind: master.state_bytes(kind) for kind in master.state_kinds},
            num_slots=plan.num_slots,
        ),
        free_bytes=config.cpu_memory - plan.cpu_pool_bytes if config.resident_records == "auto" else 0,
        reserve_bytes=activation_bytes if config.resident_records == "auto" else 0,
    )
    return OffloadLayout(
        model_blocks, master, plan, form.records, form.identity, hold_gradients, resident, activation_bytes
    )


def _records_of(block: Block, master: MasterFormat) -> list[RecordSpec]:
    dtype, granule_numel = _dtype_name(master.working_dtype), block.granule_numel
    specs = [RecordSpec(block.name, "param", dtype, block.numel, block.state_numel, granule_numel)]
    if block.state_numel:
        for kind in master.state_kinds:
            assert master.params_per_element(kind) == PARAMS_PER_ELEMENT.get(kind, 1), kind
            numel = master.numel(kind, block.state_numel)
            granule = granule_numel // master.params_per_element(kind)
            specs.append(RecordSpec(block.name, kind, _dtype_name(master.state_dtype(kind)), numel, numel, granule))
    return specs


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _identify(
    model: nn.Module, blocks: list[Block], records: tuple[RecordSpec, ...], moment_dtype: MomentDtype
) -> ModelIdentity:
    """Two models share a store only if every parameter has the same name, shape and place."""
    text = [type(model).__name__]
    text += [f"{part.name} {tuple(part.shape)} {part.start}" for block in blocks for part in block.slices]
    text += [str(spec) for spec in records]
    return ModelIdentity(
        model_class=type(model).__name__,
        num_parameters=sum(part.numel for block in blocks for part in block.slices),
        fingerprint=hashlib.sha256("\n".join(text).encode()).hexdigest(),
        optimizer_state_dtype=moment_dtype,
    )

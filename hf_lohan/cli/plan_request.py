"""Plans a run from a model's path and a machine. The plan equals the plan of the run. It needs no weights or store."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hf_lohan.activations.chunked_layers import ChunkedLayers
from hf_lohan.checkpoint.run_routing import routing_of
from hf_lohan.cli.plan_options import PlanRequest
from hf_lohan.cli.plan_ranks import ways_asked_for, why_gpus_do_not_send, with_gpu_rate, with_link
from hf_lohan.config import OffloadConfig, ResolvedConfig
from hf_lohan.costs import BudgetError, Fusion, HardwareProfile, SizeClass
from hf_lohan.costs.fitting import device_limit_bytes
from hf_lohan.device import Device, available_host_memory_bytes, default_torch_device, device_for
from hf_lohan.engine.ranks import check_device_transport
from hf_lohan.experts import RoutedRows
from hf_lohan.files import ForeignStoreError, StorageError
from hf_lohan.hardware import cached_hardware, read_hardware, with_gpu_link
from hf_lohan.hardware.direct_io import uses_direct_io
from hf_lohan.huggingface.attention import cuttable_layers
from hf_lohan.huggingface.models.recipe import model_to_plan
from hf_lohan.huggingface.offloaded_model import activations_kept_if_needed
from hf_lohan.huggingface.progress import long_work
from hf_lohan.huggingface.ranks import check_sequence_ranks
from hf_lohan.model import find_experts, owners_by_name
from hf_lohan.planning import (
    LongestRow,
    MicroBatches,
    OffloadLayout,
    PlannedEpoch,
    PlannedStep,
    StepShape,
    check_together,
    lay_out,
    longest_row,
    plan_epoch,
    plan_step,
    why_not_together,
)
from hf_lohan.planning.shared_machine import memory_limit_of
from hf_lohan.planning.shared_rows import tokens_of_rank
from hf_lohan.planning.tracing import TracedModel
from hf_lohan.ranks import Ranks
from hf_lohan.report.run_data import SETTINGS_NAME, STORE_FOLDER, output_folder
from hf_lohan.threads import usable_cpus

logger = logging.getLogger(__name__)

_DEFAULT_SSD_PATH = "_lohan/store"
_DEFAULT_LENGTH = 2048
"""Number of tokens in a row if the request does not set it."""


@dataclass(frozen=True, kw_only=True)
class PlannedRun(PlannedStep):
    """A plan with the request for it."""

    request: PlanRequest
    model_class: str
    dtype: torch.dtype
    model: nn.Module
    """The model, without weights."""
    config: ResolvedConfig
    in_turn_because: str | None = None
    """Why accumulated micro-batches do not run together with `vertical_micro_batches: auto`."""


@dataclass(frozen=True, slots=True)
class OtherMachine:
    """A machine and settings in place of the request's."""

    hardware: HardwareProfile
    settings: tuple[tuple[str, Any], ...] = ()
    """Settings that differ from the request's."""
    ram_factor: int = 1
    """Multiplies the RAM and `cpu_memory`. The additional RAM may hold copies of records."""


def plan_run(request: PlanRequest, other: OtherMachine | None = None) -> PlannedRun:
    """Plan a run, on the machine `other` if it is not None. Raises ValueError for bad values and files, and BudgetError
    for budgets that are too small for the pools. A plan that does not fit for another reason has a refusal."""
    changes: dict[str, Any] = {
        "quantize": request.quantize,
        "experts.parallel": request.expert_parallel,
        # With "none", ranks own no experts, so there is nothing to balance.
        "experts.balance": False if request.expert_parallel == "none" else None,
        "ranks.transport": request.transport,
        "ranks.per_row": request.sequence_ranks,
        **({"_resident_records": "none", "_parked": 0} if request.paper else {}),
    }
    given = {name: value for name, value in changes.items() if value is not None}
    asked = OffloadConfig.load(request.offload, **given)
    # The first rank stands for all, because they have the same work.
    ranks = Ranks(0, request.num_ranks, 0, request.num_ranks // request.num_nodes)
    check_sequence_ranks(asked.ranks.per_row, ranks)
    hardware, device = None, device_for(default_torch_device())
    host_bytes, device_bytes, memory_is_host = (
        available_host_memory_bytes(),
        device.total_memory_bytes(),
        device.memory_is_host,
    )
    if request.hardware is not None:
        hardware = read_hardware(request.hardware)
        host_bytes, device_bytes = hardware.cpu.memory_bytes, hardware.device.memory_bytes
        memory_is_host = hardware.device.shares_cpu
    if other is not None:
        asked = OffloadConfig.load(asked, **dict(other.settings))
        hardware, host_bytes = other.hardware, other.ram_factor * host_bytes
        memory_is_host = hardware.device.shares_cpu
        if other.ram_factor > 1:
            ram = asked.cpu_memory
            asked = OffloadConfig.load(
                asked,
                cpu_memory=other.ram_factor * ram if isinstance(ram, int) else ram,
                _resident_records="auto",
            )
    config = asked.resolve(
        host_memory_bytes=host_bytes // ranks.num_local,
        device_memory_bytes=device_bytes // (ranks.num_local if memory_is_host else 1),
        num_cpus=usable_cpus(),
        default_ssd_path=_DEFAULT_SSD_PATH,
        memory_is_host=memory_is_host or (hardware is None and device.is_integrated),
        memory_limit_bytes=memory_limit_of(ranks) if hardware is None else None,
    )
    if request.hardware is not None and hardware is not None:
        hardware = _direct_if_asked(hardware, config, request.hardware)
    model, dtype, config = model_to_plan(
        request.model,
        {"revision": request.revision, "trust_remote_code": request.trust_remote_code},
        config,
        dtype=request.dtype,
        lora_rank=request.lora_rank,
    )
    ways = ways_asked_for(request.collectives)
    if ways is not None:  # the pools must fit the way that needs the most memory
        widest = max(ways, key=lambda way: way.within != "exact")
        config = replace(config, ranks=replace(config.ranks, collectives=widest))
    config = activations_kept_if_needed(model, config)
    micro_batches = MicroBatches.of_run(config, request.num_micro_batches)
    if micro_batches.run_together:
        check_together(model)
    in_turn_because = why_not_together(model) if micro_batches.run_together is None else None
    length = request.sequence_length or min(_DEFAULT_LENGTH, positions_of(model) or _DEFAULT_LENGTH)
    shape = StepShape(
        request.batch_size,
        tokens_of_rank(length, config.ranks.per_row),
        num_micro_batches=1 if micro_batches.run_together else request.num_micro_batches,
        num_together=request.num_micro_batches if micro_batches.run_together else 1,
    )
    experts = find_experts(model)
    run = request.routing or (run_of_checkpoint(request.model) if experts else None)
    rows, blocks_by_rank = None, list[set[str]]()
    if run is not None:
        try:
            rows, blocks_by_rank = routing_of(run)
        except (ValueError, StorageError, ForeignStoreError) as error:
            if request.routing is not None:
                raise
            logger.warning("planned without the routing of the run in %s: %s", run, error)
            run = None
    names = [f"{name}.{number}" for name, of in experts.items() for number in range(of.num_experts)]
    layout = lay_out(
        model,
        config,
        working_dtype=dtype if request.lora_rank is None else None,  # adapters are float32
        hold_gradients=micro_batches.holds_gradients(request.max_grad_norm),
        sums_gradients=micro_batches.sums_gradients,
        memory_is_host=memory_is_host,
        ranks=ranks,
        owners=owners_by_name(blocks_by_rank, names) if len(blocks_by_rank) == ranks.num_ranks else None,
    )
    check_device_transport(layout.ranks, config)
    routing = None if run is None else _routing(rows, layout, run, is_asked=request.routing == run)

    def measure(traced: TracedModel, _shape: StepShape) -> HardwareProfile:
        found = hardware or _measured(config, device, traced, dtype)
        if ranks.num_local > 1 and request.hardware is None:
            found = with_gpu_link(found, ranks.num_local)
        check_device_transport(layout.ranks, config, why_gpus_do_not_send(found))
        return with_gpu_rate(with_link(found, request.link, request.num_nodes), request.gpu_link)

    planned = plan_step(
        model,
        layout,
        config,
        shape,
        measure=measure,
        fused_attention=not memory_is_host,
        may_run_together=micro_batches.run_together is None and in_turn_because is None,
        routing=routing,
        ways=ways,
        chunks=_cuttable(request, model, layout),
        fused=cast("Fusion | None", request.fused),
        # Changed runs are compared by the predicted step time, without a simulation.
        simulates="none" if other is not None else "all" if config.switches.solver == "auto" else "own",
    )
    return PlannedRun(
        **vars(planned),
        request=request,
        model_class=type(model).__name__,
        dtype=dtype,
        model=model,
        config=config,
        in_turn_because=in_turn_because,
    )


def run_of_checkpoint(model: str) -> str | None:
    """Return the output folder of the run that saved a model, if it has both the model and the run's store."""
    for folder in (Path(model), Path(model).parent) if Path(model).is_dir() else ():
        if output_folder(folder, SETTINGS_NAME) is not None and (folder / STORE_FOLDER).is_dir():
            return str(folder)
    return None


def _routing(routed: RoutedRows | None, layout: OffloadLayout, run: str, *, is_asked: bool) -> dict[str, Sequence[int]]:
    """Return a dict from layer to the number of rows that a run counted for each expert. It is empty if the run counted
    other experts. ``is_asked``: raise ValueError instead, if the model's experts are streamed."""
    layers = {block.name for block in layout.blocks if block.size_class is SizeClass.LAYER}
    found: dict[str, Sequence[int]] = {}
    for name, counts in (routed.layers if routed is not None else {}).items():
        layer = next((layer for layer in layers if name.startswith(f"{layer}.")), None)
        if layer is not None and any(counts):
            found[layer] = counts
    own = {blocks[0].name.rpartition(".")[0]: len(blocks) for blocks in layout.model_blocks.experts.values()}
    counted = {} if routed is None else {name: len(of) for name, of in routed.layers.items() if any(of)}
    if found and counted.items() <= own.items():
        return found
    if is_asked and own:
        raise ValueError(
            f"the run in {run} has counted no rows of the experts of this model; give --routing the output folder of a "
            "run that streams the same experts and has committed a step, or leave --routing out"
        )
    return {}


def longest_row_of(planned: PlannedRun) -> LongestRow:
    """Return the longest row that fits the machine of the run if each batch has one row. The settings and the division
    of RAM are the run's."""
    chunks = _cuttable(planned.request, planned.model, planned.layout)
    shared = planned.config.ranks.per_row
    key = (replace(planned.request, batch_size=1, sequence_length=None), planned.hardware, planned.config)

    def plan(length: int) -> PlannedStep:
        is_vertical = planned.config.vertical_micro_batches is True
        return plan_step(
            planned.model,
            planned.layout,
            planned.config,
            StepShape(1, tokens_of_rank(length, shared), num_together=planned.shape.num_together if is_vertical else 1),
            measure=planned.hardware,
            durability=planned.setup.durability,
            fused_attention=not planned.hardware.device.shares_cpu,
            chunks=chunks,
            chunk_tokens=_SMALL_CHUNK if planned.config.chunks.layers == "auto" else None,
            simulates="none",
            is_trial=True,
        )

    if key not in _longest_rows:
        _longest_rows[key] = longest_row(
            plan,
            begin=planned.shape.sequence_length * shared,
            num_positions=positions_of(planned.model),
            room_bytes=device_limit_bytes(planned.hardware, planned.setup),
        )
    return _longest_rows[key]


_SMALL_CHUNK = 1024
"""Tokens of a chunk for `longest_row_of`. With smaller chunks the longest row is hardly longer."""
_longest_rows: dict[tuple[PlanRequest, HardwareProfile, ResolvedConfig], LongestRow] = {}
"""Cache of `longest_row_of`."""


def epoch_of(planned: PlannedRun, lengths: Sequence[int]) -> PlannedEpoch:
    """Return the plan of an epoch of rows with these lengths. ``planned`` is the plan for the longest row."""
    request = planned.request
    if planned.config.ranks.per_row > 1:
        raise ValueError(
            f"--lengths plans rows of one rank each, and ranks.per_row is {planned.config.ranks.per_row}; plan one "
            "length with --seq-len, or leave ranks.per_row out"
        )

    def plan(length: int) -> PlannedStep:
        if length == planned.shape.sequence_length:
            return planned
        found = plan_run(replace(request, sequence_length=length), OtherMachine(planned.hardware))
        found.plan.check()
        return found

    return plan_epoch(
        plan,
        lengths,
        batch_size=request.batch_size,
        num_micro_batches=request.num_micro_batches,
        num_ranks=request.num_ranks,
        packed_row_tokens=planned.shape.sequence_length,
    )


def _cuttable(request: PlanRequest, model: nn.Module, layout: OffloadLayout) -> ChunkedLayers | None:
    """Return the layers that can run in chunks, or None."""
    if layout.model_blocks.experts or request.fused == "compile":
        return None
    names = {module: name for name, module in model.named_modules()}
    return cuttable_layers(model, {layer: names[layer] for layer in layout.model_blocks.layers})


def positions_of(model: Any) -> int | None:
    """Return `max_position_embeddings` of a model's config, if it has one."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    positions = getattr(text, "max_position_embeddings", None)
    return positions if isinstance(positions, int) else None


def _measured(config: ResolvedConfig, device: Device, traced: TracedModel, dtype: torch.dtype) -> HardwareProfile:
    if not traced.matrix_shapes:
        raise BudgetError("the model multiplies no matrices, so this machine cannot be measured with it")
    with long_work("measuring this machine, if it is new"):
        hardware = cached_hardware(
            config, device, matrix_shapes=traced.matrix_shapes, attention=traced.attention, dtype=dtype
        )
        return replace(hardware, device=replace(hardware.device, moves_files=uses_direct_io(config, device)))


def _direct_if_asked(hardware: HardwareProfile, config: ResolvedConfig, path: str) -> HardwareProfile:
    """Return the profile that was read from ``path``, without GPUDirect Storage if the configuration forbids it."""
    if config.gpu_direct is True and not hardware.device.moves_files:
        raise ValueError(
            f"gpu_direct: true cannot be planned for, because the device in {path} does not have moves_files: true; "
            "add this line if the machine has GPUDirect Storage, or set gpu_direct to auto or false"
        )
    moves_files = hardware.device.moves_files and config.gpu_direct is not False
    return replace(hardware, device=replace(hardware.device, moves_files=moves_files))

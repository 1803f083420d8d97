"""From a model's path and a machine to a plan: the same steps that a run takes, without weights or a store."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device, available_host_memory_bytes, default_torch_device, device_for
from hf_lohan.hardware import cached_hardware, read_hardware
from hf_lohan.huggingface.weightless_model import planning_dtype, read_model_config, weightless_model
from hf_lohan.model import TracedModel, lay_out
from hf_lohan.planner import (
    BudgetError,
    HardwareProfile,
    InMemoryFit,
    ModelProfile,
    OffloadPlan,
    TrainingSetup,
    fits_without_offloading,
    plan_offload,
)
from hf_lohan.planning.traced_blocks import trace_blocks
from hf_lohan.planning.training_setup import training_setup
from hf_lohan.threads import usable_cpus

_DEFAULT_SSD_PATH = "_lohan/store"
_DEFAULT_SEQUENCE_LENGTH = 2048


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What to plan for, as the command line says it."""

    model: str
    batch_size: int = 8
    sequence_length: int | None = None
    """None: 2048, or as many positions as the model has."""
    offload: str = "lohan"
    hardware: str | None = None
    """A profile's file; None: this machine, measured."""
    num_micro_batches: int = 1
    max_grad_norm: float = 1.0
    dtype: str = "auto"


@dataclass(frozen=True, kw_only=True)
class PlannedRun:
    """A plan and all that went into it."""

    model_class: str
    dtype: torch.dtype
    profile: ModelProfile
    hardware: HardwareProfile
    setup: TrainingSetup
    plan: OffloadPlan
    num_together: int
    """Micro-batches that `profile` is of: all of a step's, under `vertical_micro_batches`."""
    in_memory: InMemoryFit
    """Whether it would train without offloading."""

    def to_mapping(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **self.plan.prediction.to_mapping(),
            "clip": self.plan.clip,
            "durability": self.setup.durability,
            "refusal": self.plan.refusal,
            "warnings": list(self.plan.warnings),
            "fits_without_offloading": self.in_memory.fits,
            "num_params": self.profile.num_params,
        }


def plan_run(request: PlanRequest) -> PlannedRun:
    """Plan a run. Raises ValueError for bad values and files, and BudgetError for budgets that are too small for the
    pools; whether the rest fits is said by the plan."""
    _check(request)
    asked = OffloadConfig.load(request.offload)
    if request.hardware is not None and request.offload == "lohan":
        # A machine on paper: LoHan's own placement, with all state on the SSDs, comparable with what is published.
        asked = replace(asked, resident_records="none")
    hardware = None if request.hardware is None else read_hardware(request.hardware)
    model_config = read_model_config(request.model)
    dtype = planning_dtype(model_config, request.dtype)
    model = weightless_model(model_config, dtype)
    trace = partial(
        trace_blocks,
        model,
        sequence_length=request.sequence_length or _sequence_length_of(model_config),
        fused_attention=_is_accelerator(hardware),
    )
    traced = trace(batch_size=request.batch_size)
    if hardware is None:
        device = device_for(default_torch_device())
        config = _resolve(asked, available_host_memory_bytes(), device.total_memory_bytes())
        hardware = _measured(config, device, traced, dtype)
    else:
        config = _resolve(asked, hardware.cpu.memory_bytes, hardware.device.memory_bytes)
    profile, num_together = traced.profile, 1
    if config.vertical_micro_batches and request.num_micro_batches > 1:
        # What moves and what waits for backward is as with one micro-batch of their size together.
        num_together = request.num_micro_batches
        request = replace(request, batch_size=num_together * request.batch_size, num_micro_batches=1)
        profile = trace(batch_size=request.batch_size).profile
    setup, plan = _plan(model, config, request, profile, hardware)
    if plan.refusal is not None and asked.prefetch_blocks == "auto":
        fewer_slots = replace(config, prefetch_blocks=1)
        if _plan(model, fewer_slots, request, profile, hardware)[1].fits:
            plan = replace(plan, refusal=f"{plan.refusal}, or set prefetch_blocks to 1")
    return PlannedRun(
        model_class=type(model).__name__,
        dtype=dtype,
        profile=profile,
        num_together=num_together,
        hardware=hardware,
        setup=setup,
        plan=plan,
        in_memory=fits_without_offloading(traced.profile, hardware.device.memory_bytes),
    )


def _plan(
    model: Any, config: OffloadConfig, request: PlanRequest, profile: ModelProfile, hardware: HardwareProfile
) -> tuple[TrainingSetup, OffloadPlan]:
    """The plan within a resolved configuration. A store that is not told how many versions of the state to keep keeps
    one where two do not fit."""
    holds_gradients = request.max_grad_norm > 0 or request.num_micro_batches > 1
    layout = lay_out(
        model,
        config,
        working_dtype=_dtype_of(model),
        hold_gradients=holds_gradients,
        memory_is_host=hardware.device.shares_cpu,
    )
    setup = training_setup(
        config,
        layout,
        clip=config.clip if request.max_grad_norm > 0 else "none",
        durability="checkpoint" if config.durability == "checkpoint" else "step",
        num_micro_batches=request.num_micro_batches,
    )
    plan = plan_offload(profile, hardware, setup)
    if not plan.fits and config.durability == "auto":
        one_version = replace(setup, durability="checkpoint")
        smaller = plan_offload(profile, hardware, one_version)
        if smaller.fits:
            return one_version, smaller
    return setup, plan


def _dtype_of(model: Any) -> torch.dtype:
    dtype: torch.dtype = next(model.parameters()).dtype
    return dtype


def _check(request: PlanRequest) -> None:
    at_least_one = {
        "batch size": request.batch_size,
        "sequence length": request.sequence_length,
        "number of gradient accumulation steps": request.num_micro_batches,
    }
    for name, value in at_least_one.items():
        if value is not None and value < 1:
            raise ValueError(f"the {name} is {value}; it must be at least 1")
    if request.max_grad_norm < 0:
        raise ValueError(f"max_grad_norm is {request.max_grad_norm}; give 0 for no clipping, or a positive norm")


def _sequence_length_of(config: Any) -> int:
    positions = getattr(config, "max_position_embeddings", None)
    return min(_DEFAULT_SEQUENCE_LENGTH, positions) if isinstance(positions, int) else _DEFAULT_SEQUENCE_LENGTH


def _is_accelerator(hardware: HardwareProfile | None) -> bool:
    return default_torch_device().type != "cpu" if hardware is None else not hardware.device.shares_cpu


def _resolve(asked: OffloadConfig, host_memory_bytes: int, device_memory_bytes: int) -> OffloadConfig:
    return asked.resolve(
        host_memory_bytes=host_memory_bytes,
        device_memory_bytes=device_memory_bytes,
        num_cpus=usable_cpus(),
        default_ssd_path=_DEFAULT_SSD_PATH,
    )


def _measured(config: OffloadConfig, device: Device, traced: TracedModel, dtype: torch.dtype) -> HardwareProfile:
    if not traced.matrix_shapes:
        raise BudgetError("the model multiplies no matrices, so there is nothing to measure this machine with")
    return cached_hardware(config, device, matrix_shapes=traced.matrix_shapes, dtype=dtype)

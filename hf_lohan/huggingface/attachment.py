"""Attaches an engine to a model whose weights are in a store."""

from __future__ import annotations

import functools
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from hf_lohan.activations import chunked_head_of
from hf_lohan.checkpoint.model_description import describe_model
from hf_lohan.compat.accelerate_private import is_prepared
from hf_lohan.compat.torch_private import cpu_has_bfloat16_units
from hf_lohan.config import ResolvedConfig
from hf_lohan.engine import (
    EngineEvents,
    OffloadEngine,
    OutOfMemoryAdvice,
    StepsSoFar,
    Tiers,
)
from hf_lohan.experts import ROUTED_ROWS, RoutedRows
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.layers import compute_expert, enable_recompute, stream_experts
from hf_lohan.huggingface.local_run import note_offloaded
from hf_lohan.huggingface.model_methods import Attached, use_store
from hf_lohan.huggingface.progress import long_work, show_blocks
from hf_lohan.huggingface.ranks import StepTimeouts, check_rank_model, generate_together
from hf_lohan.huggingface.sequences import check_model_of_rows
from hf_lohan.model import why_whole
from hf_lohan.planning import OffloadLayout, PlannedStep, RunPlan, StepShape, chunked_loss_of
from hf_lohan.planning.run_plan import CHUNKS_NAME

logger = logging.getLogger(__name__)


def attach(model: Any, layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig) -> OffloadEngine:
    """Attach an engine to a model whose weights are in the store. The model then saves its weights from the store, and
    recomputes activations as configured."""
    check_rank_model(model, tiers.links.ranks)
    if config.ranks.per_row > 1:
        check_model_of_rows(model)
    _tell_what_is_slow(model, layout, tiers, config)

    is_direct = tiers.direct.hasher is not None
    plan = RunPlan(model, layout, config, tiers.device, tiers.store.durability, tiers.links, moves_files=is_direct)
    steps = _PlannedSteps(model, plan, StepTimeouts(tiers.links, config))
    events = EngineEvents(
        is_final_backward=steps.is_final_backward,
        plan=steps.plan,
        plan_order=steps.plan_order,
        step_began=steps.began,
        block_began=show_blocks(layout.model_blocks, tiers.device.timeline),
    )
    with OutOfMemoryAdvice(config).added_to_errors():
        engine = OffloadEngine(model, layout, tiers, config, events, compute_expert)
    note_offloaded(engine)

    _run_by(engine, model, plan)
    chunked_head = chunked_head_of(model, chunked_loss_of(config))
    if chunked_head is not None:
        chunked_head.attach(last_step=lambda: engine.last_step)
    Attached(engine, plan, chunked_head).remember(model)
    use_store(engine, model)

    facts = _RunFacts(plan, engine)
    engine.commits.add_facts(facts.of_commit, facts.continue_from)
    engine.commits.describe_first(functools.partial(describe_model, model, engine))
    return engine


def _tell_what_is_slow(model: nn.Module, layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig) -> None:
    if config.embedding == "rows" and layout.model_blocks.table is None:
        logger.info("embedding: whole, because %s", why_whole(model))
    computes_bfloat16 = tiers.device.torch_device.type == "cpu" and layout.master.working_dtype == torch.bfloat16
    if computes_bfloat16 and not cpu_has_bfloat16_units():
        logger.warning(
            "this CPU has no bfloat16 units, so bfloat16 matmuls run up to 200 times slower than float32 ones; train "
            "in float32, or on a GPU"
        )


def _run_by(engine: OffloadEngine, model: Any, plan: RunPlan) -> None:
    """Have the engine run the model's layers and experts."""
    if getattr(model, "config", None) is not None:
        model.config.dtype = engine.layout.master.working_dtype
    stream_experts(engine.experts)
    generate_together(model, engine.links, functools.partial(_is_closed, weakref.ref(engine)))
    if engine.config.activations != "keep":
        enable_recompute(model, engine)
    model_blocks, tiers = engine.layout.model_blocks, engine.tiers
    if not model_blocks.experts:
        names = {module: name for name, module in model.named_modules()}
        layers = {layer: names[layer] for layer in model_blocks.layers}
        file = os.path.join(tiers.store.paths[0].path, CHUNKS_NAME)
        plan.may_cut(run_layers_in_chunks(model, engine.activations, layers, tiers.row_memory), file)


def _is_closed(engine: weakref.ref[OffloadEngine]) -> bool:
    return (attached := engine()) is None or attached.is_closed


class _PlannedSteps:
    """Answers the engine's questions about the steps of a run."""

    def __init__(self, model: nn.Module, plan: RunPlan, timeouts: StepTimeouts) -> None:
        self._model = weakref.ref(model)
        self._plan = plan
        self._timeouts = timeouts

    def is_final_backward(self) -> bool:
        """Return whether a backward is the last one of its step. The model's `Accelerator` decides it. Without an
        `Accelerator` every backward is."""
        return not is_prepared(self._model()) or bool(GradientState().sync_gradients)

    def plan(self, shape: StepShape, layout: OffloadLayout) -> PlannedStep | None:
        """Plan a step with the number of micro-batches for which Trainer or `Accelerator` is configured."""
        num_micro_batches = 1
        if shape.num_together == 1:
            num_accumulated = GradientState().num_steps if is_prepared(self._model()) else 1
            num_micro_batches = max(self._plan.num_micro_batches, num_accumulated)
        planned = self._planned(replace(shape, num_micro_batches=num_micro_batches), layout)
        self._timeouts.step_planned()
        return planned

    def plan_order(self, shape: StepShape, layout: OffloadLayout) -> PlannedStep | None:
        return self._planned(shape, layout, may_run_together=True)

    def _planned(self, shape: StepShape, layout: OffloadLayout, **how: bool) -> PlannedStep | None:
        with long_work("planning the first step (on a new machine this measures the hardware)"):
            return self._plan.plan_batches(shape, layout, **how)

    def began(self, steps: StepsSoFar) -> PlannedStep | None:
        self._timeouts.step_began()
        return self._plan.step_began(steps.clip_rate, steps.routing, is_as_planned=steps.is_as_planned)


class _RunFacts:
    """What commits say of the plan, and the rows that each expert had. Commits keep this object, and must not keep the
    plan, which has the model."""

    def __init__(self, plan: RunPlan, engine: OffloadEngine) -> None:
        self._plan, self._engine = weakref.ref(plan), weakref.ref(engine)
        self._last: dict[str, Any] = {}
        """Of the commit before, for the commit of a model that was deleted."""

    def of_commit(self) -> dict[str, Any]:
        plan, engine = self._plan(), self._engine()
        if plan is not None:
            self._last.update(plan.facts)
        if engine is not None and engine.expert_loader is not None:
            self._last[ROUTED_ROWS] = engine.expert_loader.routed_rows(engine.layout.ranks).to_fact()
        return dict(self._last)

    def continue_from(self, facts: Mapping[str, Any]) -> None:
        plan, engine = self._plan(), self._engine()
        if engine is not None and engine.expert_loader is not None:
            engine.expert_loader.continue_rows(RoutedRows.of_rank(facts, engine.layout.ranks.rank))
        if plan is not None and plan.resume(facts) and engine is not None:
            engine.plan_again()

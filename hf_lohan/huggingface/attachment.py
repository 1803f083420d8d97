"""Offloads a model that is in memory, or the model of a checkpoint, which is never in memory as a whole."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import GradientState
from torch import nn

from hf_lohan.activations import chunked_head_of
from hf_lohan.checkpoint.model_description import describe_model
from hf_lohan.compat.accelerate_private import is_prepared
from hf_lohan.compat.torch_private import cpu_has_bfloat16_units
from hf_lohan.compat.transformers_private import one_expert
from hf_lohan.config import OffloadConfig, ResolvedConfig
from hf_lohan.device import Device
from hf_lohan.engine import (
    EngineEvents,
    OffloadEngine,
    OutOfMemoryAdvice,
    ParameterAccess,
    StepsSoFar,
    Tiers,
    check_equal_weights,
    drain_model,
)
from hf_lohan.experts import ROUTED_ROWS, RoutedRows
from hf_lohan.huggingface.equal_runs import check_equal_configs
from hf_lohan.huggingface.local_run import LocalRun
from hf_lohan.huggingface.models.adapters import adding_adapters, check_peft_config
from hf_lohan.huggingface.models.recipe import ModelRecipe
from hf_lohan.huggingface.models.saving import dtypes_of, dtypes_to_save
from hf_lohan.huggingface.offloaded_model import (
    attach_to,
    recompute_without_reentry,
    run_by_engine,
    use_store,
)
from hf_lohan.huggingface.optimizers import make_optimizer_choice
from hf_lohan.huggingface.progress import long_work, show_blocks
from hf_lohan.huggingface.ranks import StepTimeouts, check_rank_model
from hf_lohan.huggingface.sequences import check_model_of_rows
from hf_lohan.model import Rules, why_whole
from hf_lohan.planning import OffloadLayout, PlannedStep, RunPlan, StepShape, chunked_loss_of

logger = logging.getLogger(__name__)


def offload_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    torch_device: torch.device | str,
    default_ssd_path: str | Path,
    working_dtype: torch.dtype | None = None,
    hold_gradients: bool = True,
    sums_gradients: bool = True,
    rules: Rules | None = None,
    device: Device | None = None,
    is_beside_others: bool = False,
) -> OffloadEngine:
    """Move the weights of a model from memory to the store, and attach an engine to the model. The model then computes
    in `working_dtype` (default: each parameter's dtype). Float32 weights keep their exact values as masters. `rules`
    returns each parameter's update rule. `device` replaces the device for `torch_device`. `is_beside_others`: see
    `LocalRun.tiers`. Raises ValueError, before any weight is changed, if the model, the budgets, the paths or the store
    of an earlier run do not allow it."""
    run = LocalRun.begin(config, torch_device, default_ssd_path, device)
    recompute_without_reentry(model)
    settings, lay_out = run.fit(
        model,
        run.settings,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        rules=rules,
    )
    layout = lay_out(model)
    layout = replace(layout, saved_dtypes=dtypes_to_save(layout, settings.save_dtype, dtypes_of(model)))
    check_equal_configs(getattr(model, "config", None), run.links)
    check_equal_weights(model.named_parameters(), run.links)
    with run.tiers(layout, settings, is_beside_others=is_beside_others) as tiers:
        access = ParameterAccess.to_load(tiers.store, layout.blocks, tiers.states, tiers.links)
        drain_model(layout.blocks, access)
        return attach(model, layout, tiers, settings)


def from_pretrained(
    path: str | Path,
    offload: Any = "lohan",
    *,
    torch_device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    bf16: bool = False,
    default_ssd_path: str | Path = "lohan_store",
    hold_gradients: bool = True,
    sums_gradients: bool = True,
    model_class: Any = None,
    is_trained: bool = True,
    optimizer: Any = None,
    peft_config: Any = None,
    quantization_config: Any = None,
    finish: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model for training, and stream its weights to the store.

    Args:
        path: a checkpoint folder, or the name of a model in the Hub, which is downloaded to its cache.
        offload: anything that `OffloadConfig.load` takes.
        torch_device: the device that computes. None is the GPU, or the CPU if there is no GPU.
        dtype: dtype of the working weights. "auto" is the checkpoint's dtype, or float32 for float16.
        bf16: True means bfloat16 working weights. Their float32 masters equal the checkpoint's values exactly.
        default_ssd_path: the store's folder if the configuration has no path.
        hold_gradients: hold gradients until `step()`, as clipping and accumulation require. False applies them in
            backward.
        sums_gradients: hold gradients in float32, because steps have several backwards. False holds gradients of
            bfloat16 weights in bfloat16, in half the memory, and writes sums of several backwards to the SSD.
            Results are the same.
        model_class: a class or an auto class of transformers. The default is the class that the config names.
        is_trained: False freezes all weights. The store then has no optimizer states, and one version of each record.
        optimizer: a class of `torch.optim`, or (class, keyword arguments). The store has its states. The default is the
            configured optimizer, or AdamW.
        peft_config: a configuration of PEFT. The result is then a `PeftModel`, and its base is streamed too.
        quantization_config: a `BitsAndBytesConfig` with ``load_in_4bit=True``. It sets the setting `quantize`.
        finish: a function to use instead of `peft_config`. It is called with the model before offloading, and returns
            the model with adapters or other changes. It is called twice: with a model on the meta device, and
            with the streamed model, whose weights `finish` may read. Weights that `finish` replaces, such as resized
            embeddings, are in memory as a whole.
        kwargs: arguments of the model class's `from_pretrained`, such as `revision` and `trust_remote_code`, and values
            for the checkpoint's config (`num_labels`, `attention_dropout`).

    Raises ValueError, before weights are read, for a model that does not exist, for unknown keys, for budgets or
    capacities that are too small, for another model's store, and for dtypes that cannot be trained.
    """
    if peft_config is not None:
        if finish is not None:
            raise ValueError("peft_config and finish are both given; add the adapters in finish alone")
        check_peft_config(peft_config)
        finish = adding_adapters(peft_config)
    working_dtype = torch.bfloat16 if bf16 else None
    run = LocalRun.begin(offload, torch_device, default_ssd_path)
    recipe = ModelRecipe(
        path,
        kwargs,
        run.settings,
        run.links,
        dtype=dtype,
        compute_dtype=working_dtype,
        quantization_config=quantization_config,
        model_class=model_class,
    )
    recipe.build(finish, is_trained=is_trained)
    settings, lay_out = run.fit(
        recipe.skeleton,
        recipe.settings,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        rules=None if optimizer is None else make_optimizer_choice(optimizer).rules,
    )
    layout = lay_out(recipe.skeleton)
    # A float16 checkpoint that is trained with bf16=True is saved in 2 bytes per weight again.
    loaded_dtypes = {} if recipe.was_float16 else dtypes_of(recipe.skeleton)
    saved_dtypes = dtypes_to_save(layout, settings.save_dtype, loaded_dtypes)
    recipe.check(layout)
    with run.tiers(layout, settings, is_beside_others=is_trained) as tiers:
        model = recipe.stream(tiers, layout, casts=bf16)
        final = lay_out(model)
        if final.identity != layout.identity:
            raise ValueError(
                "the loaded model differs from the model that its config describes, so the store does not fit; load "
                "the model in memory, and pass it instead of its path"
            )
        return attach(model, replace(final, saved_dtypes=saved_dtypes), tiers, settings).model


def attach(model: Any, layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig) -> OffloadEngine:
    """Attach an engine to a model whose weights are in the store. Afterwards the model saves weights from the store,
    and recomputes activations as configured."""
    _tell_what_is_slow(model, layout, config, tiers.device)
    check_rank_model(model, tiers.links.ranks)
    timeouts = StepTimeouts(tiers.links, config.ranks)
    if config.ranks.per_row > 1:
        check_model_of_rows(model)
    is_direct = tiers.direct.hasher is not None
    plan = RunPlan(model, layout, config, tiers.device, tiers.store.durability, tiers.links, moves_files=is_direct)
    steps = _PlannedSteps(model, plan, timeouts)
    events = EngineEvents(
        is_final_backward=steps.is_final_backward,
        plan=steps.plan,
        plan_order=steps.plan_order,
        step_began=steps.began,
        block_began=show_blocks(layout.model_blocks, tiers.device.timeline),
    )
    with OutOfMemoryAdvice(config).added_to_errors():
        engine = OffloadEngine(model, layout, tiers, config, events, one_expert)

    run_by_engine(engine, model, plan)
    chunked_head = chunked_head_of(model, chunked_loss_of(config))
    if chunked_head is not None:
        chunked_head.attach(last_step=lambda: engine.last_step)
    attach_to(model, engine, plan=plan, chunked_head=chunked_head)
    use_store(engine, model)

    facts = _RunFacts(plan, engine)
    engine.commits.add_facts(facts.of_commit, facts.continue_from)
    engine.commits.describe_first(functools.partial(describe_model, model, engine))
    return engine


def _tell_what_is_slow(model: nn.Module, layout: OffloadLayout, config: ResolvedConfig, device: Device) -> None:
    if config.embedding == "rows" and layout.model_blocks.table is None:
        logger.info("embedding: the whole table is streamed, because %s", why_whole(model))
    computes_bfloat16 = device.torch_device.type == "cpu" and layout.master.working_dtype == torch.bfloat16
    if computes_bfloat16 and not cpu_has_bfloat16_units():
        logger.warning(
            "this CPU has no bfloat16 units, so bfloat16 matmuls run up to 200 times slower than float32 matmuls; "
            "train in float32, or on a GPU"
        )


class _PlannedSteps:
    """Tells the engine which backward of a step is the last, and plans steps."""

    def __init__(self, model: nn.Module, plan: RunPlan, timeouts: StepTimeouts) -> None:
        self._model = weakref.ref(model)
        self._plan = plan
        self._timeouts = timeouts

    def is_final_backward(self) -> bool:
        """Return whether this backward is the last of its step. The model's `Accelerator` decides this. Without an
        `Accelerator` each step has one backward."""
        return not is_prepared(self._model()) or bool(GradientState().sync_gradients)

    def plan(self, shape: StepShape, layout: OffloadLayout) -> PlannedStep | None:
        """Plan a step with the number of micro-batches in the settings of Trainer or `Accelerator`."""
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
        return self._plan.step_began(
            steps.clip_rate, steps.routing, is_as_planned=steps.is_as_planned, saved_share=steps.saved_share
        )


class _RunFacts:
    """Facts for commits: choices of the plan, and the number of rows of each expert. Commits keep this object. It has
    only weak references to the plan and the engine, because these keep the model alive."""

    def __init__(self, plan: RunPlan, engine: OffloadEngine) -> None:
        self._plan, self._engine = weakref.ref(plan), weakref.ref(engine)
        self._last: dict[str, Any] = {}
        """Facts of the previous commit. They are used if the model was deleted."""

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

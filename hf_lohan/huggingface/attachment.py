"""Attaches an engine to a model: configuration, store, recomputation, and saving from the store."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from accelerate.state import GradientState
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_lohan.activations import ChunkedHead, chunked_head_of, has_foreign_forward
from hf_lohan.checkpoint.generations import RunStores
from hf_lohan.checkpoint.model_description import describe_model
from hf_lohan.compat.accelerate_private import is_prepared
from hf_lohan.compat.torch_private import cpu_has_bfloat16_units
from hf_lohan.compat.transformers_private import (
    grouped_experts,
    is_reentrant,
    make_non_reentrant,
    one_expert,
    register_experts,
    run_experts_by,
    run_layers_by,
)
from hf_lohan.config import OffloadConfig, ResolvedConfig
from hf_lohan.device import Device, device_for
from hf_lohan.engine import (
    EngineEvents,
    OffloadEngine,
    OutOfMemoryAdvice,
    ParameterAccess,
    StepsSoFar,
    Tiers,
    check_equal_weights,
    drain_model,
    open_tiers,
    wait_until_closed,
)
from hf_lohan.experts import ROUTED_ROWS, RoutedRows, StreamedExperts, run_experts
from hf_lohan.files import StoreInUseError
from hf_lohan.files.directories import keep_from_others
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.equal_runs import check_equal_configs
from hf_lohan.huggingface.models.adapters import (
    PendingMerges,
    merge_through_store,
    needs_all_kept,
    refuse_allocation,
)
from hf_lohan.huggingface.models.saving import StoredModel, dtypes_to_save, save_pretrained_from_store
from hf_lohan.huggingface.models.state_dicts import is_of_diffusers, save_diffusers_model
from hf_lohan.huggingface.progress import long_work, show_blocks
from hf_lohan.huggingface.ranks import (
    StepTimeouts,
    at_stores,
    check_layout,
    check_one_model,
    check_rank_model,
    generate_together,
    links_to_other_ranks,
    refuse_changed,
)
from hf_lohan.huggingface.sequences import check_model_of_rows
from hf_lohan.model import (
    Rules,
    experts_as_stored,
    has_adapters,
    is_of_peft,
    is_peft_model,
    owners_as_stored,
    why_whole,
)
from hf_lohan.planning import (
    OffloadLayout,
    PlannedStep,
    RunPlan,
    StepShape,
    chunked_loss_of,
    lay_out,
)
from hf_lohan.planning.layout import resolved_here
from hf_lohan.planning.run_plan import CHUNKS_NAME
from hf_lohan.threads import keep_freed_memory, set_compute_threads
from hf_lohan.timeline import Timeline

logger = logging.getLogger(__name__)

_ENGINE_ATTRIBUTE = "_lohan_engine"
_PLAN_ATTRIBUTE = "_lohan_run_plan"
_HEAD_ATTRIBUTE = "_lohan_chunked_head"


def engine_of(model: nn.Module) -> OffloadEngine | None:
    """Return the engine of a model; None if the model is not offloaded."""
    engine = getattr(model, _ENGINE_ATTRIBUTE, None)
    assert engine is None or isinstance(engine, OffloadEngine)
    return engine


_launched_with: OffloadConfig | None = None


@contextlib.contextmanager
def launched_with(config: OffloadConfig) -> Iterator[None]:
    """Offload the models that a script makes in this context with these settings. The script's own settings replace
    them with a warning, except `trace`."""
    global _launched_with
    before, _launched_with = _launched_with, config
    try:
        yield
    finally:
        _launched_with = before


@contextlib.contextmanager
def answering_out_of_memory(model: Callable[[], nn.Module], config: OffloadConfig) -> Iterator[None]:
    """In this context, add advice to out-of-memory errors, even before the model has an engine."""
    try:
        yield
    except RuntimeError as error:
        engine = engine_of(model())
        (OutOfMemoryAdvice(config) if engine is None else engine.planned_memory.out_of_memory).add_to(error)
        raise


def open_device(config: OffloadConfig, torch_device: torch.device | str) -> Device:
    """Open the compute device. With `trace` its timeline starts to record."""
    keep_from_others()
    is_tracing = config.trace or (_launched_with is not None and _launched_with.trace)
    return device_for(torch_device, Timeline(is_tracing=is_tracing))


def settings_given(offload: Any) -> OffloadConfig:
    """Load a script's settings. Warns if they replace the settings of `lohan launch`."""
    config, launched = OffloadConfig.load(offload), _launched_with or OffloadConfig()
    if replace(launched, trace=False) not in (OffloadConfig(), replace(config, trace=False)):
        logger.warning("the script has its own offload settings; those of `lohan launch --offload` are not used")
    return config


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
    `open_tiers_or_take_over`.
    Raises ValueError, before any weight is changed, if the model, the budgets, the paths or an earlier run there do not
    allow it."""
    device = device or open_device(config, torch_device)
    config, found = at_stores(config, default_ssd_path, links_to_other_ranks())
    config = activations_kept_if_needed(model, resolved_here(config, device, default_ssd_path, links_to_other_ranks()))
    recompute_without_reentry(model)
    refuse_chunks(model, config)
    config = experts_as_stored(model, config, links_to_other_ranks())
    layout = lay_out(
        model,
        config,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        memory_is_host=device.memory_is_host,
        rules=rules,
        ranks=links_to_other_ranks().ranks,
        owners=owners_as_stored(model, config, links_to_other_ranks()),
    )
    layout = replace(layout, saved_dtypes=dtypes_to_save(layout, config.save_dtype, dtypes_of(model)))
    check_equal_configs(getattr(model, "config", None), links_to_other_ranks())
    check_equal_weights(model.named_parameters(), links_to_other_ranks())
    tiers = open_tiers_or_take_over(layout, config, device, found, is_beside_others=is_beside_others)
    try:
        access = ParameterAccess.to_load(tiers.store, layout.blocks, tiers.states, tiers.links)
        drain_model(layout.blocks, access)
        return attach(model, layout, tiers, config)
    except BaseException:
        tiers.close()
        raise


def dtypes_of(model: nn.Module) -> dict[str, torch.dtype]:
    return {name: parameter.dtype for name, parameter in model.named_parameters()}


def open_tiers_or_take_over(
    layout: OffloadLayout,
    config: ResolvedConfig,
    device: Device,
    found: RunStores,
    *,
    is_beside_others: bool = False,
) -> Tiers:
    """Open the tiers and set up threads and memory. If an engine in this process (such as that of an earlier Trainer in
    a notebook) has the store open for the same model, close it first. ``found``: what the run finds on its ssd paths.
    ``is_beside_others``: whether it may have stores of another number of ranks, which this run may continue."""
    check_layout(layout, config, found, links_to_other_ranks(), is_beside_others=is_beside_others)
    if layout.model_blocks.experts and config.chunks.layers not in (False, "auto"):
        raise ValueError(
            f"chunks.layers: {config.chunks.layers} would load each expert again for every chunk, because experts "
            "stream one by one; set chunks.layers: false, or experts: with_layer"
        )
    if layout.model_blocks.experts and config.ranks.per_row > 1:
        raise ValueError(
            f"ranks.per_row: {config.ranks.per_row} divides the tokens of rows among ranks, and the experts of this "
            "model stream one by one; set experts: with_layer, or leave ranks.per_row out"
        )
    _refuse_a_second_model(config)
    set_compute_threads(config.cpu_threads)
    keep_freed_memory()
    try:
        tiers = open_tiers(layout, config, device, links_to_other_ranks())
    except StoreInUseError:
        folders = {os.path.realpath(ssd.path) for ssd in config.ssd}
        holders = [engine for engine in _attached if not engine.is_closed and folders & engine.store_folders]
        if any(engine.layout.identity != layout.identity for engine in holders):
            raise
        for engine in holders:
            logger.warning(
                "closing the engine of an earlier model in this process, because a new engine uses its store"
            )
            engine.close()
        wait_until_closed()  # waits for engines of models that were just deleted
        tiers = open_tiers(layout, config, device, links_to_other_ranks())
    try:
        refuse_changed(found, tiers.links)  # from now on the lock keeps others from resharding
    except BaseException:
        tiers.close()
        raise
    return tiers


def _refuse_a_second_model(config: ResolvedConfig) -> None:
    folders = {os.path.realpath(ssd.path) for ssd in config.ssd}
    others = [engine.model for engine in _attached if not engine.is_closed and not folders & engine.store_folders]
    check_one_model(others, links_to_other_ranks().ranks)


_attached: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()
_num_attached = 0


def num_offloaded() -> int:
    return _num_attached


def attach(model: Any, layout: OffloadLayout, tiers: Tiers, config: ResolvedConfig) -> OffloadEngine:
    """Attach an engine to a model whose weights are in the store. The model then saves its weights from the store, and
    recomputes activations as configured."""
    check_rank_model(model, tiers.links.ranks)
    if config.ranks.per_row > 1:
        check_model_of_rows(model)
    config = replace(config, trace=tiers.device.timeline.is_tracing)
    if config.activations != "keep" and needs_all_kept(model):
        logger.info("activations are kept, because layers cannot be recomputed under learned prefixes")
        config = config.with_all_activations_kept()
    if config.embedding == "rows" and layout.model_blocks.table is None:
        logger.info("embedding: whole, because %s", why_whole(model))
    is_direct = tiers.direct is not None
    plan = RunPlan(model, layout, config, tiers.device, tiers.store.durability, tiers.links, moves_files=is_direct)
    timeouts = StepTimeouts(tiers.links, config)

    def step_began(steps: StepsSoFar) -> PlannedStep | None:
        timeouts.step_began()
        return plan.step_began(steps.clip_rate, steps.routing, is_as_planned=steps.is_as_planned)

    events = EngineEvents(
        is_final_backward=functools.partial(_is_final_backward, weakref.ref(model)),
        plan=functools.partial(_plan_step, weakref.ref(model), plan, timeouts),
        plan_order=functools.partial(_plan_order, plan),
        step_began=step_began,
        block_began=show_blocks(layout.model_blocks, tiers.device.timeline),
    )
    with OutOfMemoryAdvice(config).added_to_errors():
        engine = OffloadEngine(model, layout, tiers, config, events, compute_expert)
    stream_experts(engine.experts)
    generate_together(model, tiers.links, functools.partial(_is_closed, weakref.ref(engine)))
    global _num_attached
    _num_attached += 1
    _attached.add(engine)
    if getattr(model, "config", None) is not None:
        model.config.dtype = engine.layout.master.working_dtype
    _save_through(engine, model)
    if has_adapters(model):
        packed = {part.parameter for part in engine.parameter_slices if part.packed is not None}
        merge_through_store(model, functools.partial(_save_through, engine), packed)
    model.zero_grad = functools.partial(_zero_grad, engine)
    for name, advice in _REFUSED_METHODS.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(_refuse, name, advice))
    refuse_allocation(model)
    if engine.config.activations != "keep":
        enable_recompute(model, engine)
    if not layout.model_blocks.experts:
        names = {module: name for name, module in model.named_modules()}
        layers = {layer: names[layer] for layer in layout.model_blocks.layers}
        file = os.path.join(tiers.store.paths[0].path, CHUNKS_NAME)
        plan.may_cut(run_layers_in_chunks(model, engine.activations, layers, tiers.row_memory), file)
    engine.commits.add_facts(
        functools.partial(_run_facts, weakref.ref(plan), weakref.ref(engine), {}),
        functools.partial(_continue_run, weakref.ref(plan), weakref.ref(engine)),
    )
    computes_bfloat16 = tiers.device.torch_device.type == "cpu" and layout.master.working_dtype == torch.bfloat16
    if computes_bfloat16 and not cpu_has_bfloat16_units():
        logger.warning(
            "this CPU has no bfloat16 units, so bfloat16 matmuls run up to 200 times slower than float32 ones; train "
            "in float32, or on a GPU"
        )
    setattr(model, _PLAN_ATTRIBUTE, plan)
    chunked_head = chunked_head_of(model, chunked_loss_of(config))
    if chunked_head is not None:
        chunked_head.attach(last_step=lambda: engine.last_step)
        setattr(model, _HEAD_ATTRIBUTE, chunked_head)
    engine.commits.describe_first(functools.partial(describe_model, model, engine))
    return engine


def _is_closed(engine: weakref.ref[OffloadEngine]) -> bool:
    return (attached := engine()) is None or attached.is_closed


def _run_facts(plan: weakref.ref[RunPlan], engine: weakref.ref[OffloadEngine], last: dict[str, Any]) -> dict[str, Any]:
    """Return what a commit says of the plan, and the rows that each expert had. The commits must not keep the plan,
    which has the model. ``last``: what the commit before said, for the commit of a model that was deleted."""
    if (planned := plan()) is not None:
        last.update(planned.facts)
    if (attached := engine()) is not None and attached.expert_loader is not None:
        last[ROUTED_ROWS] = attached.expert_loader.routed_rows(attached.layout.ranks).to_fact()
    return dict(last)


def _continue_run(plan: weakref.ref[RunPlan], engine: weakref.ref[OffloadEngine], facts: Mapping[str, Any]) -> None:
    attached, planned = engine(), plan()
    if attached is not None and attached.expert_loader is not None:
        attached.expert_loader.continue_rows(RoutedRows.of_rank(facts, attached.layout.ranks.rank))
    if planned is not None and planned.resume(facts) and attached is not None:
        attached.plan_again()


def _save_through(engine: OffloadEngine, model: Any, merges: PendingMerges | None = None) -> None:
    """Make ``model.save_pretrained`` save the weights from the engine's store, with adapters merged into them."""
    setattr(model, _ENGINE_ATTRIBUTE, engine)
    stored = replace(StoredModel.from_engine(engine), model=model, merges=merges)
    if isinstance(model, PreTrainedModel) or is_peft_model(model):
        model.save_pretrained = functools.partial(save_pretrained_from_store, stored, type(model).save_pretrained)
    elif is_of_diffusers(model):
        model.save_pretrained = functools.partial(save_diffusers_model, stored)
    elif hasattr(model, "save_pretrained") and not is_of_peft(model):  # PEFT itself refuses to save mixed adapters
        model.save_pretrained = functools.partial(_refuse_saving, type(model).__name__)


def _is_final_backward(model: weakref.ref[nn.Module]) -> bool:
    """Return whether a backward is the last one of its step. The model's `Accelerator` decides it. Without an
    `Accelerator` every backward is."""
    return not is_prepared(model()) or bool(GradientState().sync_gradients)


def _planning() -> contextlib.AbstractContextManager[None]:
    return long_work("planning the first step (on a new machine this measures the hardware)")


def _plan_step(
    model: weakref.ref[nn.Module], plan: RunPlan, timeouts: StepTimeouts, shape: StepShape, layout: OffloadLayout
) -> PlannedStep | None:
    """Plan a step with the number of micro-batches for which Trainer or `Accelerator` is configured."""
    num_micro_batches = max(plan.num_micro_batches, GradientState().num_steps if is_prepared(model()) else 1)
    with _planning():
        planned = plan.plan_batches(
            replace(shape, num_micro_batches=num_micro_batches if shape.num_together == 1 else 1), layout
        )
    timeouts.step_planned()
    return planned


def _plan_order(plan: RunPlan, shape: StepShape, layout: OffloadLayout) -> PlannedStep | None:
    with _planning():
        return plan.plan_batches(shape, layout, may_run_together=True)


def run_plan_of(engine: OffloadEngine) -> RunPlan | None:
    """Return the plan of an attached engine; None if it has none."""
    plan = getattr(engine.model, _PLAN_ATTRIBUTE, None)
    assert plan is None or isinstance(plan, RunPlan)
    return plan


def chunked_head_at(model: nn.Module) -> ChunkedHead | None:
    """Return the head that computes a model's large logits in chunks; None if the model has no such head."""
    head = getattr(model, _HEAD_ATTRIBUTE, None)
    assert head is None or isinstance(head, ChunkedHead)
    return head


_REFUSED_METHODS = {
    "resize_token_embeddings": "resize the embeddings before the model is offloaded: pass a model in memory, or "
    "the path of a checkpoint that was saved with its new size",
    "load_state_dict": "resume from a checkpoint, or load the weights before the model is offloaded",
}


def _refuse(name: str, advice: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(f"{name} cannot change weights in the store; {advice}")


def _refuse_saving(class_name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"save_pretrained of {class_name} cannot read weights from the store, because {class_name} is not a class of "
        "transformers, PEFT or diffusers; use accelerator.save_model(model, folder) or trainer.save_model(folder), "
        "which save the state dict"
    )


def _zero_grad(engine: OffloadEngine, set_to_none: bool = True) -> None:
    """Do what `Module.zero_grad` does, and also drop gradients in host memory."""
    engine.drop_gradients(to_none=set_to_none)
    type(engine.model).zero_grad(engine.model, set_to_none)


def enable_recompute(model: nn.Module, engine: OffloadEngine) -> None:
    """Enable non-reentrant activation checkpointing, so that each weight's gradient arrives once. The engine runs the
    layers, and keeps or swaps activations as planned."""
    run_layers_by(model, engine.activations.run_layer)
    enable_checkpointing(model)


def activations_kept_if_needed(model: nn.Module, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration. If the model's class cannot recompute its layers, set `activations: keep` and warn."""
    if config.activations == "keep" or _can_recompute(model):
        return config
    logger.warning(
        "%s cannot recompute its layers (see its supports_gradient_checkpointing), so activations: %s is changed to "
        "keep, and all activations stay on the device",
        type(model).__name__,
        config.activations,
    )
    return config.with_all_activations_kept()


def _can_recompute(model: nn.Module) -> bool:
    can_enable = any(hasattr(model, f"{kind}_checkpointing_enable") for kind in ("activation", "gradient"))
    if can_enable and getattr(model, "supports_gradient_checkpointing", False):
        return True
    return is_of_diffusers(model) and bool(getattr(model, "_supports_gradient_checkpointing", False))


def enable_checkpointing(model: Any) -> None:
    """Enable non-reentrant checkpointing of a model that supports it."""
    if is_of_diffusers(model):
        model.enable_gradient_checkpointing()
    elif hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    else:  # the name before transformers 5.23
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def refuse_chunks(model: Any, config: ResolvedConfig) -> None:
    """Raise ValueError if `chunks.loss` is true and the head cannot compute logits in chunks."""
    chunked_loss = chunked_loss_of(config) if config.chunks.loss is True else None
    if chunked_loss is not None and chunked_head_of(model, chunked_loss) is None:
        head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
        kind = "no module" if head is None else type(head).__name__
        if head is not None and has_foreign_forward(head):
            kind += " with a replaced forward"
        raise ValueError(
            f"chunks.loss: true needs a torch.nn.Linear as head, and the head of {type(model).__name__} is {kind}; "
            "set chunks.loss: auto or false"
        )


def recompute_without_reentry(model: nn.Module) -> None:
    """Replace reentrant checkpointing, which fires gradient hooks twice, by non-reentrant checkpointing. Results are
    the same."""
    reentrant = [module for module in model.modules() if is_reentrant(module)]
    for module in reentrant:
        make_non_reentrant(module)
    if reentrant:
        logger.warning(
            "use_reentrant=True is ignored: activation checkpointing is non-reentrant under offload, with the same "
            "results; set use_reentrant=False"
        )


# Mixture of experts. Transformers calls the engine's implementation.

_EXPERTS_IMPLEMENTATION = "lohan"
"""The name under which transformers calls streamed experts."""

_streamed_experts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StreamedExperts]] = weakref.WeakKeyDictionary()
"""The streamed experts, by the module that they replace."""

compute_expert = one_expert


def stream_experts(experts: Mapping[nn.Module, StreamedExperts]) -> None:
    """Stream the experts of these modules one by one."""
    if not experts:
        return
    register_experts(_EXPERTS_IMPLEMENTATION, _experts_forward)
    _streamed_experts.update({module: weakref.ref(streamed) for module, streamed in experts.items()})
    run_experts_by(experts, _EXPERTS_IMPLEMENTATION)


def _experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    reference = _streamed_experts.get(module)
    streamed = reference() if reference is not None else None
    if streamed is None:  # a module of another model with the same configuration object
        return grouped_experts(module, hidden_states, top_k_index, top_k_weights)
    return run_experts(streamed, hidden_states, top_k_index, top_k_weights)

"""Changes a model that is offloaded, so that the engine runs its layers and experts, and its methods use the store."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_lohan.activations import ChunkedHead, chunked_head_of, has_foreign_forward
from hf_lohan.compat.transformers_private import (
    cache_among,
    fills_cache,
    grouped_experts,
    is_reentrant,
    make_non_reentrant,
    put_cache,
    register_experts,
    run_experts_by,
    run_layers_by,
)
from hf_lohan.config import OffloadConfig, ResolvedConfig
from hf_lohan.engine import OffloadEngine, OutOfMemoryAdvice
from hf_lohan.experts import StreamedExperts, run_experts
from hf_lohan.huggingface.attention import run_layers_in_chunks
from hf_lohan.huggingface.models.adapters import PendingMerges, merge_through_store, refuse_allocation
from hf_lohan.huggingface.models.saving import StoredModel, save_pretrained_from_store
from hf_lohan.huggingface.models.state_dicts import is_of_diffusers, save_diffusers_model
from hf_lohan.huggingface.ranks import generate_together
from hf_lohan.model import base_of, has_adapters, is_of_peft, is_peft_model, wrapped_models
from hf_lohan.planning import RunPlan, chunked_loss_of
from hf_lohan.planning.run_plan import CHUNKS_NAME

logger = logging.getLogger(__name__)

_ATTRIBUTE = "_lohan"
_engines: weakref.WeakSet[OffloadEngine] = weakref.WeakSet()


@dataclass(frozen=True)
class Attached:
    """The objects that belong to an offloaded model."""

    engine: OffloadEngine | None = None
    plan: RunPlan | None = None
    chunked_head: ChunkedHead | None = None
    """The head that computes large logits in chunks."""


def attach_to(model: nn.Module, engine: OffloadEngine, **rest: Any) -> None:
    setattr(model, _ATTRIBUTE, Attached(engine, **rest))
    _engines.add(engine)


def open_engines() -> Iterator[OffloadEngine]:
    """Iterate over the engines of this process that are not closed."""
    return (engine for engine in _engines if not engine.is_closed)


def attached_to(model: nn.Module) -> Attached:
    """Return the objects that belong to a model. All are None if it is not offloaded."""
    attached = getattr(model, _ATTRIBUTE, None) or Attached()
    assert isinstance(attached, Attached)
    return attached


def engine_of(model: nn.Module) -> OffloadEngine | None:
    """Return the engine of a model, or None if the model is not offloaded."""
    return attached_to(model).engine


def run_plan_of(engine: OffloadEngine) -> RunPlan | None:
    """Return the plan of an attached engine, or None if it has no plan."""
    return attached_to(engine.model).plan


@contextlib.contextmanager
def answering_out_of_memory(model: Callable[[], nn.Module], config: OffloadConfig) -> Iterator[None]:
    """In this context, advice is added to out-of-memory errors, also before the model has an engine."""
    try:
        yield
    except RuntimeError as error:
        engine = engine_of(model())
        (OutOfMemoryAdvice(config) if engine is None else engine.planned_memory.out_of_memory).add_to(error)
        raise


def use_store(engine: OffloadEngine, model: Any) -> None:
    """Make the methods of a model use the weights and gradients of the engine, or raise errors."""
    _save_from_store(engine, model)
    model.zero_grad = functools.partial(_zero_grad, engine)
    for name, advice in _REFUSED_METHODS.items():
        if hasattr(model, name):
            setattr(model, name, functools.partial(_refuse, name, advice))
    if has_adapters(model):
        packed = {part.parameter for part in engine.parameter_slices if part.packed is not None}
        merge_through_store(model, functools.partial(_use_as_base, engine), packed)
        refuse_allocation(model)


def _use_as_base(engine: OffloadEngine, base: Any, merges: PendingMerges) -> None:
    attach_to(base, engine)
    _save_from_store(engine, base, merges)


def _save_from_store(engine: OffloadEngine, model: Any, merges: PendingMerges | None = None) -> None:
    stored = replace(StoredModel.from_engine(engine), model=model, merges=merges)
    if isinstance(model, PreTrainedModel) or is_peft_model(model):
        model.save_pretrained = functools.partial(save_pretrained_from_store, stored, type(model).save_pretrained)
    elif is_of_diffusers(model):
        model.save_pretrained = functools.partial(save_diffusers_model, stored)
    elif hasattr(model, "save_pretrained") and not is_of_peft(model):  # PEFT itself refuses to save mixed adapters
        model.save_pretrained = functools.partial(_refuse_saving, type(model).__name__)


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
    """Same as `Module.zero_grad`, but also drop gradients in host memory."""
    engine.drop_gradients(to_none=set_to_none)
    type(engine.model).zero_grad(engine.model, set_to_none)


def run_by_engine(engine: OffloadEngine, model: Any, plan: RunPlan) -> None:
    """Let the engine run the model's layers and experts."""
    if getattr(model, "config", None) is not None:
        model.config.dtype = engine.layout.master.working_dtype
    stream_experts(engine.experts)
    if engine.config.activations != "keep":
        enable_recompute(model, engine)
    model_blocks, tiers = engine.layout.model_blocks, engine.tiers
    if not model_blocks.experts:
        names = {module: name for name, module in model.named_modules()}
        layers = {layer: names[layer] for layer in model_blocks.layers}
        file = os.path.join(tiers.store.paths[0].path, CHUNKS_NAME)
        plan.may_cut(run_layers_in_chunks(model, engine.activations, layers, tiers.row_memory), file)
    generate_together(model, engine.links, functools.partial(_is_closed, weakref.ref(engine)))


def _is_closed(engine: weakref.ref[OffloadEngine]) -> bool:
    return (attached := engine()) is None or attached.is_closed


def enable_recompute(model: nn.Module, engine: OffloadEngine) -> None:
    """Enable non-reentrant activation checkpointing, because it computes each weight's gradient once. The engine runs
    the layers, and keeps or swaps activations as planned."""
    run_layers_by(model, engine.activations.run_layer)
    enable_checkpointing(model)
    keep_activations_beside_cache(model, _IS_RECOMPUTED)


class _NoCacheError(ValueError, AttributeError):
    """Shows the message of `_NoCache`. `hasattr` takes an AttributeError for "no", so libraries may probe outputs."""


class _NoCache:
    """Stands for the key-value cache of a training forward, which recomputed layers do not fill."""

    def __init__(self, why: str) -> None:
        self._why = why

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self.refuse()

    def __getitem__(self, index: Any) -> NoReturn:  # also called by `iter`
        self.refuse()

    def __len__(self) -> NoReturn:
        self.refuse()

    def __bool__(self) -> bool:
        return True

    def refuse(self) -> NoReturn:
        raise _NoCacheError(f"a training forward has filled no key-value cache, {self._why}")


_IS_RECOMPUTED = (
    "because its layers are recomputed in the backward; call the model with use_cache=True, which keeps the "
    "activations of this forward, or set activations: keep"
)


def keep_activations_beside_cache(model: nn.Module, why_none: str) -> None:
    """Run training forwards with a key-value cache without recomputation, because transformers takes the cache away
    from layers that are recomputed. A forward that was not asked for a cache returns a `_NoCache` if stock transformers
    returns a cache. ``why_none``: what its message says."""
    for whole in wrapped_models(model):
        _hook_forwards(whole, base_of(model), why_none)


def _hook_forwards(model: nn.Module, base: nn.Module, why_none: str) -> None:
    kept: list[Any] = []
    choices: dict[threading.Thread, bool | None] = {}
    """Whether the caller of each running forward wants a cache, or None for the default. Micro-batches that run
    together have a thread each."""

    def recompute_again() -> None:
        for thread in [thread for thread in list(choices) if not thread.is_alive()]:
            choices.pop(thread, None)
        if not any(choices.values()):
            for module in kept:
                module.gradient_checkpointing = True
            kept.clear()

    def before(_model: nn.Module, _args: Any, kwargs: Any) -> None:
        cache = cache_among(kwargs)
        if isinstance(cache, _NoCache):
            cache.refuse()
        own = threading.current_thread()
        choices.pop(own, None)
        recompute_again()  # torch does not call `after` if a BaseException, such as an interrupt, ends a forward
        choices[own] = True if cache is not None else kwargs.get("use_cache")
        if torch.is_grad_enabled() and choices[own]:
            kept.extend(module for module in model.modules() if vars(module).get("gradient_checkpointing"))
            for module in kept:
                module.gradient_checkpointing = False

    def after(_model: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        is_by_default = choices.pop(threading.current_thread(), False) is None  # other hooks may have changed kwargs
        if is_by_default and torch.is_grad_enabled() and model.training and fills_cache(base):
            put_cache(output, _NoCache(why_none))
        recompute_again()

    model.register_forward_pre_hook(before, with_kwargs=True)
    model.register_forward_hook(after, with_kwargs=True, always_call=True)


def activations_kept_if_needed(model: nn.Module, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration. If layers cannot be recomputed, set `activations: keep` and log a message."""
    if config.activations == "keep":
        return config
    if _has_learned_prefixes(model):
        logger.info("activations are kept, because layers cannot be recomputed under learned prefixes")
        return config.with_all_activations_kept()
    if _can_recompute(model):
        return config
    logger.warning(
        "%s cannot recompute its layers (see its supports_gradient_checkpointing), so activations: %s is changed to "
        "keep, and all activations stay on the device",
        type(model).__name__,
        config.activations,
    )
    return config.with_all_activations_kept()


def _has_learned_prefixes(model: Any) -> bool:
    """Return whether the model has prefix tuning or cartridges. transformers does not pass their keys and values to
    recomputed layers."""
    configs = getattr(model, "peft_config", {})
    return any(getattr(config, "peft_type", None) in ("PREFIX_TUNING", "CARTRIDGE") for config in configs.values())


def _can_recompute(model: nn.Module) -> bool:
    can_enable = any(hasattr(model, f"{kind}_checkpointing_enable") for kind in ("activation", "gradient"))
    if can_enable and getattr(model, "supports_gradient_checkpointing", False):
        return True
    return is_of_diffusers(model) and bool(getattr(model, "_supports_gradient_checkpointing", False))


def enable_checkpointing(model: Any) -> None:
    if hasattr(model, "activation_checkpointing_enable"):
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    elif is_of_diffusers(model):
        model.enable_gradient_checkpointing()
    else:  # the argument's name in transformers before 5.23
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
            f"chunks.loss: true needs a torch.nn.Linear as head, but the head of {type(model).__name__} is {kind}; "
            "set chunks.loss: auto or false"
        )


def recompute_without_reentry(model: nn.Module) -> None:
    """Replace reentrant checkpointing, which calls gradient hooks twice, with non-reentrant checkpointing. Results are
    the same."""
    reentrant = [module for module in model.modules() if is_reentrant(module)]
    for module in reentrant:
        make_non_reentrant(module)
    if reentrant:
        logger.warning(
            "use_reentrant=True is ignored: activation checkpointing is non-reentrant under offload, with the same "
            "results; set use_reentrant=False"
        )


# Mixture of experts. transformers calls the engine's implementation.

_EXPERTS_IMPLEMENTATION = "lohan"
"""Name of the experts implementation in transformers that calls streamed experts."""

_streamed_experts: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StreamedExperts]] = weakref.WeakKeyDictionary()
"""Maps each module of experts to the streamed experts that replace it."""


def stream_experts(experts: Mapping[nn.Module, StreamedExperts]) -> None:
    if not experts:
        return
    register_experts(_EXPERTS_IMPLEMENTATION, _experts_forward)
    _streamed_experts.update({module: weakref.ref(streamed) for module, streamed in experts.items()})
    run_experts_by(experts, _EXPERTS_IMPLEMENTATION)


def _experts_forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    reference = _streamed_experts.get(module)
    streamed = reference() if reference is not None else None
    if streamed is None:  # the module is of another model with the same configuration object
        return grouped_experts(module, hidden_states, top_k_index, top_k_weights)
    return run_experts(streamed, hidden_states, top_k_index, top_k_weights)

"""How an offloaded model runs its layers and experts: layers are recomputed, and experts stream one by one."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hf_lohan.activations import chunked_head_of, has_foreign_forward
from hf_lohan.compat.transformers_private import (
    grouped_experts,
    is_reentrant,
    make_non_reentrant,
    one_expert,
    register_experts,
    run_experts_by,
    run_layers_by,
)
from hf_lohan.config import ResolvedConfig
from hf_lohan.engine import OffloadEngine
from hf_lohan.experts import StreamedExperts, run_experts
from hf_lohan.huggingface.models.adapters import needs_all_kept
from hf_lohan.huggingface.models.state_dicts import is_of_diffusers
from hf_lohan.planning import chunked_loss_of

logger = logging.getLogger(__name__)


def enable_recompute(model: nn.Module, engine: OffloadEngine) -> None:
    """Enable non-reentrant activation checkpointing, so that each weight's gradient arrives once. The engine runs the
    layers, and keeps or swaps activations as planned."""
    run_layers_by(model, engine.activations.run_layer)
    enable_checkpointing(model)


def activations_kept_if_needed(model: nn.Module, config: ResolvedConfig) -> ResolvedConfig:
    """Return the configuration, with `activations: keep` and a message if the model's layers cannot be recomputed."""
    if config.activations == "keep":
        return config
    if needs_all_kept(model):
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

"""Has a model of transformers call an engine's experts in place of its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

from torch import Tensor, nn

from hf_lohan.compat.transformers_private import grouped_experts, one_expert, register_experts, run_experts_by
from hf_lohan.experts import StreamedExperts, run_experts

IMPLEMENTATION = "lohan"
"""By which transformers knows them."""

_streamed: weakref.WeakKeyDictionary[nn.Module, weakref.ref[StreamedExperts]] = weakref.WeakKeyDictionary()
"""By the module in whose place they are called."""

compute_expert = one_expert


def stream_experts(experts: Mapping[nn.Module, StreamedExperts]) -> None:
    """From now on these modules' experts come one by one."""
    if not experts:
        return
    register_experts(IMPLEMENTATION, _forward)
    _streamed.update({module: weakref.ref(streamed) for module, streamed in experts.items()})
    run_experts_by(experts, IMPLEMENTATION)


def _forward(module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    found = _streamed.get(module)
    streamed = found() if found is not None else None
    if streamed is None:  # of another model with the same configuration object
        return grouped_experts(module, hidden_states, top_k_index, top_k_weights)
    return run_experts(streamed, hidden_states, top_k_index, top_k_weights)

"""PEFT's merging, over a base that is in a store: one adapted layer at a time stands in memory."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hf_lohan.weights import gathered_parameters

_ONE_LAYER = ("merge", "unmerge")
_WHOLE_MODEL = ("merge_and_unload", "unload")


def merge_through_store(model: Any, adopt: Callable[[Any], None]) -> None:
    """Let `merge_and_unload`, `merge_adapter`, `unmerge_adapter` and `unload` of a `PeftModel` do what they always do.
    ``adopt`` is given the base model that they return, whose weights stay in the store."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in _ONE_LAYER:
                if hasattr(layer, name):
                    setattr(layer, name, functools.partial(_with_weights, layer, getattr(layer, name)))
    for owner in (model, model.base_model):
        for name in _WHOLE_MODEL:
            if hasattr(owner, name):
                setattr(owner, name, functools.partial(_adopted, getattr(owner, name), adopt))


def needs_all_kept(model: Any) -> bool:
    """Whether its layers are given keys and values of a prefix, which transformers takes from layers that run again."""
    configs = getattr(model, "peft_config", {})
    return any(getattr(config, "peft_type", None) == "PREFIX_TUNING" for config in configs.values())


def _with_weights(layer: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with gathered_parameters(layer):
        return stock(*args, **kwargs)


def _adopted(stock: Callable[..., Any], adopt: Callable[[Any], None], *args: Any, **kwargs: Any) -> Any:
    base = stock(*args, **kwargs)
    adopt(base)
    return base

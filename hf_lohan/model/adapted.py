"""Distinguishes the objects that have adapters of PEFT.

A `PeftModel` saves its adapters, and a `PeftMixedModel` (`get_peft_model(mixed=True)`) saves nothing itself. A model of
transformers may have adapters in its own layers. The model saves the active adapter after `model.add_adapter`, and all
its weights after `peft.inject_adapter_in_model`.
"""

from __future__ import annotations

from typing import Any


def has_adapters(model: Any) -> bool:
    return hasattr(model, "peft_config")


def is_of_peft(model: Any) -> bool:
    """Return whether a class of PEFT wraps the model."""
    return any(base.__module__.partition(".")[0] == "peft" for base in type(model).__mro__)


def is_peft_model(model: Any) -> bool:
    """Return whether the model is a `PeftModel`."""
    return is_of_peft(model) and hasattr(model, "get_base_model")


def base_of(model: Any) -> Any:
    """Return the model that a class of PEFT wraps, or the model itself."""
    if is_peft_model(model):
        return model.get_base_model()
    return model.base_model.model if is_of_peft(model) else model


def wrapped_models(model: Any) -> list[Any]:
    """Return the model, and the models within it down to `base_of` that a script may call in its place."""
    inner = [model.base_model] if is_of_peft(model) else []
    return list(dict.fromkeys([model, *inner, base_of(model)]))

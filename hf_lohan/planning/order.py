"""Whether a model's micro-batches may run in an order of our choosing: only where no number depends on it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from hf_lohan.compat.torch_private import has_gradient_hook

_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
_DRAWING = ("drop", "jitter")
"""In names of settings by which a forward draws random numbers: `attention_dropout`, `resid_pdrop`, `layerdrop`."""
_KNOWN_PACKAGES = ("transformers", "peft")


def why_in_turn(model: Any) -> str | None:
    """What in the model keeps its micro-batches from running together unasked; None: nothing does.

    Of a forward that draws random numbers the layers would draw them in another order; of code that nobody knows it
    cannot be said what it keeps from one micro-batch to the next.
    """
    if any(isinstance(module, _DROPOUTS) and module.p > 0 for module in model.modules()):
        return "the model draws random numbers (dropout), which would be others"
    root = model.get_base_model() if hasattr(model, "peft_config") else model
    if type(root).__module__.partition(".")[0] not in _KNOWN_PACKAGES:
        return f"{type(root).__name__} is not of transformers, so what its forward keeps is not known"
    for name, value in _numbers(root.config.to_dict()):
        if value and any(word in name for word in _DRAWING):
            return f"the model draws random numbers ({name}={value:g}), which would be others"
    if getattr(root.config, "output_router_logits", False):
        return "output_router_logits=True keeps all of the head for each micro-batch until the backward"
    for adapters in getattr(model, "peft_config", {}).values():
        if adapters.peft_type != "LORA" or adapters.use_dora:
            return f"adapters of {type(adapters).__name__} are not known to be the same in either order"
    for name, parameter in model.named_parameters():
        if has_gradient_hook(parameter):
            return f"{name} has a hook on its gradient, which comes for all micro-batches at once"
    return None


def _numbers(settings: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _numbers(value)
        elif isinstance(value, int | float):
            yield name, float(value)

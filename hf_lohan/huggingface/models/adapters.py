"""Makes, merges and unmerges adapters of PEFT over a base whose weights are in a store."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter, MovedGradients, WeightView, gathered_parameters
from hf_lohan.engine import ParameterAccess
from hf_lohan.huggingface.progress import advance, long_work

_ONE_LAYER = ("merge", "unmerge")
_WHOLE_MODEL = ("merge_and_unload", "unload")


# Adapters over a streamed base.


def check_peft_config(peft_config: Any) -> None:
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config={peft_config!r} is not a configuration of PEFT; give a configuration, such as "
            'peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")'
        )


def adapted_skeleton(skeleton: Any, peft_config: Any) -> tuple[Any, dict[str, str]]:
    """Add adapters to a model on meta. Returns the model, and the new names of the base's parameters by their old
    names."""
    from peft import get_peft_model

    before = {parameter: name for name, parameter in skeleton.named_parameters()}
    model: Any = get_peft_model(skeleton, copy.deepcopy(peft_config))
    return model, {before[p]: name for name, p in model.named_parameters() if p in before}


def adapted(base: Any, peft_config: Any, access: ParameterAccess, names: Mapping[str, str]) -> Any:
    """Add adapters to a model of placeholders, and store the adapters' weights. The base's weights are stored under
    ``names``. An initialisation of adapters may read these weights, and raises an error if it changes them."""
    from peft import get_peft_model

    stored = _StoredBase(access, {parameter: names[name] for name, parameter in base.named_parameters()})
    placeholders = {parameter: parameter.data for parameter in stored.names}
    for parameter, placeholder in placeholders.items():
        AbsentParameter.set_provider(parameter, stored)
        AbsentParameter.hide(parameter, placeholder)
    try:
        model: Any = get_peft_model(base, peft_config)
    finally:
        for parameter, placeholder in placeholders.items():
            AbsentParameter.show(parameter, placeholder)
    for name, parameter in model.named_parameters():
        if parameter not in placeholders:
            access.write_parameter(name, parameter)
    return model


class _StoredBase:
    """`WeightProvider` that reads the base's weights from the store while adapters are added."""

    def __init__(self, access: ParameterAccess, names: dict[nn.Parameter, str]) -> None:
        self.names = names
        self.moved_gradients = MovedGradients()
        self._access = access

    @contextlib.contextmanager
    def borrow_weights(self, parameters: Sequence[nn.Parameter]) -> Iterator[_StoredBase]:
        yield self

    def weight(self, parameter: nn.Parameter) -> Tensor:
        return self._access.read_parameter(self.names[parameter])

    def copy_views(self, output: Any) -> Any:
        return output

    def copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a copy, for `modules_to_save`."""
        return nn.Parameter(self.weight(parameter), requires_grad=parameter.requires_grad)

    def gather_parameters(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("weights can be gathered only after the model is loaded")

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        """Do nothing, because no forward saves views yet."""


# Merging.


def merge_through_store(model: Any, on_base: Callable[[Any], None]) -> None:
    """Make `merge_and_unload`, `merge_adapter`, `unmerge_adapter` and `unload` of a `PeftModel` work on stored weights.
    ``on_base`` is called with the base model that they return. Its weights stay in the store."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in _ONE_LAYER:
                if hasattr(layer, name):
                    setattr(layer, name, functools.partial(_with_weights, layer, getattr(layer, name)))
    for owner in (model, model.base_model):
        for name in _WHOLE_MODEL:
            if hasattr(owner, name):
                setattr(owner, name, functools.partial(_return_base, model, getattr(owner, name), on_base))


def needs_all_kept(model: Any) -> bool:
    """Return whether the model has prefix tuning. Transformers does not pass its keys and values to recomputed
    layers."""
    configs = getattr(model, "peft_config", {})
    return any(getattr(config, "peft_type", None) == "PREFIX_TUNING" for config in configs.values())


def _with_weights(layer: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    with gathered_parameters(layer):
        result = stock(*args, **kwargs)
    advance(_bytes_of(layer))
    return result


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())


def _return_base(
    model: Any, stock: Callable[..., Any], on_base: Callable[[Any], None], *args: Any, **kwargs: Any
) -> Any:
    from peft.tuners.tuners_utils import BaseTunerLayer

    total_bytes = sum(_bytes_of(layer) for layer in model.modules() if isinstance(layer, BaseTunerLayer))
    is_merged = getattr(stock, "__name__", "") == "merge_and_unload"
    with long_work("merging adapters", total_bytes) if is_merged else contextlib.nullcontext():
        base = stock(*args, **kwargs)
    on_base(base)
    return base

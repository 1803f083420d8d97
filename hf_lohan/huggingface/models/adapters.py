"""Makes, merges and unmerges adapters of PEFT over a base whose weights are in a store."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter, MovedGradients, WeightView, gathered_parameters
from hf_lohan.checkpoint.model_description import copy_buffers
from hf_lohan.compat.patches import replaced
from hf_lohan.compat.transformers_private import saves_active_adapter
from hf_lohan.engine import ParameterAccess, check_equal_weights
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.model import is_peft_model
from hf_lohan.ranks import Links

_ONE_LAYER = ("merge", "unmerge")
_WHOLE_MODEL = ("merge_and_unload", "unload")
_CHANGE_THE_BASE = frozenset({"pissa", "olora", "corda", "loftq"})
"""Initialisations of LoRA that subtract the initial adapters from the base's weights."""
_IN_MEMORY = "make the adapters in memory (peft.get_peft_model) and pass that model"


# Adapters over a streamed base.


def check_kinds(configs: Iterable[Any]) -> None:
    """Raise ValueError if offload cannot train the kind of adapters that a configuration of PEFT describes."""
    configs = list(configs)
    if any(getattr(config, "coft", False) for config in configs):
        raise ValueError(
            "OFT with coft=True changes the adapters' weights in each forward, but these weights are in the store; "
            "leave coft out, or train without offload"
        )
    if any(getattr(config, "peft_type", None) == "CPT" for config in configs):
        raise ValueError(
            "adapters of kind CPT assign to their embedding's weight.data in each forward, but this weight is in the "
            "store; use prompt tuning (peft.PromptTuningConfig), or train without offload"
        )


def refuse_allocation(model: Any) -> None:
    """Make AdaLoRA's `update_and_allocate`, which changes its ranks during a run, raise ValueError."""
    tuner: Any = getattr(model, "base_model", None)
    if hasattr(type(tuner), "update_and_allocate"):
        tuner.update_and_allocate = _refuse_allocation


def _refuse_allocation(*args: Any, **kwargs: Any) -> NoReturn:
    raise ValueError(
        "update_and_allocate of AdaLoRA reads gradients, which were moved to the optimizer, and sets weights, which "
        "are in the store; leave the call out (all ranks stay at init_r), or train without offload"
    )


def check_peft_config(peft_config: Any) -> None:
    from peft import PeftConfig

    if not isinstance(peft_config, PeftConfig):
        raise ValueError(
            f"peft_config={peft_config!r} is not a configuration of PEFT; give a configuration, such as "
            'peft.LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM")'
        )
    check_kinds([peft_config])
    init = getattr(peft_config, "init_lora_weights", True)
    if changes_the_base(init):
        raise ValueError(
            f"peft_config has init_lora_weights={init!r}, which changes the base's weights, and these stream to the "
            f"store while adapters are made; {_IN_MEMORY}, or set init_lora_weights=True"
        )


def changes_the_base(init_lora_weights: Any) -> bool:
    """Return whether this initialisation of LoRA changes the base's weights."""
    name = init_lora_weights.lower() if isinstance(init_lora_weights, str) else ""
    return name == "lora_ga" or name.partition("_")[0] in _CHANGE_THE_BASE


def adding_adapters(peft_config: Any) -> Callable[[Any], Any]:
    """Return the function that adds adapters to a model."""
    from peft import get_peft_model

    def add(model: Any) -> Any:
        if next(model.parameters()).device.type != "meta":
            return get_peft_model(model, peft_config)
        try:
            return get_peft_model(model, copy.deepcopy(peft_config))
        except (NotImplementedError, RuntimeError) as error:
            raise ValueError(
                f"the adapters of {type(peft_config).__name__} cannot be made for a base that streams, because PEFT "
                f"needs values of its weights before they are loaded; {_IN_MEMORY}"
            ) from error

    return add


def finished_skeleton(skeleton: Any, finish: Callable[[Any], Any]) -> tuple[Any, dict[str, str]]:
    """Call ``finish``, which adds adapters or changes weights, with a model on the meta device. Returns the model, and
    a dict from old to new names of the base's parameters. Replaced and resized parameters are left out."""
    before = {parameter: (name, parameter.shape) for name, parameter in skeleton.named_parameters()}
    model: Any = finish(skeleton)
    kept = {p: name for name, p in model.named_parameters() if p in before and p.shape == before[p][1]}
    return model, {before[parameter][0]: name for parameter, name in kept.items()}


def finished(
    base: Any, finish: Callable[[Any], Any], access: ParameterAccess, names: Mapping[str, str], links: Links
) -> Any:
    """Call ``finish`` with a model of placeholders, and store the weights that it creates. ``names`` has the stored
    names of the base's weights. ``finish`` may read these weights, but not change them. All ranks call this together.
    Raises RanksDisagreeError if ranks create different weights."""
    stored_names = {parameter: names[name] for name, parameter in base.named_parameters() if name in names}
    stored = ReadableBase(lambda parameter: access.read_parameter(stored_names[parameter]))
    placeholders = stored.hide(stored_names)
    try:
        model: Any = finish(base)
    finally:
        for parameter, placeholder in placeholders.items():
            AbsentParameter.show(parameter, placeholder)
    made = [(name, parameter) for name, parameter in model.named_parameters() if parameter not in placeholders]
    check_equal_weights([*made, *model.named_buffers()], links)  # new weights are random, and in no checkpoint
    for name, parameter in made:
        access.write_parameter(name, parameter)
    return model


class ReadableBase:
    """`WeightProvider` for a base of placeholders. Its weights are read one by one while adapters are added."""

    def __init__(self, read: Callable[[nn.Parameter], Tensor]) -> None:
        self.moved_gradients = MovedGradients()
        self.weight = read

    def hide(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """Make placeholders absent, so that reads call `weight` and writes are refused. Returns their former data."""
        placeholders = {parameter: parameter.data for parameter in parameters}
        for parameter, placeholder in placeholders.items():
            AbsentParameter.set_provider(parameter, self)
            AbsentParameter.hide(parameter, placeholder)
        return placeholders

    @contextlib.contextmanager
    def borrow_weights(self, parameters: Sequence[nn.Parameter]) -> Iterator[ReadableBase]:
        yield self

    def copy_views(self, output: Any) -> Any:
        return output

    def embed(self, table: nn.Parameter, ids: Tensor, padding_idx: int | None) -> None:
        """Return None, so that an embedding reads its whole table."""

    def copy_parameter(self, parameter: nn.Parameter) -> nn.Parameter:
        """Return a copy, for `modules_to_save`."""
        return nn.Parameter(self.weight(parameter), requires_grad=parameter.requires_grad)

    def gather_parameters(self, parameters: Sequence[nn.Parameter]) -> contextlib.AbstractContextManager[None]:
        raise RuntimeError("weights can be gathered only after the model is loaded")

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        """Do nothing, because no forward saves views yet."""


# Saved adapters.


def saves_adapters(model: Any) -> bool:
    """Return whether `save_pretrained` saves only adapters of PEFT, and not all weights."""
    return is_peft_model(model) or saves_active_adapter(model)


def saved_adapters(model: Any, path: str | Path) -> dict[str, Path]:
    """Return the folder of each adapter when a model is saved to ``path``. A model of transformers saves only its
    active adapter."""
    if not is_peft_model(model):
        return {model.active_adapters()[0]: Path(path)}
    return {name: Path(path) if name == "default" else Path(path) / name for name in model.peft_config}


def load_adapters(model: Any, path: str | Path, store_weight: Callable[[str, Tensor], bool]) -> set[nn.Parameter]:
    """Load adapters as `PeftModel.load_adapter` does, but pass each weight's name and values to ``store_weight``, which
    returns whether the store has the weight. Returns the parameters that PEFT has written itself."""
    from peft import load_peft_weights, set_peft_model_state_dict

    def store(weights: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        copy_buffers(model, {name: weight for name, weight in weights.items() if not store_weight(name, weight)})

    written: set[nn.Parameter] = set()
    with replaced(model, load_state_dict=store):
        for adapter, folder in saved_adapters(model, path).items():
            # PEFT saves the output of the prompt encoder, and writes it to a weight of the encoder itself.
            is_prompt = model.peft_config[adapter].is_prompt_learning
            encoder = set(model.prompt_encoder[adapter].parameters()) if is_prompt else set[nn.Parameter]()
            with gathered_parameters(encoder):
                set_peft_model_state_dict(model, load_peft_weights(str(folder), device="cpu"), adapter_name=adapter)
            written |= encoder
    return written


# Merging.


class PendingMerges:
    """Adapters that are merged into their base, one weight at a time, while the base is saved. Packed weights in the
    store cannot be changed. This class is also the `WeightProvider` of these weights, and refuses all other reads."""

    def __init__(self) -> None:
        self.moved_gradients = MovedGradients()
        self._merges: dict[nn.Parameter, list[tuple[Any, Callable[[], Any]]]] = {}

    def __contains__(self, parameter: object) -> bool:
        return parameter in self._merges

    def add(self, layer: Any, merge: Callable[[], Any]) -> None:
        """Call ``merge``, which merges a layer of PEFT, when the layer's weights are saved."""
        for parameter in _changed_by(layer).values():
            self._merges.setdefault(parameter, []).append((layer, merge))
            AbsentParameter.set_provider(parameter, self)
        advance(_bytes_of(layer))

    def refuse_other_uses(self, base: nn.Module) -> None:
        """Make the base, and each of its modules with pending merges, raise ValueError if it is called."""
        if self._merges:
            for module in base.modules():
                if module is base or any(parameter in self for parameter in module.parameters(recurse=False)):
                    module.register_forward_pre_hook(_refuse_merged, prepend=True)

    @torch.no_grad()
    def merged(self, parameter: nn.Parameter, read: Callable[[nn.Parameter], Tensor]) -> dict[nn.Parameter, Tensor]:
        """Return the values of a parameter with adapters merged into it, and the values of other parameters that the
        same adapters change, such as the bias. ``read`` returns a copy of the values of a parameter."""
        merges = self._merges[parameter]
        changed = [_changed_by(layer) for layer, _ in merges]
        merged: dict[nn.Parameter, Tensor] = {}
        with _with_values([layer for layer, _ in merges], read):
            for (layer, merge), of_layer in zip(merges, changed, strict=True):
                before, base = list(layer.merged_adapters), layer.get_base_layer()
                merge()
                merged_base = layer.get_base_layer()
                merged |= {own: getattr(merged_base, name).data for name, own in of_layer.items()}
                if merged_base is not base:
                    layer.unmerge()  # LNTuning merges by exchanging the base and its copy
                layer.merged_adapters[:] = before  # the weights in the store are not merged
        return merged

    def borrow_weights(self, *args: Any, **kwargs: Any) -> NoReturn:
        _refuse_merged()

    embed = copy_parameter = gather_parameters = borrow_weights

    def note_view(self, view: Tensor, weight_view: WeightView) -> None:
        """Do nothing, because the shape of a view may be used although the view has no values."""


def _changed_by(layer: Any) -> dict[str, nn.Parameter]:
    """Return the parameters of the base that a layer of PEFT changes when it is merged, by name."""
    own = dict(layer.get_base_layer().named_parameters(recurse=False))
    name = getattr(layer, "parameter_name", None)  # set in layers for `target_parameters`
    return own if name is None else {name: own[name]}


@contextlib.contextmanager
def _with_values(layers: Sequence[Any], read: Callable[[nn.Parameter], Tensor]) -> Iterator[None]:
    """In this context, these layers of PEFT have ordinary parameters with the values that ``read`` returns. Other
    parameters of the base are unchanged."""
    changed = {parameter for layer in layers for parameter in _changed_by(layer).values()}
    others = {parameter for layer in layers for parameter in layer.get_base_layer().parameters()} - changed
    places = {
        (module, name): parameter
        for layer in layers
        for module in layer.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter not in others
    }
    values: dict[nn.Parameter, nn.Parameter] = {}
    try:
        for (module, name), parameter in places.items():
            if parameter not in values:
                values[parameter] = nn.Parameter(read(parameter).to(parameter.device), requires_grad=False)
            setattr(module, name, values[parameter])
        yield
    finally:
        for (module, name), parameter in places.items():
            setattr(module, name, parameter)


def _refuse_merged(*_args: Any) -> NoReturn:
    raise ValueError(
        "the adapters of this model are merged while it is saved, because its packed weights cannot be changed "
        "(quantize); call save_pretrained, and load the folder to run the model or to read its weights"
    )


def merge_through_store(
    model: Any, on_base: Callable[[Any, PendingMerges], None], unchangeable: AbstractSet[nn.Parameter]
) -> None:
    """Make `merge_and_unload`, `merge_adapter`, `unmerge_adapter` and `unload` of a `PeftModel` work on stored weights.

    ``on_base`` is called with the base model that these methods return, whose weights stay in the store, and with the
    pending merges into ``unchangeable`` parameters. These merges are done while the base is saved.
    """
    from peft.tuners.tuners_utils import BaseTunerLayer

    merging = _Merging(on_base, unchangeable)
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in _ONE_LAYER:
                if hasattr(layer, name):
                    setattr(layer, name, functools.partial(merging.change, name, layer, getattr(layer, name)))
    for owner in (model, model.base_model):
        for name in _WHOLE_MODEL:
            if hasattr(owner, name):
                setattr(owner, name, functools.partial(merging.return_base, name, model, getattr(owner, name)))


class _Merging:
    def __init__(self, on_base: Callable[[Any, PendingMerges], None], unchangeable: AbstractSet[nn.Parameter]) -> None:
        self._on_base = on_base
        self._unchangeable = unchangeable
        self._pending: PendingMerges | None = None
        """The pending merges while the whole model is merged, and None otherwise."""

    def change(self, name: str, layer: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if name == "merge" and any(parameter in self._unchangeable for parameter in _changed_by(layer).values()):
            if self._pending is None:
                raise ValueError(
                    "merge_adapter cannot change the base, because its weights are packed (quantize); write a merged "
                    "model with model.merge_and_unload().save_pretrained(folder)"
                )
            self._pending.add(layer, functools.partial(stock, *args, **kwargs))
            return None
        with gathered_parameters(layer):
            result = stock(*args, **kwargs)
        advance(_bytes_of(layer))
        return result

    def return_base(self, name: str, model: Any, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        from peft.tuners.tuners_utils import BaseTunerLayer

        pending = self._pending = PendingMerges()
        total_bytes = sum(_bytes_of(layer) for layer in model.modules() if isinstance(layer, BaseTunerLayer))
        is_merged = name == "merge_and_unload"
        try:
            work = long_work("merging adapters", total_bytes) if is_merged else contextlib.nullcontext()
            with work, _comparable_embeddings(model.base_model.model):
                base = stock(*args, **kwargs)
        finally:
            self._pending = None
        pending.refuse_other_uses(base)
        self._on_base(base, pending)
        return base


@contextlib.contextmanager
def _comparable_embeddings(base: Any) -> Iterator[None]:
    """In this context, a base model returns embeddings with substitutes for weights. PEFT compares the memory of these
    weights to find out whether they are tied."""
    memory: dict[nn.Parameter, Tensor] = {}

    def stand_in(getter: Callable[[], Any]) -> Any:
        embeddings = getter()
        weight = getattr(embeddings, "weight", None)
        if not isinstance(weight, nn.Parameter):
            return embeddings
        return types.SimpleNamespace(weight=memory.setdefault(weight, torch.empty(1)))

    names = [name for name in ("get_input_embeddings", "get_output_embeddings") if hasattr(base, name)]
    with replaced(base, **{name: functools.partial(stand_in, getattr(base, name)) for name in names}):
        yield


def _bytes_of(module: nn.Module) -> int:
    return sum(parameter.numel() * parameter.element_size() for parameter in module.parameters())

"""Stream a checkpoint into the store, tensor by tensor: the model never stands in RAM."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from hf_lohan.checkpoint.model_description import copy_buffers
from hf_lohan.compat.transformers_private import build_from_config, is_loaded, mark_loaded, one_tensor_at_a_time
from hf_lohan.config import OffloadConfig
from hf_lohan.device import default_torch_device
from hf_lohan.engine import OffloadEngine, ParameterAccess, refuse_other_weights
from hf_lohan.huggingface.adapters import adapted, adapted_skeleton
from hf_lohan.huggingface.attachment import (
    activations_kept_if_needed,
    attach,
    open_device,
    open_tiers_or_take_over,
    refuse_chunks,
)
from hf_lohan.huggingface.optimizers import choice_of
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.huggingface.rank_links import links_to_other_ranks
from hf_lohan.planning import lay_out
from hf_lohan.planning.layout import resolved_here

logger = logging.getLogger(__name__)

Sink = Callable[[str, Tensor], bool]
"""Takes a parameter by name; says whether it wanted it."""


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
    **kwargs: Any,
) -> Any:
    """Load a causal LM with its weights streamed into the store, ready to train.

    Args:
        path: a checkpoint folder, as for `AutoModelForCausalLM.from_pretrained`.
        offload: anything that `OffloadConfig.load` takes.
        torch_device: where to compute; None is the GPU if there is one.
        dtype: dtype of the working weights; "auto" is the checkpoint's own. `bf16=True` means bfloat16 working
            weights whose float32 masters equal the checkpoint's values exactly.
        default_ssd_path: the store's folder if the configuration names none.
        hold_gradients: keep gradients until `step()`, as clipping and accumulation need; False applies them in
            backward.
        sums_gradients: several backwards a step are to be expected, so gradients are kept in float32. With False those
            of bfloat16 weights stay in bfloat16, in half the memory, and if there are several after all, their sums
            wait on the SSD. No number is another one.
        model_class: default `AutoModelForCausalLM`.
        is_trained: False freezes all weights: there are no optimizer states, and no second version of anything.
        optimizer: whose states the store has: a class of `torch.optim`, or (class, keyword arguments); default
            AdamW, or as the configuration says.
        peft_config: of PEFT; returns a `PeftModel`, whose base is streamed as well.
        kwargs: for the model class's own `from_pretrained`.

    Raises ValueError (unknown keys, budgets, capacities, a foreign store, untrainable dtypes) before weights are read.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    model_class = model_class or AutoModelForCausalLM
    if not os.path.isdir(path):
        raise ValueError(f"{str(path)!r} is not a checkpoint folder; pass the path of one, or a model in memory")
    config = OffloadConfig.load(offload)
    device = open_device(config, torch_device or default_torch_device())
    config = resolved_here(config, device, default_ssd_path, links_to_other_ranks())
    model_config = kwargs.pop("config", None) or AutoConfig.from_pretrained(path)
    loaded_dtype = load_dtype(path, model_config, dtype)
    working_dtype = torch.bfloat16 if bf16 else loaded_dtype if peft_config is None else None

    with torch.device("meta"):
        skeleton = build_from_config(model_class, model_config, loaded_dtype)
        names = {name: name for name, _ in skeleton.named_parameters()}
        if peft_config is not None:
            skeleton, names = adapted_skeleton(skeleton, peft_config)
    if not is_trained:
        skeleton.requires_grad_(False)
    config = activations_kept_if_needed(skeleton, config)
    refuse_chunks(skeleton, config)
    lay_out_for_this = partial(
        lay_out,
        config=config,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        memory_is_host=device.memory_is_host,
        rules=None if optimizer is None else choice_of(optimizer).rules,
        ranks=links_to_other_ranks().ranks,
    )
    layout = lay_out_for_this(skeleton)
    tiers = open_tiers_or_take_over(layout, config, device)
    try:
        access = ParameterAccess(tiers.store, layout.blocks, tiers.states, tiers.links)
        model = stream_model(path, model_class, model_config, loaded_dtype, access, names, **kwargs)
        if not is_trained:
            model.requires_grad_(False)
        refuse_other_weights(model.named_parameters(), links_to_other_ranks())  # new heads, that no checkpoint has
        store_the_rest(model, access, names, working_dtype)
        if peft_config is not None:
            model = adapted(model, peft_config, access, names)
        final = lay_out_for_this(model)
        if final.identity != layout.identity:
            raise ValueError(
                "the loaded model differs from the one its config describes, so its weights are not where they were "
                "planned; load it in memory and pass the model instead of its path"
            )
        return attach(model, final, tiers, config).model
    except BaseException:
        tiers.close()
        raise


def stream_model(
    path: str | Path,
    model_class: Any,
    model_config: Any,
    dtype: torch.dtype,
    access: ParameterAccess,
    names: Mapping[str, str],
    **kwargs: Any,
) -> Any:
    """The model of a checkpoint, its weights in the store and on meta. ``names`` are those in the store."""
    write = _writer(access, only_dtype=dtype)
    with (
        long_work(f"streaming {path}", _stored_bytes(access, names.values())),
        streamed_to(lambda name, tensor: write(names.get(name, name), tensor)),
    ):
        return model_class.from_pretrained(path, config=model_config, dtype=dtype, **kwargs)


def reload_weights(engine: OffloadEngine, model: Any, path: str | Path) -> None:
    """Stream a checkpoint's weights over those in the store (resume, best model).

    Goes through `from_pretrained`, not `load_state_dict`: MoE experts are saved un-fused and must be fused again.
    """
    written: set[str] = set()
    write = _writer(engine.parameters)

    def sink(name: str, tensor: Tensor) -> bool:
        written.add(name)
        return write(name, tensor)

    if hasattr(model, "peft_config"):
        _stream_adapters(model, path, sink)
        expected = {part.name for part in engine.parameter_slices if part.trainable}
    else:
        total_bytes = _stored_bytes(engine.parameters, engine.parameters.parts)
        with long_work(f"streaming {path}", total_bytes), streamed_to(sink):
            loaded = type(model).from_pretrained(path, dtype="auto")
        for name, parameter in loaded.named_parameters():
            if parameter.device.type != "meta":
                sink(name, parameter)
        copy_buffers(model, loaded.state_dict())
        expected = set(engine.parameters.parts)
    engine.forget_weights()
    missing = sorted(expected - written)
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} has no weights for {len(missing)} parameters of this model, such as "
            f"{missing[0]}; resume from a checkpoint of the same model"
        )


def _stream_adapters(model: Any, path: str | Path, sink: Sink) -> None:
    """PEFT saves the adapters alone, under shorter names, those that are not the default in folders of their own: let
    PEFT itself translate ours, and match them."""
    from peft import get_peft_model_state_dict, load_peft_weights

    own = {name: torch.empty(p.shape, device="meta") for name, p in model.named_parameters()}
    name_of = {id(tensor): name for name, tensor in own.items()}
    for adapter in model.peft_config:
        folder = Path(path) if adapter == "default" else Path(path) / adapter
        saved = load_peft_weights(str(folder), device="cpu")
        tensors = get_peft_model_state_dict(model, state_dict=own, adapter_name=adapter, save_embedding_layers=False)
        for saved_name, tensor in tensors.items():
            if saved_name in saved and id(tensor) in name_of:
                sink(name_of[id(tensor)], saved[saved_name])


@contextlib.contextmanager
def streamed_to(sink: Sink) -> Iterator[None]:
    """While this is on, every weight that transformers has loaded, renamed, fused and cast goes to `sink` and leaves a
    meta parameter behind. Uses torch's public registration hooks; transformers runs unchanged."""
    parents: dict[nn.Module, tuple[nn.Module, str]] = {}

    def name_of(module: nn.Module, name: str) -> str:
        while module in parents:
            module, own_name = parents[module]
            name = f"{own_name}.{name}"
        return name

    def on_module(module: nn.Module, name: str, submodule: nn.Module | None) -> None:
        if submodule is not None:
            parents[submodule] = (module, name)

    def on_parameter(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.device.type == "meta" or not is_loaded(parameter):
            return None
        if not sink(name_of(module, name), parameter):
            return None
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        mark_loaded(meta)
        return meta

    hooks = [
        register_module_module_registration_hook(on_module),
        # Torch documents that the hook may return a replacement; its annotation forgot.
        register_module_parameter_registration_hook(on_parameter),  # type: ignore[arg-type]
    ]
    try:
        with one_tensor_at_a_time():
            yield
    finally:
        for hook in hooks:
            hook.remove()


def _writer(access: ParameterAccess, only_dtype: torch.dtype | None = None) -> Sink:
    def write(name: str, tensor: Tensor) -> bool:
        if only_dtype is not None and tensor.dtype != only_dtype:
            raise ValueError(
                f"this model keeps {name} in {tensor.dtype} when loaded in {only_dtype}; a checkpoint streams in one "
                f"dtype, so load it with dtype={tensor.dtype}, or in memory"
            )
        if name not in access.parts:
            return False  # an alias of a tied weight: stored under its first name
        access.write_parameter(name, tensor)
        advance(_stored_bytes(access, [name]))
        return True

    return write


def _stored_bytes(access: ParameterAccess, names: Iterable[str]) -> int:
    """Of the parameters of these names in the store."""
    parts = [pair for name in names for pair in access.parts[name]]
    return sum(part.numel * block.master.working_dtype.itemsize for block, part in parts)


def load_dtype(path: str | Path, model_config: Any, dtype: torch.dtype | str) -> torch.dtype:
    """In which the checkpoint's weights are loaded. Raises ValueError for a quantized one."""
    if getattr(model_config, "quantization_config", None) is not None:
        raise ValueError(f"{str(path)!r} is a quantized checkpoint, which cannot be trained; take the original one")
    if isinstance(dtype, torch.dtype):
        return dtype
    checkpoint_dtype = getattr(model_config, "dtype", None) or torch.float32
    found = checkpoint_dtype if dtype == "auto" else dtype
    resolved = getattr(torch, found, None) if isinstance(found, str) else found
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch dtype; use 'auto', 'float32' or 'bfloat16'")
    return resolved


def store_the_rest(
    model: nn.Module, access: ParameterAccess, names: Mapping[str, str], working_dtype: torch.dtype | None
) -> None:
    """Store weights that the checkpoint did not have (new heads), and make every parameter a placeholder. ``names``
    are those in the store."""
    for name, parameter in list(model.named_parameters()):
        if parameter.device.type != "meta":
            access.write_parameter(names[name], parameter)
    make_placeholders(model, working_dtype)


def make_placeholders(model: nn.Module, working_dtype: torch.dtype | None) -> None:
    """Take its numbers from every parameter, be it on meta or not."""
    for parameter in list(model.parameters()):
        placeholder = nn.Parameter(
            torch.full((1,), float("nan"), dtype=working_dtype or parameter.dtype).expand(parameter.shape),
            requires_grad=parameter.requires_grad,
        )
        # Keeps the parameter's identity, so tied weights stay one; `.data` of a meta parameter cannot be set.
        torch.utils.swap_tensors(parameter, placeholder)

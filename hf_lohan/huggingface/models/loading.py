"""Streams a checkpoint to the store, tensor by tensor, so that the model is never in RAM."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import replace
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
from hf_lohan.compat.transformers_conversions import loaded_in_rows, tensors_replaced
from hf_lohan.compat.transformers_private import build_from_config, is_loaded, mark_loaded
from hf_lohan.config import OffloadConfig
from hf_lohan.device import default_torch_device
from hf_lohan.engine import OffloadEngine, ParameterAccess, check_equal_weights
from hf_lohan.huggingface.attachment import (
    activations_kept_if_needed,
    attach,
    dtypes_of,
    open_device,
    open_tiers_or_take_over,
    refuse_chunks,
    settings_given,
)
from hf_lohan.huggingface.equal_runs import check_equal_checkpoints, check_equal_configs
from hf_lohan.huggingface.models.adapters import (
    adding_adapters,
    check_peft_config,
    finished,
    finished_skeleton,
    load_adapters,
    saved_adapters,
    saves_adapters,
)
from hf_lohan.huggingface.models.encoded_checkpoints import EncodedCheckpoint, encoded_checkpoint
from hf_lohan.huggingface.models.hub import Checkpoint
from hf_lohan.huggingface.models.packed_checkpoints import (
    PackedCheckpoint,
    name_unpacked,
    packed_checkpoint,
    quantized_as_asked,
)
from hf_lohan.huggingface.models.quantized_checkpoints import (
    QuantizedCheckpoint,
    check_dequantizes,
    check_safetensors,
    has_safetensors,
    quantization_of,
    quantized_checkpoint,
)
from hf_lohan.huggingface.models.saving import dtypes_to_save
from hf_lohan.huggingface.models.state_dicts import has_state_dict, saves_itself, stream_state_dict
from hf_lohan.huggingface.models.weightless_model import config_as_tied, model_class_of, ties_weights
from hf_lohan.huggingface.optimizers import make_optimizer_choice
from hf_lohan.huggingface.progress import advance, long_work
from hf_lohan.huggingface.ranks import at_stores, links_to_other_ranks
from hf_lohan.model import experts_as_stored, has_adapters, kept_in_float32, owners_as_stored
from hf_lohan.planning import lay_out
from hf_lohan.planning.layout import resolved_here
from hf_lohan.threads import return_freed_memory
from hf_lohan.wording import format_bytes, times

logger = logging.getLogger(__name__)

_RETURNED_AFTER_BYTES = 256 << 20
"""Loading returns freed memory each time this number of bytes is stored."""
_MOST_ROWS_BYTES = 32 << 20
"""Larger weights are read and converted in pieces of at most this size and at most one buffer."""


class WeightSink:
    def __init__(
        self, access: ParameterAccess, names: Mapping[str, str] | None = None, *, of_any_dtype: bool = True
    ) -> None:
        """`names`: the stored names of weights, by the names that they have when they are loaded. Other weights stay in
        memory. Without ``of_any_dtype`` each weight must have its working dtype."""
        self.most_bytes = min(access.piece_bytes, _MOST_ROWS_BYTES)
        self.written: set[str] = set()
        self._stored_packed: set[str] = set()
        self._access = access
        self._names = names
        self._of_any_dtype = of_any_dtype
        self._freed_bytes = 0
        """Bytes of stored weights, which transformers frees, since freed memory was last returned."""

    def store_weight(self, name: str, weight: Tensor) -> bool:
        """Write a weight. Returns False if the store has no weight of this name. Raises ValueError for a wrong shape or
        dtype."""
        stored = self._stored_name(name)
        if stored in self._stored_packed:
            self._count(stored, weight)
            return True
        if stored not in self._access.parts:
            return False  # an alias of a tied weight, which is stored under its first name
        self._check_dtype(stored, weight)
        self._access.write_parameter(stored, weight)
        self._count(stored, weight)
        return True

    def store_rows(self, name: str, shape: torch.Size, first: int, rows: Tensor) -> bool:
        """Write rows of a weight, starting at row ``first``. Returns False if the store has no weight of this name and
        shape."""
        stored = self._stored_name(name)
        if stored in self._stored_packed:
            self._count(stored, rows)
            return True
        if stored not in self._access.parts or self._access.parts[stored][0][1].shape != shape:
            return False
        if not self._access.takes_rows(stored):
            return False
        self._check_dtype(stored, rows)
        self._access.write_elements(stored, first * shape[1:].numel(), rows)
        self._count(stored, rows)
        return True

    def is_packed(self, name: str) -> bool:
        """Whether the store packs a weight."""
        stored = self._stored_name(name)
        return stored in self._access.parts and self._access.parts[stored][0][1].packed is not None

    def store_bytes(self, name: str, kind: str, first: int, content: Tensor) -> None:
        """Write bytes of a weight that is packed in the checkpoint, from byte ``first`` of its ``kind`` ("codes" or
        "scales") on. `store_weight` and `store_rows` then write nothing for it."""
        stored = self._stored_name(name)
        self._access.write_packed(stored, kind, first, content)
        self._stored_packed.add(stored)

    def store_packed(self, name: str, codes: Tensor, scales: Tensor) -> torch.Size:
        """Write a weight that the checkpoint has packed. `store_weight` and `store_rows` then write nothing for it.
        Returns its shape in the model."""
        stored = self._stored_name(name)
        self._access.write_packed(stored, "codes", 0, codes)
        self._access.write_packed(stored, "scales", 0, scales)
        self._stored_packed.add(stored)
        return self._access.parts[stored][0][1].shape

    def _stored_name(self, name: str) -> str:
        """Return the stored name of a weight; an empty name for a weight that stays in memory."""
        return name if self._names is None else self._names.get(name, "")

    def _count(self, name: str, weight: Tensor) -> None:
        num_bytes = weight.numel() * self._dtype_of(name).itemsize
        self.written.add(name)
        advance(num_bytes)
        self._freed_bytes += num_bytes
        if self._freed_bytes >= _RETURNED_AFTER_BYTES:
            self._freed_bytes = 0
            return_freed_memory()

    def _check_dtype(self, name: str, weight: Tensor) -> None:
        if not self._of_any_dtype and weight.dtype != self._dtype_of(name):
            raise ValueError(
                f"{name} is loaded with dtype {weight.dtype}, but the model's config says {self._dtype_of(name)}; "
                "load the model with dtype='float32', or in memory"
            )

    def _dtype_of(self, name: str) -> torch.dtype:
        block, _ = self._access.parts[name][0]
        return block.master.working_dtype


_PLACEMENT = ("device_map", "max_memory", "tp_plan", "tp_size", "distributed_config")


def refuse_placement(loading: Mapping[str, Any], because: str) -> None:
    """Raise ValueError for arguments of `from_pretrained` that place or shard a model on devices. ``because``: what
    happens to the model instead."""
    for name in _PLACEMENT:
        if loading.get(name) is not None:
            raise ValueError(f"{name}={loading[name]!r} places or shards the model, {because}; leave it out")


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
    quantization_config: Any = None,
    finish: Callable[[Any], Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Load a model for training, and stream its weights to the store.

    Args:
        path: a checkpoint folder, or the name of a model in the Hub, which is downloaded to its cache.
        offload: anything that `OffloadConfig.load` takes.
        torch_device: the device that computes. None is the GPU, or the CPU if there is no GPU.
        dtype: dtype of the working weights. "auto" is the checkpoint's dtype, or float32 for float16. `bf16=True` means
            bfloat16 working weights whose float32 masters equal the checkpoint's values exactly.
        default_ssd_path: the store's folder if the configuration has no path.
        hold_gradients: hold gradients until `step()`, which clipping and accumulation need. False applies them in
            backward.
        sums_gradients: hold gradients in float32, because steps have several backwards. False holds gradients of
            bfloat16 weights in bfloat16, which takes half the memory, and writes sums of several backwards to the SSD.
            Results are the same.
        model_class: a class or an auto class of transformers. The default is the class that the config names.
        is_trained: False freezes all weights. The store then has no optimizer states, and one version of each record.
        optimizer: a class of `torch.optim`, or (class, keyword arguments). The store has its states. The default is the
            configured optimizer, or AdamW.
        peft_config: a configuration of PEFT. With it this returns a `PeftModel`, and its base is streamed too.
        quantization_config: a `BitsAndBytesConfig` with ``load_in_4bit=True``, which means the setting `quantize`.
        finish: in place of `peft_config`, a function that is called with the model before it is offloaded, and returns
            it with its adapters or other changes. It is called twice: with the model on meta, and with the streamed
            model, whose weights it may read. Weights that it replaces, such as resized embeddings, are in memory whole.
        kwargs: as for the model class's `from_pretrained`, such as `revision`, `trust_remote_code`, and entries that
            override those of the checkpoint's config (`num_labels`, `attention_dropout`).

    Raises ValueError, before weights are read, for a model that does not exist, for unknown keys, for budgets or
    capacities that are too small, for another model's store, and for dtypes that cannot be trained.
    """
    refuse_placement(kwargs, "which offload streams to its device itself")
    dtype = take_torch_dtype(kwargs, dtype)
    if peft_config is not None:
        if finish is not None:
            raise ValueError("peft_config and finish are both given; add the adapters in finish alone")
        check_peft_config(peft_config)
        finish = adding_adapters(peft_config)
    # A Trainer passes its own configuration, or a part of that configuration.
    config = offload if isinstance(offload, OffloadConfig) else settings_given(offload)
    device = open_device(config, torch_device or default_torch_device())
    asked, found = at_stores(config, default_ssd_path, links_to_other_ranks())
    config = resolved_here(asked, device, default_ssd_path, links_to_other_ranks())
    checkpoint = Checkpoint.open(path, kwargs)
    model_config = checkpoint.take_config(kwargs)
    model_class = model_class or model_class_of(model_config, checkpoint.code)
    if quantization_of(model_config) is not None:
        checkpoint.fetch_weights(None, config, links_to_other_ranks())  # their files say how they are packed
    packed = packed_checkpoint(checkpoint.folder, model_config)
    model_config = model_config if packed is None else packed.model_config
    quantized = quantized_checkpoint(checkpoint.folder, model_config)
    if quantized is not None:
        model_config = quantized.model_config
        check_dequantizes(quantization_config)
        quantization_config = None
    was_float16 = dtype == "auto" and _has_float16(model_config)  # before the skeleton changes the config
    loaded_dtype = load_dtype(path, model_config, dtype)
    working_dtype = torch.bfloat16 if bf16 else None
    config = quantized_as_asked(config, quantization_config, working_dtype or loaded_dtype)
    if packed is not None:
        config = packed.settings(config, working_dtype or loaded_dtype)

    checkpoint, model_config = as_tied(checkpoint, model_class, model_config, loaded_dtype, config)
    with torch.device("meta"):
        own_config = model_config if finish is None else copy.deepcopy(model_config)  # it may change its size
        skeleton = skeleton_of(model_class, own_config, loaded_dtype, checkpoint.code)
        names = {name: name for name, _ in skeleton.named_parameters()}
    if quantization_config is not None:
        name_unpacked(skeleton, config.quantize)
    encoded = None if quantized is None else encoded_checkpoint(quantized, skeleton)
    quantized = None if encoded is None else encoded.quantized
    if finish is not None:
        with torch.device("meta"):
            skeleton, names = finished_skeleton(skeleton, finish)
    if not is_trained:
        skeleton.requires_grad_(False)
    if encoded is not None:
        frozen = [name for name, stored in names.items() if not skeleton.get_parameter(stored).requires_grad]
        config = encoded.settings(config, frozen)
    encoded = encoded if config.quantize.weights else None
    config = activations_kept_if_needed(skeleton, config)
    refuse_chunks(skeleton, config)
    config = experts_as_stored(skeleton, config, links_to_other_ranks())
    lay_out_for_this = partial(
        lay_out,
        config=config,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        memory_is_host=device.memory_is_host,
        rules=None if optimizer is None else make_optimizer_choice(optimizer).rules,
        ranks=links_to_other_ranks().ranks,
        owners=owners_as_stored(skeleton, config, links_to_other_ranks()),
    )
    layout = lay_out_for_this(skeleton)
    if packed is not None:
        packed.check_shapes(layout.blocks, names)
    # With bf16=True a float16 checkpoint keeps its number of bytes when it is saved.
    saved_dtypes = dtypes_to_save(layout, config.save_dtype, {} if was_float16 else dtypes_of(skeleton))
    checkpoint.fetch_weights(layout.records, config, links_to_other_ranks())
    check_safetensors(checkpoint.folder)
    check_equal_checkpoints(checkpoint.folder, links_to_other_ranks(), own_config)
    tiers = open_tiers_or_take_over(layout, config, device, found, is_beside_others=is_trained)
    try:
        access = ParameterAccess.to_load(tiers.store, layout.blocks, tiers.states, tiers.links)
        if quantized is not None and bf16 and dtype == "auto":
            loaded_dtype = torch.float32  # the masters are the products of codes and scales, before they are rounded
        model = stream_model(
            checkpoint,
            model_class,
            model_config,
            loaded_dtype,
            access,
            names,
            quantized,
            encoded,
            casts=bf16,
            packed=packed,
            **kwargs,
        )
        if not is_trained:
            model.requires_grad_(False)
        check_equal_configs(getattr(model, "config", None), links_to_other_ranks())
        check_equal_weights(model.named_parameters(), links_to_other_ranks())  # new heads are in no checkpoint
        store_the_rest(model, access, names)
        if finish is not None:
            model = finished(model, finish, access, names, links_to_other_ranks())
        final = lay_out_for_this(model)
        if final.identity != layout.identity:
            raise ValueError(
                "the loaded model differs from the model that its config describes, so the store does not fit; load "
                "the model in memory, and pass it instead of its path"
            )
        return attach(model, replace(final, saved_dtypes=saved_dtypes), tiers, config).model
    except BaseException:
        tiers.close()
        raise


def as_tied(
    checkpoint: Checkpoint, model_class: Any, model_config: Any, dtype: torch.dtype, config: OffloadConfig
) -> tuple[Checkpoint, Any]:
    """Return a checkpoint whose tied weights are loaded once, and its config. See `config_as_tied`."""
    if ties_weights(model_config) and (checkpoint.missing or has_safetensors(checkpoint.folder)):
        checkpoint.fetch_weights(None, config, links_to_other_ranks())  # values are compared
        build = partial(skeleton_of, model_class, dtype=dtype, code=checkpoint.code)
        model_config, renamed = config_as_tied(checkpoint.folder, model_config, build, dtype)
        checkpoint = replace(checkpoint, renamed=renamed)
    return checkpoint, model_config


def stream_model(
    checkpoint: Checkpoint,
    model_class: Any,
    model_config: Any,
    dtype: torch.dtype,
    access: ParameterAccess,
    names: Mapping[str, str],
    quantized: QuantizedCheckpoint | None = None,
    encoded: EncodedCheckpoint | None = None,
    *,
    casts: bool = False,
    packed: PackedCheckpoint | None = None,
    **kwargs: Any,
) -> Any:
    """Load a checkpoint's model on meta, and store its weights under ``names``. A ``quantized`` checkpoint is decoded,
    except for weights that the store packs, which ``encoded`` has. With ``casts`` the checkpoint's dtypes may differ
    from the store's."""
    sink = WeightSink(access, names, of_any_dtype=casts)
    kwargs = checkpoint.loading_arguments(model_class, kwargs)
    decoded: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if encoded is not None:
        decoded = tensors_replaced(partial(encoded.replace_encoded, sink.is_packed, sink.store_bytes))
    elif quantized is not None:
        decoded = tensors_replaced(quantized.replace_encoded)
    elif packed is not None:
        decoded = tensors_replaced(partial(packed.store_packed, sink.store_packed))
    what = f"streaming {checkpoint.name}"
    needed = tensors_replaced(checkpoint.as_tied)
    with long_work(what, _stored_bytes(access, names.values())), streamed_to(sink) as unused, decoded, needed:
        model = model_class.from_pretrained(checkpoint.folder, config=model_config, dtype=dtype, **kwargs)
    checkpoint.name_model(model)
    if quantized is not None:
        quantized.check_loaded(model, unused)
    if unused and all(parameter.device.type != "meta" for parameter in model.parameters()):
        raise ValueError(
            f"{checkpoint.name} has no weight of {type(model).__name__}, only others such as {min(unused)}; give the "
            "class and the config of this checkpoint"
        )
    warn_of_unused(checkpoint, model, unused)
    return_freed_memory()
    return model


def warn_of_unused(checkpoint: Checkpoint, model: Any, unused: Mapping[str, int]) -> None:
    """Log a warning that names tensors of a checkpoint that are no weights of the model. ``unused``: their bytes."""
    if unused:
        logger.warning(
            "%s of %s (%s) are no weights of %s and are not loaded, such as %s; saved models do not have them",
            times(len(unused), "tensor"),
            checkpoint.name,
            format_bytes(sum(unused.values())),
            type(model).__name__,
            min(unused),
        )


def has_weights(model: Any, path: str | Path) -> bool:
    """Return whether a folder has a file with weights of the model, and of each of its adapters. A folder that does not
    exist has none."""
    if saves_adapters(model):
        folders, patterns = [*saved_adapters(model, path).values()], ["adapter_model.*"]
    else:
        folders, patterns = [Path(path)], ["*.safetensors", "pytorch_model*.bin"]
    return all(any(True for pattern in patterns for _ in folder.glob(pattern)) for folder in folders)


def reload_weights(engine: OffloadEngine, model: Any, path: str | Path) -> None:
    """Overwrite the weights in the store with those of a checkpoint, to resume or to load the best model. Calls
    `from_pretrained`, because it fuses experts that are saved one by one."""
    if not has_weights(model, path):
        raise ValueError(f"{str(path)!r} has no weights of {type(model).__name__}; give the folder of a checkpoint")
    is_module = not saves_itself(model) and (has_state_dict(path) or not hasattr(type(model), "from_pretrained"))
    if is_module or (has_adapters(model) and not saves_adapters(model)):
        reload_state_dict(engine, model, path)
        return
    check_equal_checkpoints(path, engine.links)
    if saves_adapters(model):
        sink = WeightSink(engine.parameters, _stored_names(engine, model))
        written = load_adapters(model, path, sink.store_weight)
        expected = {part.name for part in engine.parameter_slices if part.trainable and part.parameter not in written}
    else:
        sink = WeightSink(engine.parameters)
        total_bytes = _stored_bytes(engine.parameters, engine.parameters.parts)
        with long_work(f"streaming {path}", total_bytes), streamed_to(sink):
            loaded = type(model).from_pretrained(path, dtype=_dtype_to_reload(engine, model))
        for name, parameter in loaded.named_parameters():
            if parameter.device.type != "meta":
                sink.store_weight(name, parameter)
        copy_buffers(model, loaded.state_dict())
        expected = set(engine.parameters.parts)
    _end_reload(engine, path, expected, sink)


def _dtype_to_reload(engine: OffloadEngine, model: nn.Module) -> torch.dtype | str:
    """Return the `dtype` with which `from_pretrained` rounds no weight. A config names the dtype of one weight."""
    kept, blocks = kept_in_float32(model), engine.layout.blocks
    dtypes = {block.master.working_dtype for block in blocks for part in block.slices if part.name not in kept}
    widest = max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: dtype.itemsize)
    return widest if widest.itemsize >= torch.float32.itemsize else "auto"


def reload_state_dict(engine: OffloadEngine, model: nn.Module, path: str | Path) -> None:
    """Overwrite the weights in the store with the state dict of a file or a folder."""
    check_equal_checkpoints(path, engine.links)
    access = engine.parameters
    sink = WeightSink(access, _stored_names(engine, model))
    with long_work(f"streaming {path}", _stored_bytes(access, access.parts)):
        copy_buffers(model, stream_state_dict(path, sink))
    _end_reload(engine, path, set(access.parts), sink)


def _stored_names(engine: OffloadEngine, model: nn.Module) -> dict[str, str]:
    """Return the stored names of a model's weights, by all names that these have in its state dict."""
    stored = {part.parameter: part.name for part in engine.parameter_slices}
    named = model.named_parameters(remove_duplicate=False)
    return {name: stored[parameter] for name, parameter in named if parameter in stored}


def _end_reload(engine: OffloadEngine, path: str | Path, expected: set[str], sink: WeightSink) -> None:
    engine.forget_weights()
    missing = sorted(expected - sink.written)
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} has no weights for {len(missing)} parameters of this model, such as "
            f"{missing[0]}; resume from a checkpoint of the same model"
        )


@contextlib.contextmanager
def streamed_to(sink: WeightSink) -> Iterator[dict[str, int]]:
    """In this context, pass every weight that transformers has loaded, renamed, fused and cast to `sink`, and put a
    meta parameter in its place. Large weights arrive a few rows at a time. Other weights arrive whole, through torch's
    registration hooks. Yields the dict of unused tensors of `loaded_in_rows`."""
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
        if not sink.store_weight(name_of(module, name), parameter):
            return None
        meta = nn.Parameter(torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad)
        mark_loaded(meta)
        return meta

    hooks = [
        register_module_module_registration_hook(on_module),
        # Torch's documentation allows the hook to return a replacement. Its annotation does not.
        register_module_parameter_registration_hook(on_parameter),  # type: ignore[arg-type]
    ]
    try:
        with loaded_in_rows(sink.store_rows, sink.most_bytes) as unused:
            yield unused
    finally:
        for hook in hooks:
            hook.remove()


def _stored_bytes(access: ParameterAccess, names: Iterable[str]) -> int:
    """Return the bytes of these parameters in the store."""
    parts = [pair for name in names for pair in access.parts[name]]
    return sum(part.numel * block.master.working_dtype.itemsize for block, part in parts)


def skeleton_of(model_class: Any, model_config: Any, dtype: torch.dtype, code: Mapping[str, Any]) -> Any:
    """Return the model without weights, in the dtypes in which it is loaded. ``code``: as for `build_from_config`. Call
    this with meta as torch's default device."""
    skeleton = build_from_config(model_class, model_config, dtype, code)
    kept = kept_in_float32(skeleton) if dtype == torch.bfloat16 else set[str]()
    for name, parameter in skeleton.named_parameters():
        # Transformers makes all loaded weights trainable, even those that their class freezes.
        parameter.requires_grad_(parameter.is_floating_point())
        if name in kept:
            parameter.data = parameter.data.to(torch.float32)
    return skeleton


def _has_float16(model_config: Any) -> bool:
    return str(getattr(model_config, "dtype", None)).removeprefix("torch.") == "float16"


def take_torch_dtype(loading: dict[str, Any], dtype: Any) -> Any:
    """Remove `torch_dtype`, the former name of `dtype`, from ``loading``, and return the dtype that is asked for.
    Raises ValueError if both names are given and differ."""
    former = loading.pop("torch_dtype", None)
    if former is None or str(dtype).removeprefix("torch.") == str(former).removeprefix("torch."):
        return dtype
    if dtype != "auto":
        raise ValueError(f"dtype={dtype!r} and torch_dtype={former!r} are both given and differ; leave torch_dtype out")
    return former


def load_dtype(path: str | Path, model_config: Any, dtype: torch.dtype | str) -> torch.dtype:
    """Return the dtype in which the checkpoint's weights are loaded. Weights in float16 are loaded in float32, which
    has their exact values, unless ``dtype`` asks otherwise."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype == "auto" and _has_float16(model_config):
        logger.warning(
            "%s is a float16 checkpoint; its weights are loaded in float32, which has their exact values", path
        )
        return torch.float32
    checkpoint_dtype = getattr(model_config, "dtype", None) or torch.float32
    chosen = checkpoint_dtype if dtype == "auto" else dtype
    resolved = getattr(torch, chosen, None) if isinstance(chosen, str) else chosen
    if not isinstance(resolved, torch.dtype):
        raise ValueError(f"dtype={dtype!r} is not a torch dtype; use 'auto', 'float32' or 'bfloat16'")
    return resolved


def store_the_rest(model: nn.Module, access: ParameterAccess, names: Mapping[str, str]) -> None:
    """Store the weights that the checkpoint does not have, such as new heads, and make every parameter that has a
    name in the store a placeholder."""
    stored = {name: parameter for name, parameter in model.named_parameters() if name in names}
    for name, parameter in stored.items():
        if parameter.device.type != "meta":
            access.write_parameter(names[name], parameter)
    dtypes = {name: access.parts[names[name]][0][0].master.working_dtype for name in names}
    make_placeholders(model, dtypes, only=set(stored.values()))


def make_placeholders(
    model: nn.Module, dtypes: Mapping[str, torch.dtype] | None = None, only: Container[nn.Parameter] | None = None
) -> None:
    """Make every parameter a placeholder without values, or ``only`` these. ``dtypes``: new dtypes, by name."""
    for name, parameter in list(model.named_parameters()):
        if only is not None and parameter not in only:
            continue
        dtype = (dtypes or {}).get(name, parameter.dtype)
        placeholder = nn.Parameter(
            torch.full((1,), float("nan")).to(dtype).expand(parameter.shape),
            requires_grad=parameter.requires_grad,
        )
        # Keep the parameter object, so that weights stay tied. `.data` of a meta parameter cannot be set.
        torch.utils.swap_tensors(parameter, placeholder)

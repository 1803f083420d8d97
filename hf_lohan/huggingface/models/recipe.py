"""From a checkpoint to a model whose weights stream to a store: what is known before a weight is read."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from hf_lohan.compat.transformers_conversions import tensors_replaced
from hf_lohan.compat.transformers_private import build_from_config
from hf_lohan.config import ResolvedConfig
from hf_lohan.engine import ParameterAccess, Tiers, check_equal_weights
from hf_lohan.huggingface.equal_runs import check_equal_checkpoints, check_equal_configs
from hf_lohan.huggingface.models.adapters import adapted_skeleton, finished, finished_skeleton
from hf_lohan.huggingface.models.bitsandbytes_config import name_unpacked, quantized_as_asked
from hf_lohan.huggingface.models.checkpoint_form import published_form, read_form
from hf_lohan.huggingface.models.hub import CODE_ARGUMENTS, Checkpoint, read_model_config
from hf_lohan.huggingface.models.quantized_checkpoints import (
    check_dequantizes,
    check_safetensors,
    has_safetensors,
    quantization_of,
    refuse_other_methods,
)
from hf_lohan.huggingface.models.weight_sink import WeightSink, store_the_rest, stored_bytes, streamed_to
from hf_lohan.huggingface.models.weightless_model import (
    config_as_tied,
    model_class_of,
    planning_dtype,
    ties_weights,
    weightless_model,
)
from hf_lohan.huggingface.progress import long_work
from hf_lohan.model import kept_in_float32
from hf_lohan.planning import OffloadLayout
from hf_lohan.ranks import Links
from hf_lohan.threads import return_freed_memory
from hf_lohan.wording import format_bytes, times

logger = logging.getLogger(__name__)

_PLACEMENT = ("device_map", "max_memory", "tp_plan", "tp_size", "distributed_config")


def refuse_placement(loading: Mapping[str, Any], because: str) -> None:
    """Raise ValueError for arguments of `from_pretrained` that place or shard a model on devices. ``because``: what
    happens to the model instead."""
    for name in _PLACEMENT:
        if loading.get(name) is not None:
            raise ValueError(f"{name}={loading[name]!r} places or shards the model, {because}; leave it out")


class ModelRecipe:
    """A model of a checkpoint, before its weights are read. The calls have an order: `build`, `check`, `stream`.

    `build` makes the skeleton and the settings that follow from the checkpoint. With them a store is laid out. `check`
    refuses what cannot be stored, and downloads missing files. `stream` reads the weights. All ranks make these calls
    together.
    """

    skeleton: Any
    """The model on meta, with adapters if it gets any."""
    names: dict[str, str]
    """The stored names of the checkpoint's weights, by the names of the model without adapters."""

    def __init__(
        self,
        path: str | Path,
        arguments: dict[str, Any],
        settings: ResolvedConfig,
        links: Links,
        *,
        dtype: torch.dtype | str = "auto",
        model_class: Any = None,
        stays_packed: bool = True,
    ) -> None:
        """``arguments`` are those of the model class's `from_pretrained`. What the config takes of them is removed.

        ``stays_packed``: see `read_form`. Raises ValueError if there is no such checkpoint, or for a form that is not
        read. If the weights are packed, or all must be decoded, their files are downloaded.
        """
        self.settings = settings
        self._arguments, self._links, self._stays_packed = arguments, links, stays_packed
        self.checkpoint = Checkpoint.open(path, arguments)
        config = self.checkpoint.take_config(arguments)
        self.model_class = model_class or model_class_of(config, self.checkpoint.code)
        if not stays_packed or quantization_of(config) is not None:
            self.checkpoint.fetch_weights(None, settings, links)  # they say how they are packed
        self.form = read_form(self.checkpoint.folder, config, stays_packed=stays_packed)
        self.config = self._own_config = self.form.model_config
        self.is_auto = dtype == "auto"
        self.was_float16 = self.is_auto and _has_float16(self.config)
        self.dtype = load_dtype(path, self.config, dtype)

    def build(
        self,
        *,
        compute_dtype: torch.dtype | None = None,
        quantization_config: Any = None,
        finish: Callable[[Any], Any] | None = None,
        is_trained: bool = True,
    ) -> None:
        """Make `skeleton`, `names` and `settings`. ``compute_dtype``: that of the model if it is not the checkpoint's.
        Raises ValueError for a ``quantization_config`` or settings that cannot be combined with the checkpoint."""
        self._finish, self._is_trained = finish, is_trained
        if self.form.is_decoded:
            check_dequantizes(quantization_config)
            quantization_config = None
        compute_dtype = compute_dtype or self.dtype
        self.settings = quantized_as_asked(self.settings, quantization_config, compute_dtype)
        self._tie()
        # `finish` may change the model's size. Building changes the config's dtype, which a merge loads.
        if finish is not None or not self._stays_packed:
            self._own_config = copy.deepcopy(self.config)
        with torch.device("meta"):
            self.skeleton = skeleton_of(self.model_class, self._own_config, self.dtype, self.checkpoint.code)
            self.names = {name: name for name, _ in self.skeleton.named_parameters()}
        self.form.fit(self.skeleton)
        if quantization_config is not None and not self.form.is_packed:
            name_unpacked(self.skeleton, self.settings.quantize)
        if finish is not None:
            with torch.device("meta"):
                self.skeleton, self.names = finished_skeleton(self.skeleton, finish)
        if not is_trained:
            self.skeleton.requires_grad_(False)
        trained = {name for name, parameter in self.skeleton.named_parameters() if parameter.requires_grad}
        frozen = [name for name, own in self.names.items() if own not in trained]
        self.settings = self.form.settings(self.settings, compute_dtype, frozen)

    def _tie(self) -> None:
        """Have tied weights loaded once. See `config_as_tied`."""
        if ties_weights(self.config) and (self.checkpoint.missing or has_safetensors(self.checkpoint.folder)):
            self.checkpoint.fetch_weights(None, self.settings, self._links)  # values are compared
            build = partial(skeleton_of, self.model_class, dtype=self.dtype, code=self.checkpoint.code)
            self.config, renamed = config_as_tied(self.checkpoint.folder, self.config, build, self.dtype)
            self._own_config = self.config
            self.checkpoint = replace(self.checkpoint, renamed=renamed)

    def check(self, layout: OffloadLayout) -> None:
        """Raise ValueError if the checkpoint cannot be stored as it is laid out, or if its files are damaged. Downloads
        what is missing, if there is room for it and the store. Raises RanksDisagreeError if ranks read other files."""
        self.form.check_stored(layout.blocks, self.names)
        self.checkpoint.fetch_weights(layout.records, self.settings, self._links)
        check_safetensors(self.checkpoint.folder)
        check_equal_checkpoints(self.checkpoint.folder, self._links, self._own_config)

    def stream(self, tiers: Tiers, layout: OffloadLayout, *, casts: bool = False) -> Any:
        """Load the model, and write its weights to the store. Its parameters are placeholders. With ``casts`` the
        checkpoint's dtypes may differ from the store's."""
        access = ParameterAccess.to_load(tiers.store, layout.blocks, tiers.states, tiers.links)
        sink = WeightSink(access, self.names, of_any_dtype=casts)
        # Masters are the products of codes and scales, before they are rounded.
        dtype = torch.float32 if self.form.is_decoded and casts and self.is_auto else self.dtype
        total_bytes = stored_bytes(access, self.names.values())
        with long_work(f"streaming {self.checkpoint.name}", total_bytes), streamed_to(sink) as unused:
            model = self.load(dtype, sink)
        self.check_loaded(model, unused)
        return_freed_memory()
        if not self._is_trained:
            model.requires_grad_(False)
        check_equal_configs(getattr(model, "config", None), self._links)
        check_equal_weights(model.named_parameters(), self._links)  # new heads are in no checkpoint
        store_the_rest(model, access, self.names)
        if self._finish is None:
            return model
        return finished(model, self._finish, access, self.names, self._links)

    def load(self, dtype: torch.dtype | str, sink: WeightSink | None = None) -> Any:
        """Return the model that the class's `from_pretrained` makes. Weights that stay packed go to ``sink``."""
        checkpoint = self.checkpoint
        arguments = checkpoint.loading_arguments(self.model_class, self._arguments)
        as_formed = tensors_replaced(lambda tensors: self.form.replace_tensors(tensors, sink))
        with as_formed, tensors_replaced(checkpoint.as_tied):
            model = self.model_class.from_pretrained(checkpoint.folder, config=self.config, dtype=dtype, **arguments)
        checkpoint.name_model(model)
        return model

    def check_loaded(self, model: Any, unused: Mapping[str, int]) -> None:
        """Log a warning that names tensors of the checkpoint that are no weights of the model. ``unused``: their bytes.
        Raises ValueError if the model has none of its weights from the checkpoint."""
        self.form.check_loaded(model, unused)
        if unused and all(parameter.device.type != "meta" for parameter in model.parameters()):
            raise ValueError(
                f"{self.checkpoint.name} has no weight of {type(model).__name__}, only others such as {min(unused)}; "
                "give the class and the config of this checkpoint"
            )
        if unused:
            logger.warning(
                "%s of %s (%s) are no weights of %s and are not loaded, such as %s; saved models do not have them",
                times(len(unused), "tensor"),
                self.checkpoint.name,
                format_bytes(sum(unused.values())),
                type(model).__name__,
                min(unused),
            )


def model_to_plan(
    path: str | Path,
    arguments: Mapping[str, Any],
    settings: ResolvedConfig,
    *,
    dtype: torch.dtype | str = "auto",
    lora_rank: int | None = None,
) -> tuple[Any, torch.dtype, ResolvedConfig]:
    """Return a model on meta, its dtype, and the settings that follow from its checkpoint, for a plan. Weights are not
    needed. With a ``lora_rank`` the model is frozen, and has adapters of that rank on all linear layers.

    ``arguments``: as for `Checkpoint.open`. Raises ValueError if there is no such model, and for a form that is not
    read.
    """
    config = read_model_config(path, arguments)
    code = {name: arguments[name] for name in CODE_ARGUMENTS if name in arguments}
    dtype = planning_dtype(config, dtype)
    model = weightless_model(config, dtype, code=code)
    fields = quantization_of(config)
    is_four_bit = fields is not None and bool(fields.get("load_in_4bit"))
    if fields is not None and not is_four_bit:
        refuse_other_methods(path, fields)
    if is_four_bit or (fields is not None and lora_rank is not None and settings.quantize.method == "auto"):
        form = published_form(path, config)
        form.fit(model)
        settings = form.settings(settings, dtype, [name for name, _ in model.named_parameters()])
    if lora_rank is not None:
        from peft import LoraConfig, TaskType

        lora = LoraConfig(r=lora_rank, target_modules="all-linear", task_type=TaskType.CAUSAL_LM)
        with torch.device("meta"):
            model, _ = adapted_skeleton(model, lora)
    return model, dtype, settings


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

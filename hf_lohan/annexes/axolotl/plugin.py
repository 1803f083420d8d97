"""The plugin of axolotl, its refusals, its loader and its trainer."""

from __future__ import annotations

import contextlib
import functools
import random
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from axolotl.integrations.base import BasePlugin
from pydantic import BaseModel, Field

from hf_lohan import OffloadTrainerMixin, engine_of, from_pretrained
from hf_lohan.compat.patches import replaced
from hf_lohan.config import ConfigError, OffloadConfig
from hf_lohan.huggingface.models.adapters import changes_the_base
from hf_lohan.huggingface.optimizers import OPTIM_NAMES, choose_optimizer, config_named_by_optim
from hf_lohan.planning import MicroBatches
from hf_lohan.report.run_data import STORE_FOLDER

_PLACED = "places or shards the model, but offload streams the model to its device itself; leave it out"
_PLANNED = "chooses which activations stay, but offload plans this (activations in the section lohan); leave it out"
_LEARNING_RATES = "gives some parameters their own learning rate, which is not supported here; leave it out"
_READS_LATER = "keeps weights until the backward, but by then they are not on the device; leave it out"
_CHANGES = "changes weights or their modules within the run; leave it out"
_FP16 = "needs loss scaling, which offload does not do; write bf16: true, or bf16: false for float32"
_REFUSED = {
    "rl": "trains from preferences or rewards; use the trainers of hf_lohan.trl for it",
    "reward_model": "trains a reward model; use hf_lohan.trl.RewardTrainer for it",
    "process_reward_model": "trains a reward model; use the trainers of hf_lohan.trl for it",
    "load_in_8bit": "has bitsandbytes pack the base; write adapter: lora, and quantize: int8 in the section lohan",
    "quantize_moe_experts": "packs experts while they load; write quantize: nf4 in the section lohan for it",
    "gptq": "is a format that offload does not decode; give the checkpoint that is not quantized",
    "use_onebitllms": "replaces the model's layers with layers of a package; leave it out",
    "use_ray": "has Ray start the training; start it with axolotl train",
    "reinit_weights": "starts from random weights; save such a model, and give its folder as base_model",
    "fix_untrained_tokens": "changes weights after they are in the store; leave it out",
    "fp16": _FP16,
    "float16": _FP16,
    **dict.fromkeys(("fsdp", "fsdp_config", "deepspeed", "device_map", "max_memory", "gpu_memory_limit"), _PLACED),
    **dict.fromkeys(("lora_on_cpu", "ple_cpu_offload", "qlora_sharded_model_loading"), _PLACED),
    **dict.fromkeys(("activation_offloading", "layer_offloading"), "is done by offload, as planned; leave it out"),
    **dict.fromkeys(("selective_checkpointing", "tiled_mlp"), _PLANNED),
    **dict.fromkeys(("loraplus_lr_ratio", "embedding_lr", "embedding_lr_scale", "lr_groups"), _LEARNING_RATES),
    **dict.fromkeys(("relora", "lisa_step_interval", "qat", "fp8", "flash_optimum"), _CHANGES),
    **dict.fromkeys(("use_kernels", "fused_attn_kernel", "flash_attn_fuse_mlp"), _READS_LATER),
    **dict.fromkeys(("use_scattermoe", "use_sonicmoe"), _READS_LATER),
    **dict.fromkeys(("liger_fused_linear_cross_entropy", "cut_cross_entropy"), _READS_LATER),
}
"""Settings of axolotl that are refused under offload. Each text says why, and what to do."""
_REFUSED_VALUES = {
    "bf16": (("full",), "casts the whole model, whose weights are in the store; write bf16: true"),
    "gradient_checkpointing": (("offload", "offload_disk"), "is done by offload, as planned; write true, or nothing"),
    "nf4_backend": (("torchao",), "is not the NF4 of offload and bitsandbytes; leave it out"),
    "experts_implementation": (("scattermoe", "sonicmoe"), _READS_LATER),
}
_REFUSED_PLUGINS = {
    "cut_cross_entropy": _READS_LATER,
    "grokfast": "changes gradients, but these leave the device before the plugin reads them; leave it out",
    "llm_compressor": _CHANGES,
}
"""axolotl's own plugins that are refused under offload."""
_ABOVE_ONE = (
    *("tensor_parallel_size", "context_parallel_size", "sequence_parallel_degree", "expert_parallel_size"),
    *("dp_shard_size", "dp_replicate_size"),
)
_RANGE = re.compile(r"\[[0-9]*(:[0-9]*)?\]$")
"""Matches the end of a pattern of `unfrozen_parameters` that trains only some rows of a weight: [5] or [:10]."""
_LORA_KERNELS = ("lora_mlp_kernel", "lora_qkv_kernel", "lora_o_kernel", "lora_embedding_kernel")
_ADAPTERS = (None, "", "lora", "qlora")
_SET_BY_US = ("torch_dtype", "dtype", "device_map", "max_memory", "low_cpu_mem_usage", "quantization_config")
"""Arguments of axolotl for loading a model that are dropped, because `from_pretrained` chooses these itself."""


class LohanSection(BaseModel):
    """The section that the plugin adds to axolotl's configuration."""

    lohan: dict[str, Any] | str | None = Field(
        default=None, description="Train with the state on SSDs: 'lohan' (all automatic), a YAML file, or a table."
    )


class AxolotlPlugin(BasePlugin):  # type: ignore[misc]
    """Lets axolotl train with offloading if its configuration has a section `lohan`, and otherwise does nothing."""

    _is_choosing = False

    def get_input_args(self) -> str:
        return f"{LohanSection.__module__}.{LohanSection.__qualname__}"

    def register(self, cfg: Any) -> None:
        """Raise ConfigError for settings that are not allowed, before anything is loaded. ``cfg`` has the content of
        the file. axolotl adds its own defaults later."""
        if "lohan" in cfg and cfg["lohan"] in (None, True):  # `lohan:` with nothing below it
            cfg["lohan"] = "lohan"
        if settings_in(cfg) is None:
            return
        check_run(cfg)
        if cfg.get("adapter"):
            for name in _LORA_KERNELS:  # axolotl would turn them on
                cfg[name] = False
        stream_models()

    def post_train(self, cfg: Any, model: Any) -> None:
        """Save the model on all ranks, because each has a part of it. axolotl itself would save on one rank only."""
        if engine_of(model) is not None and model.save_pretrained is not _do_nothing:
            model.save_pretrained(cfg.output_dir)
            model.save_pretrained = _do_nothing  # axolotl calls this method again

    def get_trainer_cls(self, cfg: Any) -> type[Any] | None:
        """Return the class that axolotl would choose, with offloading."""
        settings = settings_in(cfg)
        if settings is None or self._is_choosing:
            return None
        self._is_choosing = True
        try:
            return offloading(_stock_class(cfg), settings)
        finally:
            self._is_choosing = False


def settings_in(cfg: Any) -> Any:
    """Return the section `lohan` in plain types, or None without this section or if the command does not train."""
    is_training = not (cfg.get("merge_lora") or cfg.get("inference"))
    return _plain(cfg.get("lohan")) if is_training else None


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):  # its class returns an attribute for every name
        return {name: _plain(inner) for name, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list) else value


# Refusals.


def check_run(cfg: Any) -> None:
    """Raise ConfigError for wrong offload settings, and for settings of axolotl that offload does not support."""
    settings = settings_in(cfg)
    if not isinstance(settings, str | dict):
        raise ConfigError(f"lohan: {settings!r} is not an offload configuration; write lohan: lohan, a file or a table")
    OffloadConfig.load(settings)
    for name, why in _REFUSED.items():
        if cfg.get(name):
            raise ConfigError(f"{name}: {_plain(cfg.get(name))} {why}")
    for name, (values, why) in _REFUSED_VALUES.items():
        if cfg.get(name) in values:
            raise ConfigError(f"{name}: {cfg.get(name)} {why}")
    for name in _ABOVE_ONE:
        if (cfg.get(name) or 1) > 1:
            raise ConfigError(f"{name}: {cfg.get(name)} {_PLACED}")
    for name in _LORA_KERNELS:
        if cfg.get(name):
            raise ConfigError(f"{name}: {cfg.get(name)} {_READS_LATER}")
    for name, why in _REFUSED_PLUGINS.items():
        if any(name in str(plugin) for plugin in cfg.get("plugins") or ()):
            raise ConfigError(f"plugins: axolotl's {name} {why}")
    _check_adapter(cfg)
    optimizer = _name_of(cfg.get("optimizer"))
    if optimizer is not None and optimizer not in OPTIM_NAMES:
        raise ConfigError(
            f"optimizer: {optimizer} has no exact rule under offload; write adamw_torch_fused or another of "
            f"{', '.join(OPTIM_NAMES)}, or optimizer: muon in the section lohan"
        )


def _check_adapter(cfg: Any) -> None:
    adapter = cfg.get("adapter")
    if adapter not in _ADAPTERS:
        raise ConfigError(f"adapter: {adapter} is not supported under offload; write adapter: lora or qlora")
    if cfg.get("load_in_4bit") and adapter != "qlora":
        raise ConfigError(
            "load_in_4bit: True is for adapter: qlora; write adapter: qlora, or adapter: lora and quantize: nf4 in the "
            "section lohan"
        )
    init = "loftq" if _loftq_of(cfg) else cfg.get("peft_init_lora_weights")
    if changes_the_base(init):
        raise ConfigError(
            f"peft_init_lora_weights: {init} changes the base's weights, and these stream to the store while adapters "
            "are made; leave it out"
        )
    patterns = cfg.get("unfrozen_parameters") or ()
    parts = [pattern for pattern in patterns if _RANGE.search(str(pattern))]
    if parts:
        raise ConfigError(
            f"unfrozen_parameters: {parts[0]} trains a part of a weight, but offload trains or freezes only whole "
            "weights; leave the range out"
        )


def _loftq_of(cfg: Any) -> Any:
    return ((cfg.get("peft") or {}).get("loftq_config") or {}).get("loftq_bits")


def _name_of(value: Any) -> Any:
    return getattr(value, "value", value)  # the value may be a member of an enumeration


# Loading.


def stream_models() -> None:
    """Make axolotl's loader stream the models of runs that offload. It loads other models as before."""
    from axolotl.loaders import ModelLoader

    stock_load = ModelLoader.load
    if hasattr(stock_load, "streams_models"):
        return

    @functools.wraps(stock_load)
    def load(loader: Any) -> Any:
        if settings_in(loader.cfg) is None or loader.inference or loader.reference_model:
            return stock_load(loader)
        return stream(loader, stock_load)

    load.streams_models = True  # type: ignore[attr-defined]
    setattr(ModelLoader, "load", load)  # noqa: B010 - an attribute of axolotl


def stream(loader: Any, stock_load: Callable[[Any], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the result of `load` of an axolotl `ModelLoader`: the model with its weights in the store, and the
    configuration of its adapters.

    Steps of the loader and of plugins after the model is built (resized embeddings, adapters, patches) run twice: with
    a model on the meta device, which determines the content of the store, and with the streamed model. Steps before the
    model is built run once, before both, because plugins replace classes of layers in these steps.
    """
    cfg = loader.cfg
    if cfg.fp16 or cfg.float16:  # axolotl may have set this, because the device has no bfloat16
        raise ConfigError(f"fp16: True {_FP16}")
    loader.patch_manager.apply_pre_model_load_patches()
    cfg.device_map = None  # axolotl had chosen it
    loader._apply_pre_model_load_setup()
    loader.plugin_manager.pre_model_load(cfg)
    loader.patch_manager.apply_post_plugin_pre_model_load_patches()
    loader.patch_manager.apply_pre_model_load_patches = loader._apply_pre_model_load_setup = _do_nothing
    loader.patch_manager.apply_post_plugin_pre_model_load_patches = _do_nothing
    # The store chooses dtypes. Packed weights need no preparation.
    loader._convert_embedding_modules_dtype = loader._prepare_model_for_quantization = _do_nothing
    adapters: Any = None

    def finish(base: Any) -> Any:
        nonlocal adapters
        loader._build_model = functools.partial(_take, loader, base)
        is_weightless = next(base.parameters()).device.type == "meta"
        prepared = replaced(loader.plugin_manager, pre_model_load=_do_nothing)  # plugins were called before
        with prepared, _unchanged_random_numbers() if is_weightless else contextlib.nullcontext():
            if is_weightless and hasattr(base, "resize_token_embeddings"):
                resize = base.resize_token_embeddings
                base.resize_token_embeddings = lambda size, **_: resize(size, mean_resizing=False)
            model, adapters = stock_load(loader)
            _freeze(model, cfg)
        return model

    config, optimizer = _optimizer_of(cfg, OffloadConfig.load(settings_in(cfg)))
    micro_batches = MicroBatches.of_run(config, cfg.gradient_accumulation_steps)
    model = from_pretrained(
        loader.base_model,
        offload=config,
        bf16=bool(cfg.bf16 or cfg.bfloat16),
        default_ssd_path=Path(cfg.output_dir) / STORE_FOLDER,
        hold_gradients=micro_batches.holds_gradients(1.0 if cfg.max_grad_norm is None else cfg.max_grad_norm),
        sums_gradients=micro_batches.sums_gradients,
        optimizer=optimizer,
        dtype=cfg.torch_dtype,
        model_class=_class_of(loader),
        config=loader.model_config,
        quantization_config=_quantization_of(loader),
        finish=finish,
        trust_remote_code=bool(cfg.trust_remote_code),
        **{name: value for name, value in loader.model_kwargs.items() if name not in _SET_BY_US},
    )
    return model, adapters


def _do_nothing(*args: Any, **kwargs: Any) -> None: ...


def _take(loader: Any, base: Any) -> bool:
    """Replace a loader's `_build_model`. Return True, so that the loader does not move the model to its device."""
    setattr(loader, "model", base)  # noqa: B010 - an attribute of axolotl
    return True


@contextlib.contextmanager
def _unchanged_random_numbers() -> Iterator[None]:
    python, numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        yield
    random.setstate(python)
    np.random.set_state(numpy)


def _freeze(model: Any, cfg: Any) -> None:
    """Freeze the parameters that axolotl will freeze later, so that the store needs no optimizer states for them."""
    from axolotl.utils.freeze import freeze_layers_except, freeze_mm_modules

    if cfg.unfrozen_parameters:
        freeze_layers_except(model, cfg.unfrozen_parameters)
    if cfg.freeze_mm_modules:
        freeze_mm_modules(model)


def _class_of(loader: Any) -> Any:
    name = loader.model_type
    is_auto = not name or name == "AutoModelForCausalLM" or loader.cfg.trust_remote_code
    return loader.auto_model_loader if is_auto else getattr(transformers, name)


def _quantization_of(loader: Any) -> Any:
    """Return the quantization config for the base, if one is set and the checkpoint is not already quantized."""
    if getattr(loader.model_config, "quantization_config", None) is not None:
        return None
    return loader.model_kwargs.get("quantization_config")


def _optimizer_of(cfg: Any, config: OffloadConfig) -> tuple[OffloadConfig, Any]:
    """Return the settings and the optimizer of a run. Some names of optimizers mean 8-bit moments, as a setting."""
    given = cfg.optim_args
    if isinstance(given, Mapping):
        given = ",".join(f"{name}={value}" for name, value in given.items())
    args = transformers.TrainingArguments("unused", optim=_name_of(cfg.optimizer), optim_args=given)
    config = config_named_by_optim(args, config)
    return config, choose_optimizer(args, None, transformers.Trainer.get_optimizer_cls_and_kwargs, config)


# Training.


def _stock_class(cfg: Any) -> type[Any]:
    """Return the class that axolotl's builder chooses. The builder asks the plugins first."""
    from axolotl.core.builders import HFCausalTrainerBuilder

    builder = HFCausalTrainerBuilder.__new__(HFCausalTrainerBuilder)
    builder.cfg = cfg
    chosen: type[Any] = builder._get_trainer_cls()
    return chosen


def offloading(stock: type[Any], settings: Any) -> type[Any]:
    """Return a subclass of axolotl's trainer ``stock`` that offloads with ``settings``."""

    class StockGroups(stock):  # type: ignore[misc]
        """Groups parameters as axolotl does if transformers has a name for the optimizer."""

        def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
            return transformers.Trainer.create_optimizer(self, *args, **kwargs)

    class OffloadingTrainer(OffloadTrainerMixin, StockGroups):
        default_offload = settings

    OffloadingTrainer.__name__ = OffloadingTrainer.__qualname__ = stock.__name__
    return OffloadingTrainer

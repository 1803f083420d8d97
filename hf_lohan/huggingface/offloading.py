"""Offloads a model: one in memory, or that of a checkpoint, which is then never in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lohan.config import OffloadConfig
from hf_lohan.device import Device, default_torch_device
from hf_lohan.engine import OffloadEngine, ParameterAccess, check_equal_weights, drain_model
from hf_lohan.huggingface.attachment import attach
from hf_lohan.huggingface.equal_runs import check_equal_configs
from hf_lohan.huggingface.layers import recompute_without_reentry
from hf_lohan.huggingface.local_run import LocalRun
from hf_lohan.huggingface.models.adapters import adding_adapters, check_peft_config
from hf_lohan.huggingface.models.recipe import ModelRecipe, refuse_placement, take_torch_dtype
from hf_lohan.huggingface.models.saving import dtypes_of, dtypes_to_save
from hf_lohan.huggingface.optimizers import make_optimizer_choice
from hf_lohan.model import Rules


def offload_model(
    model: nn.Module,
    config: OffloadConfig,
    *,
    torch_device: torch.device | str,
    default_ssd_path: str | Path,
    working_dtype: torch.dtype | None = None,
    hold_gradients: bool = True,
    sums_gradients: bool = True,
    rules: Rules | None = None,
    device: Device | None = None,
    is_beside_others: bool = False,
) -> OffloadEngine:
    """Move the weights of a model from memory to the store, and attach an engine to the model. The model then computes
    in `working_dtype` (default: each parameter's dtype). Float32 weights keep their exact values as masters. `rules`
    returns each parameter's update rule. `device` replaces the device for `torch_device`. `is_beside_others`: see
    `LocalRun.tiers`.
    Raises ValueError, before any weight is changed, if the model, the budgets, the paths or an earlier run there do not
    allow it."""
    run = LocalRun.begin(config, torch_device, default_ssd_path, device)
    recompute_without_reentry(model)
    settings = run.settings_for(model, run.settings)
    layout = run.layouts(
        model,
        settings,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        rules=rules,
    )(model)
    layout = replace(layout, saved_dtypes=dtypes_to_save(layout, settings.save_dtype, dtypes_of(model)))
    check_equal_configs(getattr(model, "config", None), run.links)
    check_equal_weights(model.named_parameters(), run.links)
    with run.tiers(layout, settings, is_beside_others=is_beside_others) as tiers:
        access = ParameterAccess.to_load(tiers.store, layout.blocks, tiers.states, tiers.links)
        drain_model(layout.blocks, access)
        return attach(model, layout, tiers, settings)


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
    working_dtype = torch.bfloat16 if bf16 else None
    run = LocalRun.begin(offload, torch_device or default_torch_device(), default_ssd_path)
    recipe = ModelRecipe(path, kwargs, run.settings, run.links, dtype=dtype, model_class=model_class)
    recipe.build(
        compute_dtype=working_dtype, quantization_config=quantization_config, finish=finish, is_trained=is_trained
    )
    settings = run.settings_for(recipe.skeleton, recipe.settings)
    lay_out = run.layouts(
        recipe.skeleton,
        settings,
        working_dtype=working_dtype,
        hold_gradients=hold_gradients,
        sums_gradients=sums_gradients,
        rules=None if optimizer is None else make_optimizer_choice(optimizer).rules,
    )
    layout = lay_out(recipe.skeleton)
    # With bf16=True a float16 checkpoint keeps its number of bytes when it is saved.
    loaded_dtypes = {} if recipe.was_float16 else dtypes_of(recipe.skeleton)
    saved_dtypes = dtypes_to_save(layout, settings.save_dtype, loaded_dtypes)
    recipe.check(layout)
    with run.tiers(layout, settings, is_beside_others=is_trained) as tiers:
        model = recipe.stream(tiers, layout, casts=bf16)
        final = lay_out(model)
        if final.identity != layout.identity:
            raise ValueError(
                "the loaded model differs from the model that its config describes, so the store does not fit; load "
                "the model in memory, and pass it instead of its path"
            )
        return attach(model, replace(final, saved_dtypes=saved_dtypes), tiers, settings).model

"""Loads a checkpoint for generation. The first run streams the weights to the store, and later runs use the store."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from hf_lohan.compat.transformers_private import cache_among
from hf_lohan.costs import KeysAndValues
from hf_lohan.engine.ranks import all_agree
from hf_lohan.huggingface.attachment import attach
from hf_lohan.huggingface.local_run import LocalRun, settings_given
from hf_lohan.huggingface.models.recipe import ModelRecipe, weightless_model
from hf_lohan.huggingface.models.weight_sink import make_placeholders
from hf_lohan.planning import bytes_per_token, forward_without_values, lay_out_generation
from hf_lohan.store import Store
from hf_lohan.wording import format_bytes, times

logger = logging.getLogger(__name__)

_FACT = "generates"
"""Name of a fact in the commit: the fingerprint of the checkpoint's files."""
_BUFFERS = "all_buffers.safetensors"
"""File in the commit's journal with all buffers of the model, including those that are not in checkpoints."""
_FILES = (".safetensors", ".bin", ".json")


def load_for_generation(
    path: str | Path,
    offload: Any = "lohan",
    *,
    max_length: int | None = None,
    num_sequences: int = 1,
    torch_device: torch.device | str | None = None,
    dtype: torch.dtype | str = "auto",
    default_ssd_path: str | Path = "lohan_store",
    model_class: Any = None,
    revision: str | None = None,
    token: str | bool | None = None,
    trust_remote_code: bool = False,
    **kwargs: Any,
) -> Any:
    """Load a model for `generate`. The weights are streamed from the store for each token.

    Args:
        path: a checkpoint folder, or the name of a model in the Hub, which is downloaded to its cache.
        offload: anything that `OffloadConfig.load` takes.
        max_length: maximum number of tokens of a sequence, including its prompt. Required. A part of `gpu_memory` is
            reserved for keys and values. A call with more tokens raises RuntimeError.
        num_sequences: the number of prompts times the number of beams.
        torch_device: the device that computes. None is the GPU, or the CPU if there is no GPU.
        dtype: dtype of the weights. "auto" is the checkpoint's dtype, or float32 for float16.
        default_ssd_path: the store's folder if the configuration has no path.
        model_class: a class or an auto class of transformers. The default is the class that the config names.
        revision, token: for a model in the Hub, as for `AutoModelForCausalLM.from_pretrained`.
        trust_remote_code: run code from the checkpoint.
        kwargs: arguments of the model class's `from_pretrained`, such as `attn_implementation`, and values for the
            checkpoint's config.

    The store has one copy of the weights, and no optimizer states. Later calls use it until the checkpoint's files
    change. Raises ValueError, before weights are read, if two layers and the keys and values do not fit the budgets, or
    if the store has another model.

    With several ranks (processes of one launcher), all ranks call this together. Each rank stores its shard of each
    layer, or whole experts. Then all ranks must call `generate` equally often. Their prompts may differ.
    """
    from transformers import GenerationConfig

    if max_length is None:
        raise ValueError(
            "max_length is required, because device memory is reserved for the keys and values of each sequence; give "
            "the largest number of tokens, including the prompt, such as max_length=2048"
        )
    run = LocalRun.begin(settings_given(offload), torch_device, default_ssd_path)
    arguments = {**kwargs, "revision": revision, "token": token, "trust_remote_code": trust_remote_code}
    settings = replace(
        run.settings, activations="keep", durability="checkpoint", chunks=replace(run.settings.chunks, loss=False)
    )
    recipe = ModelRecipe(path, arguments, settings, run.links, dtype=dtype, model_class=model_class)
    recipe.build(is_trained=False)
    settings, skeleton = recipe.settings, recipe.skeleton
    if not skeleton.can_generate():
        raise ValueError(
            f"{type(skeleton).__name__}, the class of {str(path)!r}, cannot generate; pass model_class=, such as "
            "transformers.AutoModelForCausalLM"
        )
    lay_out = partial(
        lay_out_generation,
        config=settings,
        working_dtype=None,
        keys_and_values=keys_and_values(
            partial(weightless_model, recipe.config, torch.bfloat16, recipe.model_class, recipe.checkpoint.code),
            recipe.dtype,
            num_sequences,
            max_length,
        ),
        memory_is_host=run.device.memory_is_host,
        experts_per_token=getattr(recipe.config, "num_experts_per_tok", None),
        ranks=run.links.ranks,
    )
    layout = lay_out(skeleton)
    recipe.check(layout)
    fingerprint = _fingerprint(recipe.checkpoint.folder, recipe.dtype)
    with run.tiers(layout, settings) as tiers:
        is_stored = all_agree(run.links, "the weights are in the store", _is_in_store(tiers.store, fingerprint))
        if is_stored and _take_buffers(skeleton, tiers.store):
            tiers.store.drop_drafts()  # drafts of a new store are zeros
            logger.info("the store in %s already has the weights of this checkpoint", tiers.store.paths[0].path)
            model = skeleton
            if (Path(recipe.checkpoint.folder) / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(recipe.checkpoint.folder)
        else:
            model = recipe.stream(tiers, layout)
            layout = lay_out(model)
            if layout.identity.fingerprint != tiers.store.model.fingerprint:
                raise ValueError(
                    f"the model of {str(path)!r} differs from the model that its config describes, so the store does "
                    "not fit; generate with transformers itself"
                )
            buffers = {name: buffer.detach().cpu().contiguous().clone() for name, buffer in _buffers(model)}
            tiers.store.commit({_FACT: fingerprint}, {_BUFFERS: save(buffers)})
        engine = attach(model.eval(), layout, tiers, settings)
    engine.commits.leave_to_journal()  # the weights no longer change, so no more commits are needed
    # torch chooses kernels by `requires_grad`, which is True for the weights of the stock model.
    model.requires_grad_(True)
    model.register_forward_pre_hook(_refuse_gradients, prepend=True)  # must precede the hook that begins a step
    model.register_forward_pre_hook(partial(_refuse_more_tokens, num_sequences, max_length), with_kwargs=True)
    logger.info("each token reads %s from the drives", format_bytes(bytes_per_token(layout)))
    return model


def keys_and_values(build: Callable[[], Any], dtype: torch.dtype, num_sequences: int, num_tokens: int) -> KeysAndValues:
    """Return the size of a model's keys and values for ``num_tokens`` tokens, from a forward on fake tensors. The
    largest layer counts twice, because its old and new tensors exist at the same time when a token is added. Warns if
    the cache has no tensors to count."""
    model = build().eval()
    tokens = torch.zeros(num_sequences, num_tokens, dtype=torch.long)
    cache = cache_among(forward_without_values(model, input_ids=tokens, use_cache=True))
    layers = [
        sum(value.numel() for value in vars(layer).values() if isinstance(value, Tensor))
        for layer in getattr(cache, "layers", [])
    ]
    if not any(layers):
        logger.warning(
            "the cache of %s has no tensors that can be counted, so gpu_memory reserves nothing for it", type(model)
        )
    num_elements = sum(layers) + max(layers, default=0)
    return KeysAndValues(num_sequences=num_sequences, num_tokens=num_tokens, num_bytes=num_elements * dtype.itemsize)


def _fingerprint(path: str | Path, dtype: torch.dtype) -> str:
    """Return a hash of the names, sizes and times of a checkpoint's files, and of the dtype of the loaded weights."""
    files = sorted(file for file in Path(path).iterdir() if file.suffix in _FILES)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([stats, str(dtype)]).encode()).hexdigest()


def _refuse_gradients(_model: nn.Module, _args: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a model of load_for_generation cannot be trained, but it was called with gradients enabled; call it under "
            "torch.no_grad(), or load it with hf_lohan.from_pretrained to train it"
        )


def _refuse_more_tokens(
    num_sequences: int, max_length: int, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raise RuntimeError if the keys and values of a call do not fit the reserved part of `gpu_memory`."""
    tokens = args[0] if args else kwargs.get("input_ids")
    if tokens is None:
        tokens = kwargs.get("inputs_embeds")
    if tokens is None or kwargs.get("use_cache") is False:
        return
    num_cached = int(getattr(cache_among(kwargs), "get_seq_length", lambda: 0)())
    rows, length = tokens.shape[0], num_cached + tokens.shape[1]
    if rows > num_sequences or length > max_length:
        raise RuntimeError(
            f"this call needs keys and values of {times(rows, 'sequence')} of {times(length, 'token')}, and gpu_memory "
            f"has room for {num_sequences} of {max_length}; generate fewer, or load the model with "
            f"load_for_generation(..., max_length={max(length, max_length)}, num_sequences={max(rows, num_sequences)})"
        )


def _is_in_store(store: Store, fingerprint: str) -> bool:
    committed = store.committed
    return committed is not None and not committed.is_torn and committed.facts.get(_FACT) == fingerprint


def _take_buffers(skeleton: nn.Module, store: Store) -> bool:
    """Connect a model on the meta device to its weights in the store, and load its buffers. If the model has tensors
    that are not in the store, change nothing and return False."""
    assert store.committed is not None
    values = load(store.committed.journal[_BUFFERS])
    modules = dict(skeleton.named_modules())
    others = [value for module in modules.values() for value in vars(module).values() if isinstance(value, Tensor)]
    if {name for name, _ in _buffers(skeleton)} != set(values) or others:
        return False
    for name, value in values.items():
        owner, _, own_name = name.rpartition(".")
        setattr(modules[owner], own_name, value)
    make_placeholders(skeleton)
    return True


def _buffers(model: nn.Module) -> list[tuple[str, Tensor]]:
    return list(model.named_buffers(remove_duplicate=False))

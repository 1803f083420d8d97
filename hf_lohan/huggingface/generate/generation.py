"""Load a checkpoint to generate: its weights alone go to the store, once, and a later run finds them there."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor, nn

from hf_lohan.compat.transformers_private import cache_among
from hf_lohan.device import default_torch_device
from hf_lohan.engine import ParameterAccess
from hf_lohan.huggingface.attachment import attach, open_device, open_tiers_or_take_over, settings_given
from hf_lohan.huggingface.models.loading import load_dtype, make_placeholders, skeleton_of, store_the_rest, stream_model
from hf_lohan.huggingface.models.weightless_model import read_model_config, weightless_model
from hf_lohan.huggingface.ranks import refuse_generation_of_ranks
from hf_lohan.planner import KeysAndValues
from hf_lohan.planning import bytes_per_token, lay_out_generation
from hf_lohan.planning.layout import resolved_here
from hf_lohan.store import Store
from hf_lohan.wording import format_bytes, times

logger = logging.getLogger(__name__)

_FACT = "generates"
"""In a commit: which files the weights are of."""
_BUFFERS = "all_buffers.safetensors"
"""In its journal: what a model has beside its weights, also what no checkpoint holds."""
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
) -> Any:
    """A causal LM from a checkpoint folder, frozen, for `generate`: its weights come from the store token by token.

    Args:
        path: a checkpoint folder, as for `AutoModelForCausalLM.from_pretrained`.
        offload: anything that `OffloadConfig.load` takes.
        max_length: needed; tokens of each sequence, with its prompt, for whose keys and values `gpu_memory` leaves
            room. A call that goes beyond it raises RuntimeError.
        num_sequences: prompts times beams.
        torch_device: where to compute; None is the GPU if there is one.
        dtype: dtype of the weights; "auto" is the checkpoint's own.
        default_ssd_path: the store's folder if the configuration names none.
        model_class: default `AutoModelForCausalLM`.

    The store takes one copy of the weights, and no state of an optimizer. It is used again as it is while the
    checkpoint's files stay the same; else they are streamed anew. Raises ValueError (budgets that hold less than two
    layers beside the keys and values, a foreign store, several ranks) before a weight is read.
    """
    from transformers import AutoModelForCausalLM, GenerationConfig

    model_class = model_class or AutoModelForCausalLM
    if not os.path.isdir(path):
        raise ValueError(f"{str(path)!r} is not a checkpoint folder; give the path of one")
    if max_length is None:
        raise ValueError(
            "max_length is needed: room on the device is kept for the keys and values of so many tokens of each "
            "sequence, its prompt's among them; give max_length=2048, for example"
        )
    refuse_generation_of_ranks()
    config = settings_given(offload)
    device = open_device(config, torch_device or default_torch_device())
    config = replace(
        resolved_here(config, device, default_ssd_path), activations="keep", durability="checkpoint", chunked_loss=False
    )
    model_config = read_model_config(path)
    wanted_dtype = load_dtype(path, model_config, dtype)
    with torch.device("meta"):
        skeleton = skeleton_of(model_class, model_config, wanted_dtype).requires_grad_(False)
    lay_out_for_this = partial(
        lay_out_generation,
        config=config,
        working_dtype=None,
        keys_and_values=keys_and_values(model_config, wanted_dtype, num_sequences, max_length),
        memory_is_host=device.memory_is_host,
        experts_per_token=getattr(model_config, "num_experts_per_tok", None),
    )
    layout = lay_out_for_this(skeleton)
    fingerprint = _fingerprint(path, wanted_dtype)
    tiers = open_tiers_or_take_over(layout, config, device)
    try:
        if _is_in_store(tiers.store, fingerprint) and _take_buffers(skeleton, tiers.store):
            tiers.store.drop_drafts()  # the zeros that opening it anew has made of it
            logger.info("the store in %s has the weights of this checkpoint already", tiers.store.paths[0].path)
            model = skeleton
            if (Path(path) / "generation_config.json").is_file():
                model.generation_config = GenerationConfig.from_pretrained(path)
        else:
            access = ParameterAccess(tiers.store, layout.blocks, tiers.states, tiers.links)
            names = {name: name for name, _ in skeleton.named_parameters()}
            model = stream_model(path, model_class, model_config, wanted_dtype, access, names).requires_grad_(False)
            store_the_rest(model, access, names)
            layout = lay_out_for_this(model)
            if layout.identity.fingerprint != tiers.store.model.fingerprint:
                raise ValueError(
                    f"the model of {str(path)!r} differs from the one its config describes, so its weights are not "
                    "where they were planned; generate with transformers itself"
                )
            buffers = {name: buffer.detach().cpu().contiguous().clone() for name, buffer in _buffers(model)}
            tiers.store.commit({_FACT: fingerprint}, {_BUFFERS: save(buffers)})
        engine = attach(model.eval(), layout, tiers, config)
    except BaseException:
        tiers.close()
        raise
    engine.commits.leave_to_journal()  # nothing changes any more, so nothing is to be committed
    # For a weight that needs no gradient torch takes another kernel, and stock's weights need one.
    model.requires_grad_(True)
    model.register_forward_pre_hook(_refuse_gradients, prepend=True)  # the engine would take it for a training step
    model.register_forward_pre_hook(partial(_refuse_more_tokens, num_sequences, max_length), with_kwargs=True)
    logger.info("each token reads %s from the drives", format_bytes(bytes_per_token(layout)))
    return model


def keys_and_values(config: Any, dtype: torch.dtype, num_sequences: int, num_tokens: int) -> KeysAndValues:
    """What a model of a transformers config keeps of so many tokens, found by a forward without numbers. Of one layer
    the old ones are there beside the new ones when a token is added, and so counted twice. What a class keeps in
    tensors that its cache does not name is not known, and logged."""
    with torch.device("meta"), torch.no_grad():
        model = weightless_model(config, torch.bfloat16).eval()
        tokens = torch.zeros(num_sequences, num_tokens, dtype=torch.long)
        try:
            cache = cache_among(model(input_ids=tokens, use_cache=True))
        except Exception as error:
            raise ValueError(f"a forward of {type(model).__name__} over {num_tokens} tokens fails: {error}") from error
    layers = [sum(numel for numel in _numels(layer)) for layer in getattr(cache, "layers", [])]
    if not any(layers):
        logger.warning("%s keeps its past where it cannot be counted: gpu_memory leaves no room for it", type(model))
    num_elements = sum(layers) + max(layers, default=0)
    return KeysAndValues(num_sequences=num_sequences, num_tokens=num_tokens, num_bytes=num_elements * dtype.itemsize)


def _numels(layer: object) -> Iterator[int]:
    for value in vars(layer).values():
        if isinstance(value, Tensor):
            yield value.numel()


def _fingerprint(path: str | Path, dtype: torch.dtype) -> str:
    """Of the files of a checkpoint: names, sizes and times, and the dtype in which they are loaded."""
    files = sorted(file for file in Path(path).iterdir() if file.suffix in _FILES)
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([stats, str(dtype)]).encode()).hexdigest()


def _refuse_gradients(_model: nn.Module, _args: Any) -> None:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "a model that load_for_generation has loaded is called with gradients on, and has nowhere to put them; "
            "call it under torch.no_grad(), or load it with hf_lohan.from_pretrained to train it"
        )


def _refuse_more_tokens(
    num_sequences: int, max_length: int, _model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Refuse keys and values that `gpu_memory` leaves no room for."""
    given = args[0] if args else kwargs.get("input_ids")
    if given is None:
        given = kwargs.get("inputs_embeds")
    if given is None or kwargs.get("use_cache") is False:
        return
    seen = int(getattr(cache_among(kwargs), "get_seq_length", lambda: 0)())
    rows, length = given.shape[0], seen + given.shape[1]
    if rows > num_sequences or length > max_length:
        raise RuntimeError(
            f"this call makes keys and values of {times(rows, 'sequence')} of {times(length, 'token')}, and gpu_memory "
            f"leaves room for {num_sequences} of {max_length}; generate fewer, or load the model with "
            f"load_for_generation(..., max_length={max(length, max_length)}, num_sequences={max(rows, num_sequences)})"
        )


def _is_in_store(store: Store, fingerprint: str) -> bool:
    """Whether the weights of these files are committed there."""
    committed = store.committed
    return committed is not None and not committed.is_torn and committed.facts.get(_FACT) == fingerprint


def _take_buffers(skeleton: nn.Module, store: Store) -> bool:
    """Make a model on meta one whose weights are in the store. False, and nothing is changed, where it has tensors of
    which the store does not know: those the class's own loading makes."""
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

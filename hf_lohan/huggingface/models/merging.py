"""Merges a saved adapter of PEFT into a checkpoint, a weight at a time."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from hf_lohan.absent import AbsentParameter
from hf_lohan.checkpoint.whole_folder import check_new_folder, unfinished_checkpoint
from hf_lohan.compat.transformers_conversions import UnreadWeight, loaded_unread
from hf_lohan.config import OffloadConfig
from hf_lohan.device import CpuDevice
from hf_lohan.huggingface.models.adapters import PendingMerges, ReadableBase, merge_through_store
from hf_lohan.huggingface.models.hub import adapter_folder, check_safetensors
from hf_lohan.huggingface.models.recipe import ModelRecipe, refuse_placement, take_torch_dtype
from hf_lohan.huggingface.models.saving import SavedWeights, dtype_of_config, on_meta, save_weights
from hf_lohan.huggingface.models.weight_sink import make_placeholders
from hf_lohan.planning.layout import resolved_here
from hf_lohan.ranks import Links

_PIECE_BYTES = 32 << 20
"""Approximate size of the pieces in which weights are copied."""
_TOKENIZERS = (
    *("tokenizer*", "*vocab*", "merges.txt", "special_tokens_map.json", "added_tokens.json", "*processor_config.json"),
    *("chat_template*", "*.jinja", "*.model", "*.model.v*", "*.tiktoken", "*.spm", "*.bpe", "*.codes"),
)
"""Files of tokenizers and processors."""


def merge(
    adapter: str | Path,
    base: str | Path,
    output: str | Path,
    *,
    dtype: torch.dtype | str = "auto",
    model_class: Any = None,
    **kwargs: Any,
) -> None:
    """Merge a saved adapter of PEFT into a base model, and save the result as a plain model of transformers.

    The weights are bitwise equal to `PeftModel.from_pretrained(model, adapter).merge_and_unload()` followed by
    `save_pretrained(output)`. They are read, merged and written one by one, so that the model is never in memory. The
    tokenizer's files are copied from the adapter, or from the base if the adapter has none.

    Args:
        adapter: a folder with an adapter, or the name of an adapter in the Hub.
        base: a checkpoint folder, or the name of a model in the Hub. It may differ from the base of the training, but
            its weights must have the same shapes: after training over packed weights, the bfloat16 original fits.
        output: a new or empty folder. It appears only when it is complete.
        dtype: dtype of the weights. "auto" is the checkpoint's dtype.
        model_class: a class or an auto class of transformers. The default is the class that the config names.
        kwargs: passed to the model class's `from_pretrained`, such as `revision` and `trust_remote_code`.

    Raises ValueError, before a weight is written, if the adapter or the base does not exist, if the base's weights have
    different shapes, or if the adapter cannot be merged.
    """
    refuse_placement(kwargs, "which a merge reads and writes one weight at a time")
    dtype = take_torch_dtype(kwargs, dtype)
    asked = kwargs.pop("quantization_config", None)
    if asked is not None and not getattr(asked, "dequantize", False):
        raise ValueError(
            f"quantization_config={type(asked).__name__} was given, but a merged model is saved without quantization; "
            "leave it out"
        )
    check_new_folder(output)
    folder, target = adapter_folder(adapter), Path(os.path.abspath(output))
    settings = resolved_here(OffloadConfig(), CpuDevice(), target.parent)
    recipe = ModelRecipe(
        base, kwargs, settings, Links.alone(), dtype=torch.float32, model_class=model_class, stays_packed=False
    )
    recipe.build()
    check_safetensors(recipe.checkpoint.folder)
    model, weights = _unread_model(recipe, dtype)
    # A weight may be a view of the file. PEFT writes saved modules into weights, so it gets a clone.
    readable = ReadableBase(lambda parameter: weights[parameter]().clone())
    readable.hide(weights)
    adapted = _with_saved_adapter(model, weights, folder, os.fspath(adapter), recipe.checkpoint.name)
    merged: list[tuple[Any, PendingMerges]] = []
    merge_through_store(adapted, lambda *result: merged.append(result), weights.keys())
    adapted.merge_and_unload()
    ((model, merges),) = merged
    merged_weights = _MergedWeights(model, weights, merges)
    state_dict, dtype_of_model = on_meta(model.state_dict(), merged_weights), dtype_of_config(model, merged_weights)
    with unfinished_checkpoint(str(target.parent), target.name, f"_unfinished_{target.name}") as unfinished:
        out, stock = unfinished / target.name, type(model).save_pretrained
        save_weights(model, state_dict, merged_weights, dtype_of_model, stock, out)
        _copy_tokenizer(folder, recipe.checkpoint.folder, out)


def _unread_model(recipe: ModelRecipe, dtype: torch.dtype | str) -> tuple[Any, dict[nn.Parameter, UnreadWeight]]:
    """Return a model of placeholders, and a dict from placeholder to the weight, which is read on access."""
    unread: dict[str, UnreadWeight] = {}
    model = recipe.load(dtype, loaded_unread(unread))
    weights: dict[nn.Parameter, UnreadWeight] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in unread:
            weights.setdefault(parameter, unread[name])  # a tied weight is read under its first name
    make_placeholders(model, only=weights)
    return model, weights


def _with_saved_adapter(
    model: Any, weights: dict[nn.Parameter, UnreadWeight], folder: str, adapter: str, base: str
) -> Any:
    """Return the model with a saved adapter, as `PeftModel.from_pretrained` does. Raises ValueError if the adapter does
    not fit."""
    from peft import PeftConfig, get_peft_model, load_peft_weights

    config = PeftConfig.from_pretrained(folder)
    config.inference_mode = True
    try:
        saved = load_peft_weights(folder, device="cpu")
    except SafetensorError as error:
        raise ValueError(
            f"the weights of the adapter {adapter!r} are damaged ({error}); save or download it again"
        ) from None
    _read_saved_embeddings(model, weights, saved)
    try:
        adapted: Any = get_peft_model(model, config)
        if not hasattr(adapted, "merge_and_unload"):
            kind = getattr(config.peft_type, "value", config.peft_type)
            raise ValueError(
                f"the adapter {adapter!r} is of type {kind}, which has no weights to merge into a base; load it with "
                "peft.PeftModel"
            )
        loaded = adapted.load_adapter(folder, "default", torch_device="cpu")
    except RuntimeError as error:
        lines = [line.strip() for line in str(error).splitlines() if "size mismatch" in line]
        if lines:
            raise ValueError(
                f"the adapter {adapter!r} was trained over a model whose shapes differ from {base!r}: "
                f"{lines[0].rstrip('.')}; give the base of the training, or a base with the same shapes"
            ) from None
        if getattr(config, "init_lora_weights", True) not in (True, False):
            raise ValueError(
                f"the adapter {adapter!r} changes its base when it is loaded (init_lora_weights="
                f"{config.init_lora_weights!r}), so it cannot be merged one weight at a time; save it with "
                "path_initial_model_for_weight_conversion=..., or merge it in memory"
            ) from error
        raise
    names = list(adapted.named_parameters(remove_duplicate=False))
    found = {parameter for name, parameter in names if name not in loaded.missing_keys}  # layers may share parameters
    missing = [name for name, parameter in names if parameter not in found]
    others = [
        *missing,
        *(name for name in loaded.unexpected_keys if not _is_projection(adapted, name, saved.get(name))),
    ]
    if others:
        has = "does not have" if missing else "also has"
        raise ValueError(
            f"the adapter {adapter!r} was trained over a different model than {base!r}: it {has} {others[0]}; give the "
            "base of the training, or a base with the same shapes"
        )
    return adapted


def _is_projection(adapted: nn.Module, name: str, saved: Tensor | None) -> bool:
    """Return whether a saved tensor is a random projection of VeRA that equals the model's. PEFT before 0.21 generates
    projections when it loads an adapter, and does not expect saved projections."""
    end = f".{name.rpartition('.')[2]}.default"
    buffers = (buffer for buffer_name, buffer in adapted.named_buffers() if buffer_name.endswith(end))
    return saved is not None and any(torch.equal(buffer, saved.to(buffer)) for buffer in buffers)


def _read_saved_embeddings(model: Any, weights: dict[nn.Parameter, UnreadWeight], saved: Mapping[str, Tensor]) -> None:
    """Load the base's weights that the adapter also has, such as resized embeddings, into the model's parameters."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name in saved:
        parameter = parameters.get(name.removeprefix("base_model.model.").replace(".base_layer.", "."))
        if parameter is not None and parameter in weights:
            AbsentParameter.show(parameter, weights.pop(parameter)())


class _MergedWeights(SavedWeights):
    def __init__(self, model: Any, weights: Mapping[nn.Parameter, UnreadWeight], merges: PendingMerges) -> None:
        named = model.named_parameters(remove_duplicate=False)
        super().__init__({name: own for name, own in named if own in weights or own in merges}, merges)
        self._weights = weights

    def dtype_of(self, name: str) -> torch.dtype:
        return self._parameters[name].dtype

    def _read(self, parameter: nn.Parameter) -> Tensor:
        return self._weights[parameter]() if parameter in self._weights else parameter.data

    def _read_pieces(self, parameter: nn.Parameter) -> Iterator[Tensor]:
        weight = self._with_rows(parameter)
        if weight is None:
            return iter([self._read(parameter).reshape(-1)])
        num_rows = weight.form.shape[0]
        at_once = max(1, _PIECE_BYTES * num_rows // max(weight.form.nbytes, 1))
        firsts = range(0, num_rows, at_once)
        return (weight.rows(first, min(first + at_once, num_rows)).reshape(-1) for first in firsts)

    def _read_row(self, parameter: nn.Parameter, row: int) -> Tensor:
        weight = self._with_rows(parameter)
        return self._read(parameter)[row : row + 1] if weight is None else weight.rows(row, row + 1)

    def _with_rows(self, parameter: nn.Parameter) -> UnreadWeight | None:
        """Return a weight if its rows can be read one by one, or None if it must be read whole."""
        weight = self._weights.get(parameter)
        return weight if weight is not None and weight.has_rows else None

    def _to_merge(self, parameter: nn.Parameter) -> Tensor:
        return self._read(parameter).clone()


def _copy_tokenizer(adapter: str, base: str, output: Path) -> None:
    source = adapter if os.path.isfile(os.path.join(adapter, "tokenizer_config.json")) else base
    for path in Path(source).iterdir():
        if path.is_file() and any(fnmatch(path.name, pattern) for pattern in _TOKENIZERS):
            shutil.copyfile(path, output / path.name)
    templates = Path(source, "additional_chat_templates")
    if templates.is_dir():
        shutil.copytree(templates, output / templates.name)

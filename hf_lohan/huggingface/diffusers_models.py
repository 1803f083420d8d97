"""Transformers of diffusers: what is theirs in being saved."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from torch import Tensor, nn

from hf_lohan.checkpoint.safetensors_stream import TensorSpec, write_safetensors
from hf_lohan.huggingface.saving import StoredModel, StoredWeights, save_together

_MAX_SHARD_SIZE = "10GB"
"""Where nobody says otherwise: as diffusers has it."""
_WEIGHTS_NAME = "diffusion_pytorch_model"


def is_of_diffusers(model: nn.Module) -> bool:
    """Whether diffusers loads and saves it."""
    return any(base.__module__.partition(".")[0] == "diffusers" for base in type(model).__mro__)


def save_diffusers_model(stored_model: StoredModel, save_directory: str | Path, **kwargs: Any) -> None:
    """`save_diffusers_from_store`, on all ranks together."""
    if stored_model.links.ranks.others:
        kwargs.pop("is_main_process", None)  # who writes is decided
    save_together(stored_model, lambda model: save_diffusers_from_store(model, save_directory, **kwargs))


def save_diffusers_from_store(
    stored_model: StoredModel,
    save_directory: str | Path,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    **kwargs: Any,
) -> None:
    """`ModelMixin.save_pretrained`, with its files and their names, piece by piece from the store. Raises ValueError
    for arguments that it does not take."""
    asked = {name: value for name, value in kwargs.items() if value and name != "safe_serialization"}
    if asked or kwargs.get("safe_serialization") is False:
        raise ValueError(
            f"save_pretrained of an offloaded model does not take {', '.join(asked) or 'safe_serialization=False'}; "
            "leave it out, and push the folder when it is there"
        )
    if not is_main_process:
        return
    folder, model = Path(save_directory), stored_model.model
    folder.mkdir(parents=True, exist_ok=True)
    model.save_config(folder)
    weights = StoredWeights(stored_model)
    state_dict = model.state_dict()
    others = {name: tensor for name, tensor in state_dict.items() if name not in weights}
    forms = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in state_dict.items()}

    def pieces_of(name: str) -> Iterable[Tensor]:
        return [others[name]] if name in others else weights.pieces(name)

    suffix = f".{variant}" if variant else ""
    split = split_torch_state_dict_into_shards(
        forms,
        max_shard_size=max_shard_size or _MAX_SHARD_SIZE,
        filename_pattern=f"{_WEIGHTS_NAME}{{suffix}}{suffix}.safetensors",
    )
    for file, names in split.filename_to_tensors.items():
        specs = [
            TensorSpec(name, form.dtype, form.numel(), pieces_of(name), shape=tuple(form.shape))
            for name, form in ((name, forms[name]) for name in names)
        ]
        write_safetensors(folder / file, specs)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{_WEIGHTS_NAME}.safetensors.index{suffix}.json").write_text(text, encoding="utf-8")

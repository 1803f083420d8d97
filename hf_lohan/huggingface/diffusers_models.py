"""Transformers of diffusers: what is theirs in being saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hf_lohan.huggingface.saving import StoredModel, save_together
from hf_lohan.huggingface.state_dicts import save_shards

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
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    stored_model.model.save_config(folder)
    suffix = f".{variant}" if variant else ""
    save_shards(stored_model, folder, weights_name=_WEIGHTS_NAME, max_shard_size=max_shard_size, suffix=suffix)

"""Reads and writes state dicts of models without the `save_pretrained` of transformers, such as diffusers models."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_lohan.checkpoint.safetensors_stream import TensorSpec, write_safetensors
from hf_lohan.huggingface.models.hub import safetensors_files
from hf_lohan.huggingface.models.saving import (
    StoredModel,
    num_bytes,
    save_together,
    saved_state_dict,
    saving_arguments,
)
from hf_lohan.huggingface.models.weight_sink import WeightSink
from hf_lohan.huggingface.progress import long_work
from hf_lohan.model import is_peft_model

WEIGHTS_NAME = "model"
"""Stem of the file names, as in transformers and accelerate."""
_DIFFUSERS_WEIGHTS_NAME = "diffusion_pytorch_model"
_MAX_SHARD_SIZE = "10GB"
"""Default size of shards, as in accelerate and diffusers."""


def saves_itself(model: Any) -> bool:
    """Return whether Trainer saves the model with `save_pretrained`. Trainer saves the state dict of other models."""
    return isinstance(model, PreTrainedModel) or is_peft_model(model)


class _StateDict:
    """A state dict to save, with each tied weight only once."""

    def __init__(self, stored_model: StoredModel, given: Mapping[str, Tensor] | None = None) -> None:
        """``given``: as for `saved_state_dict`."""
        forms, self._weights = saved_state_dict(stored_model, given)
        aliases = self._weights.aliases()
        self.forms = {name: form for name, form in forms.items() if name not in aliases}

    def write(self, file: Path, names: Iterable[str]) -> None:
        """Write the tensors with these names to a file."""
        specs = []
        for name in sorted(names, key=lambda name: (-self.forms[name].dtype.itemsize, name)):
            form = self.forms[name]
            pieces = self._weights.pieces(name) if name in self._weights else [form]
            specs.append(TensorSpec(name, form.dtype, form.numel(), pieces, shape=tuple(form.shape)))
        write_safetensors(file, specs)


def save_state_dict(stored_model: StoredModel, file: str | Path, given: Mapping[str, Tensor] | None = None) -> None:
    """Write a model's state dict to one file. All ranks call this together. ``given``: as for `saved_state_dict`."""

    def save(model: StoredModel) -> None:
        state_dict = _StateDict(model, given)
        with long_work(f"saving {file}", num_bytes(state_dict.forms)):
            state_dict.write(Path(file), state_dict.forms)

    save_together(stored_model, file, save)


def save_shards(
    stored_model: StoredModel,
    folder: str | Path,
    *,
    weights_name: str = WEIGHTS_NAME,
    max_shard_size: int | str | None = None,
    suffix: str = "",
) -> None:
    """Write a model's state dict to files of at most ``max_shard_size``, and an index if there are several files.
    ``suffix`` is inserted before the extension."""
    folder, state_dict = Path(folder), _StateDict(stored_model)
    folder.mkdir(parents=True, exist_ok=True)
    split = split_torch_state_dict_into_shards(
        state_dict.forms,
        max_shard_size=max_shard_size or _MAX_SHARD_SIZE,
        filename_pattern=f"{weights_name}{{suffix}}{suffix}.safetensors",
    )
    with long_work(f"saving {folder}", num_bytes(state_dict.forms)):
        for file, names in split.filename_to_tensors.items():
            state_dict.write(folder / file, names)
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        text = json.dumps(index, indent=2, sort_keys=True) + "\n"
        (folder / f"{weights_name}.safetensors.index{suffix}.json").write_text(text, encoding="utf-8")


def is_of_diffusers(model: nn.Module) -> bool:
    return any(base.__module__.partition(".")[0] == "diffusers" for base in type(model).__mro__)


def save_diffusers_model(stored_model: StoredModel, save_directory: str | Path, *args: Any, **kwargs: Any) -> None:
    """Call `save_diffusers_from_store`. All ranks call this together."""
    named = saving_arguments(type(stored_model.model).save_pretrained, args, kwargs)
    save = partial(save_diffusers_from_store, save_directory=save_directory)
    save_together(stored_model, save_directory, save, **named)


def save_diffusers_from_store(
    stored_model: StoredModel,
    save_directory: str | Path,
    *,
    is_main_process: bool = True,
    max_shard_size: int | str | None = None,
    variant: str | None = None,
    **kwargs: Any,
) -> None:
    """Save as `ModelMixin.save_pretrained` does, piece by piece from the store. Raises ValueError for unsupported
    arguments."""
    unsupported = {name: value for name, value in kwargs.items() if value and name != "safe_serialization"}
    if unsupported or kwargs.get("safe_serialization") is False:
        raise ValueError(
            "save_pretrained of an offloaded model does not support "
            f"{', '.join(unsupported) or 'safe_serialization=False'}; leave it out, and push the folder afterwards"
        )
    if not is_main_process:
        return
    folder = Path(save_directory)
    folder.mkdir(parents=True, exist_ok=True)
    stored_model.model.save_config(folder)
    suffix = f".{variant}" if variant else ""
    save_shards(
        stored_model, folder, weights_name=_DIFFUSERS_WEIGHTS_NAME, max_shard_size=max_shard_size, suffix=suffix
    )


def stream_state_dict(path: str | Path, sink: WeightSink) -> dict[str, Tensor]:
    """Pass the weights in a file, or in the files of a folder, to ``sink``. Large weights are passed a few rows at a
    time. Returns the tensors that are not in the store. Raises ValueError if no file exists."""
    rest: dict[str, Tensor] = {}
    for file in _files_of(Path(path)):
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                if not _store_in_rows(opened, name, sink):
                    weight = opened.get_tensor(name)
                    if not sink.store_weight(name, weight):
                        rest[name] = weight
    return rest


def _store_in_rows(opened: Any, name: str, sink: WeightSink) -> bool:
    """Store a large weight a few rows at a time. Returns False if the weight is not large or not in the store."""
    rows = opened.get_slice(name)
    shape = torch.Size(rows.get_shape())
    rows_at_once = max(1, sink.most_bytes * shape[0] // (4 * shape.numel())) if shape.numel() else 1
    if not shape or rows_at_once >= shape[0]:
        return False
    for first in range(0, shape[0], rows_at_once):
        if not sink.store_rows(name, shape, first, rows[first : first + rows_at_once]):
            return False
    return True


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    files = safetensors_files(path)
    if not files:
        raise ValueError(f"{str(path)!r} has no {WEIGHTS_NAME}.safetensors; give the folder of a checkpoint")
    return [path / name for name in files]

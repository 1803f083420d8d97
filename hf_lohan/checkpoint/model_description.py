"""Files that describe the model of a store, so that it can be exported. A commit names these files."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_lohan.compat.torch_private import persistent_buffers
from hf_lohan.engine import OffloadEngine
from hf_lohan.files.directories import temporary_folder
from hf_lohan.model import base_of, dtype_name

FACTS_NAME = "lohan_model.json"
BUFFERS_NAME = "buffers.safetensors"
MODEL_FORMAT_VERSION = 1
"""Version of the format of the file `FACTS_NAME`."""


def describe_model(model: Any, engine: OffloadEngine, tokenizer: Any = None) -> dict[str, bytes]:
    """Return a dict from file name to content: class, configs, adapters, persistent buffers and tokenizer. Raises
    `DiskFullError` if the files do not fit a temporary folder."""
    with temporary_folder() as name:
        folder = Path(name)
        _write_description(model, engine, folder, _copied_buffers(model))
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def save_buffers(model: nn.Module, folder: str | Path) -> None:
    """Write the model's persistent buffers, which are not in the store. Write no file if there are none."""
    if buffers := _copied_buffers(model):
        save_file(buffers, Path(folder) / BUFFERS_NAME)


def load_buffers(model: nn.Module, folder: str | Path) -> None:
    file = Path(folder) / BUFFERS_NAME
    if file.is_file():
        copy_buffers(model, load_file(file))


def copy_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Copy `values` to the model's buffers of the same names."""
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def _write_description(model: Any, engine: OffloadEngine, folder: Path, buffers: dict[str, Tensor]) -> None:
    base = base_of(model)
    configs: list[Any] = [getattr(base, "config", None), getattr(base, "generation_config", None)]
    for config in configs:
        if hasattr(config, "save_pretrained"):
            described = copy.deepcopy(config)
            if hasattr(described, "architectures"):
                described.architectures = [type(base).__name__]
            described.save_pretrained(folder)
    adapters = list(getattr(model, "peft_config", {}))
    for adapter in adapters:
        model.peft_config[adapter].save_pretrained(folder / adapter)
    save_file(buffers, folder / BUFFERS_NAME)
    facts: dict[str, Any] = {
        "format_version": MODEL_FORMAT_VERSION,
        "model_class": type(base).__name__,
        "adapters": adapters,
        "trainable": [part.name for part in engine.parameter_slices if part.trainable],
    }
    layout = engine.layout
    if layout.other_dtypes:
        common = dtype_name(layout.master.working_dtype)
        facts["dtypes"] = {part.name: common for part in engine.parameter_slices} | layout.other_dtypes
    saved: dict[str, list[str]] = {}
    for name, dtype in layout.saved_dtypes.items():
        saved.setdefault(dtype_name(dtype), []).append(name)
    if saved:
        facts["saved_dtypes"] = saved
    if engine.config.quantize.packs:
        facts["quantize"] = engine.config.quantize.to_setting()
    if layout.other_rules:
        facts["optimizers"] = layout.other_rules
    (folder / FACTS_NAME).write_text(json.dumps(facts, indent=1))


def _copied_buffers(model: nn.Module) -> dict[str, Tensor]:
    return {name: buffer.detach().cpu().contiguous().clone() for name, buffer in persistent_buffers(model).items()}

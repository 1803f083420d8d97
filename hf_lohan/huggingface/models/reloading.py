"""Overwrites the weights of an offloaded model with the weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from hf_lohan.checkpoint.model_description import copy_buffers
from hf_lohan.engine import OffloadEngine
from hf_lohan.huggingface.equal_runs import check_equal_checkpoints
from hf_lohan.huggingface.models.adapters import load_adapters, saved_adapters, saves_adapters
from hf_lohan.huggingface.models.hub import has_safetensors
from hf_lohan.huggingface.models.state_dicts import saves_itself, stream_state_dict
from hf_lohan.huggingface.models.weight_sink import WeightSink, streamed_to
from hf_lohan.huggingface.progress import long_work
from hf_lohan.model import has_adapters, kept_in_float32


def has_weights(model: Any, path: str | Path) -> bool:
    """Return whether a folder has a file with weights of the model, and a file for each of its adapters. False if the
    folder does not exist."""
    if saves_adapters(model):
        folders, patterns = [*saved_adapters(model, path).values()], ["adapter_model.*"]
    else:
        folders, patterns = [Path(path)], ["*.safetensors", "pytorch_model*.bin"]
    return all(any(True for pattern in patterns for _ in folder.glob(pattern)) for folder in folders)


def reload_weights(engine: OffloadEngine, model: Any, path: str | Path) -> None:
    """Overwrite the weights in the store with the weights of a checkpoint, to resume or to load the best model. Calls
    `from_pretrained`, because it fuses experts that were saved one by one."""
    if not has_weights(model, path):
        raise ValueError(f"{str(path)!r} has no weights of {type(model).__name__}; give the folder of a checkpoint")
    is_module = not saves_itself(model) and (has_safetensors(path) or not hasattr(type(model), "from_pretrained"))
    if is_module or (has_adapters(model) and not saves_adapters(model)):
        reload_state_dict(engine, model, path)
        return
    check_equal_checkpoints(path, engine.links)
    if saves_adapters(model):
        sink = WeightSink(engine.parameters, _stored_names(engine, model))
        written = load_adapters(model, path, sink.store_weight)
        expected = {part.name for part in engine.parameter_slices if part.trainable and part.parameter not in written}
    else:
        sink = WeightSink(engine.parameters)
        with streamed_to(sink, str(path)):
            loaded = type(model).from_pretrained(path, dtype=_dtype_to_reload(engine, model))
        for name, parameter in loaded.named_parameters():
            if parameter.device.type != "meta":
                sink.store_weight(name, parameter)
        copy_buffers(model, loaded.state_dict())
        expected = set(engine.parameters.parts)
    _end_reload(engine, path, expected, sink)


def _dtype_to_reload(engine: OffloadEngine, model: nn.Module) -> torch.dtype | str:
    """Return a `dtype` with which `from_pretrained` rounds no weight. The config only has the dtype of one weight."""
    kept, blocks = kept_in_float32(model), engine.layout.blocks
    dtypes = {block.master.working_dtype for block in blocks for part in block.slices if part.name not in kept}
    widest = max((dtype for dtype in dtypes if dtype.is_floating_point), key=lambda dtype: dtype.itemsize)
    return widest if widest.itemsize >= torch.float32.itemsize else "auto"


def reload_state_dict(engine: OffloadEngine, model: nn.Module, path: str | Path) -> None:
    """Overwrite the weights in the store with the state dict in a file or folder."""
    check_equal_checkpoints(path, engine.links)
    access = engine.parameters
    sink = WeightSink(access, _stored_names(engine, model))
    with long_work(f"streaming {path}", sink.total_bytes):
        copy_buffers(model, stream_state_dict(path, sink))
    _end_reload(engine, path, set(access.parts), sink)


def _stored_names(engine: OffloadEngine, model: nn.Module) -> dict[str, str]:
    """Return a dict from each name in the model's state dict to the stored name of the weight."""
    stored = {part.parameter: part.name for part in engine.parameter_slices}
    named = model.named_parameters(remove_duplicate=False)
    return {name: stored[parameter] for name, parameter in named if parameter in stored}


def _end_reload(engine: OffloadEngine, path: str | Path, expected: set[str], sink: WeightSink) -> None:
    engine.forget_weights()
    missing = sorted(expected - sink.written)
    if missing:
        raise ValueError(
            f"the checkpoint {str(path)!r} has no weights for {len(missing)} parameters of this model, such as "
            f"{missing[0]}; resume from a checkpoint of the same model"
        )

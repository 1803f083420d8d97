"""What a store needs beside its records to become a Hugging Face model again: the files that its commit names."""

from __future__ import annotations

import contextlib
import copy
import errno
import json
import logging
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hf_lohan.engine import OffloadEngine
from hf_lohan.files import write_failure

logger = logging.getLogger(__name__)

_FACTS_NAME = "lohan_model.json"
BUFFERS_NAME = "buffers.safetensors"
_FORMAT_VERSION = 1
_CONFIGS_BYTES = 64 << 10
"""About what the configs of a model take."""


def describe_model(model: Any, engine: OffloadEngine, tokenizer: Any = None) -> dict[str, bytes]:
    """Files with class, config, generation config, adapters, persistent buffers and the tokenizer, to be committed
    beside the records. Raises `CapacityError` or `StorageError` if they cannot be written."""
    buffers = _persistent_buffers(model)
    needed_bytes = sum(tensor.nbytes for tensor in buffers.values()) + _CONFIGS_BYTES
    with tempfile.TemporaryDirectory(prefix="lohan-") as name, _written(Path(name), needed_bytes):
        folder = Path(name)
        _describe(model, engine, folder, buffers)
        if hasattr(tokenizer, "save_pretrained"):
            tokenizer.save_pretrained(folder)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def save_buffers(model: nn.Module, folder: str | Path) -> None:
    """Write a model's persistent buffers, which no store holds, if it has any."""
    if buffers := _persistent_buffers(model):
        save_file(buffers, Path(folder) / BUFFERS_NAME)


def load_buffers(model: nn.Module, folder: str | Path) -> None:
    """Read back what `save_buffers` wrote."""
    file = Path(folder) / BUFFERS_NAME
    if file.is_file():
        copy_buffers(model, load_file(file))


def copy_buffers(model: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set those of a model's buffers that are in `values`, by their names in its state dict."""
    for name, buffer in model.named_buffers():
        if name in values:
            buffer.copy_(values[name])


def _describe(model: Any, engine: OffloadEngine, folder: Path, buffers: dict[str, Tensor]) -> None:
    base = model.get_base_model() if hasattr(model, "peft_config") else model
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
    facts = {
        "format_version": _FORMAT_VERSION,
        "model_class": type(base).__name__,
        "adapters": adapters,
        "trainable": [part.name for part in engine.parameter_slices if part.trainable],
    }
    (folder / _FACTS_NAME).write_text(json.dumps(facts, indent=1))


@contextlib.contextmanager
def _written(folder: Path, needed_bytes: int) -> Iterator[None]:
    """Errors tell what was needed."""
    try:
        yield
    except OSError as error:
        raise write_failure(str(folder), needed_bytes, error) from error
    except SafetensorError as error:  # how its writer tells of a full disk
        raise write_failure(str(folder), needed_bytes, OSError(errno.ENOSPC, str(error))) from error


def build_described(folder: Path) -> Any:
    """The model on meta, with its frozen weights marked and its buffers filled in.

    Raises ValueError if the folder has no description, or one of a class that transformers does not have.
    """
    import transformers

    facts = _read_facts(folder)
    model_class: Any = getattr(transformers, facts["model_class"], None)
    if not (isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel)):
        raise ValueError(
            f"{folder} is of the class {facts['model_class']!r}, which transformers {transformers.__version__} does "
            "not have; load the model with its own code and resume from a checkpoint instead"
        )
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = model_class(config)
        for adapter in facts["adapters"]:
            model = _with_adapter(model, folder / adapter, adapter)
    trainable = set(facts["trainable"])
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in trainable)
    model.load_state_dict(load_file(folder / BUFFERS_NAME), strict=False, assign=True)
    base = model.get_base_model() if facts["adapters"] else model
    if (folder / "generation_config.json").is_file():
        base.generation_config = transformers.GenerationConfig.from_pretrained(folder)
    return model


def described_tokenizer(folder: Path) -> Any | None:
    """The tokenizer that the run used, None if it told of none."""
    import transformers

    if not (folder / "tokenizer_config.json").is_file():
        return None
    return transformers.AutoTokenizer.from_pretrained(folder)


def _read_facts(folder: Path) -> dict[str, Any]:
    file = folder / _FACTS_NAME
    if not file.is_file():
        raise ValueError(f"{file} is missing, so the store cannot be exported without the code that trains it")
    facts: dict[str, Any] = json.loads(file.read_text())
    if facts["format_version"] != _FORMAT_VERSION:
        raise ValueError(
            f"{file} has format {facts['format_version']}, this version reads {_FORMAT_VERSION}; update hf_lohan"
        )
    outside = [name for name in facts["adapters"] if Path(name).name != name]
    if outside:
        raise ValueError(f"{file} names an adapter outside its folder: {outside[0]!r}")
    return facts


def _with_adapter(model: Any, folder: Path, name: str) -> Any:
    from peft import PeftConfig, PeftModel, get_peft_model

    config = PeftConfig.from_pretrained(str(folder))
    if isinstance(model, PeftModel):
        model.add_adapter(name, config)
        return model
    return get_peft_model(model, config, adapter_name=name)


def _persistent_buffers(model: nn.Module) -> dict[str, Tensor]:
    parameters = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {
        name: tensor.detach().cpu().clone() for name, tensor in model.state_dict().items() if name not in parameters
    }

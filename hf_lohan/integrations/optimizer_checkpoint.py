"""Optimizer states in a checkpoint: by parameter name, in safetensors, independent of budgets, paths and pools."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import safe_open

from hf_lohan.integrations.safetensors_stream import TensorSpec, write_safetensors
from hf_lohan.runtime import OffloadEngine

FOLDER_NAME = "lohan"
INDEX_NAME = "optimizer_index.json"
_FORMAT_VERSION = 1


def save_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Write moments, master residuals and step counts to `<checkpoint>/lohan/`, one file a block, streamed."""
    folder = Path(checkpoint) / FOLDER_NAME
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    for number, block in enumerate(block for block in engine.layout.blocks if block.trainable_slices):
        names = [part.name for part in block.trainable_slices]
        file_name = f"optimizer-{number:05d}.safetensors"
        write_safetensors(folder / file_name, _states_of(engine, names))
        files[file_name] = names
    index = {
        "format_version": _FORMAT_VERSION,
        "working_dtype": str(engine.layout.master.working_dtype).removeprefix("torch."),
        "num_updates": {part.name: part.num_updates for part in engine.parameter_slices if part.trainable},
        "files": files,
    }
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))


def _states_of(engine: OffloadEngine, names: list[str]) -> Iterator[TensorSpec]:
    access = engine.parameters
    for name in names:
        for kind in access.state_kinds(name):
            numel = access.slices[name][1].numel
            pieces = (piece for _, piece in access.read_pieces(name, kind))
            yield TensorSpec(f"{name}.{kind}", access.state_dtype(kind), numel, pieces)


def load_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read back what `save_optimizer_states` wrote, after the weights. Raises ValueError if it is not there, is of
    another model, or has another working dtype."""
    folder = Path(checkpoint) / FOLDER_NAME
    index = _read_index(folder)
    trainable = {part.name: part for part in engine.parameter_slices if part.trainable}
    if trainable.keys() != index["num_updates"].keys():
        difference = sorted(trainable.keys() ^ index["num_updates"].keys())
        raise ValueError(
            f"the optimizer states in {str(folder)!r} are for other trainable parameters ({len(difference)} differ, "
            f"such as {difference[0]}); resume with the same model and the same frozen weights"
        )
    working_dtype = str(engine.layout.master.working_dtype).removeprefix("torch.")
    if index["working_dtype"] != working_dtype:
        raise ValueError(
            f"the checkpoint was trained with {index['working_dtype']} working weights, this run uses "
            f"{working_dtype}; set bf16 as it was"
        )
    _check_files(engine, folder, index)
    _load_kinds(engine, folder, index, engine.layout.master.state_kinds)
    for name, num_updates in index["num_updates"].items():
        trainable[name].num_updates = int(num_updates)
    engine.forget_weights()


def load_master_residuals(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read back the exact masters behind bfloat16 weights, and nothing else. float32 weights need nothing."""
    if engine.layout.master.has_residual and has_optimizer_states(checkpoint):
        folder = Path(checkpoint) / FOLDER_NAME
        index = _read_index(folder)
        _check_files(engine, folder, index)
        _load_kinds(engine, folder, index, ("master_residual",))


def _check_files(engine: OffloadEngine, folder: Path, index: dict[str, Any]) -> None:
    """Before anything is overwritten: every state is there and has its parameter's size."""
    access = engine.parameters
    for file_name, names in index["files"].items():
        if Path(file_name).name != file_name:
            raise ValueError(f"{str(folder / INDEX_NAME)!r} names a file outside its folder: {file_name!r}")
        with safe_open(folder / file_name, framework="pt") as file:
            for name in names:
                for kind in access.state_kinds(name):
                    shape, numel = file.get_slice(f"{name}.{kind}").get_shape(), access.slices[name][1].numel
                    if shape != [numel]:
                        raise ValueError(
                            f"{kind} of {name} has {shape} elements in {str(folder / file_name)!r}, this model needs "
                            f"{numel}; resume with the same model"
                        )


def _load_kinds(engine: OffloadEngine, folder: Path, index: dict[str, Any], kinds: tuple[str, ...]) -> None:
    access = engine.parameters
    for file_name, names in index["files"].items():
        with safe_open(folder / file_name, framework="pt") as file:
            for name in names:
                for kind in kinds:
                    access.write_state(name, kind, file.get_slice(f"{name}.{kind}"))


def has_optimizer_states(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written under offload, with optimizer states."""
    return (Path(checkpoint) / FOLDER_NAME / INDEX_NAME).is_file()


def _read_index(folder: Path) -> dict[str, Any]:
    path = folder / INDEX_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(folder.parent)!r} has no optimizer states of an offloaded run ({path.name} is missing in it); "
            "resume from a checkpoint saved under offload, or start anew from its weights"
        )
    index: dict[str, Any] = json.loads(path.read_text())
    if index["format_version"] > _FORMAT_VERSION:
        raise ValueError(
            f"{str(path)!r} has format {index['format_version']}, this version reads up to {_FORMAT_VERSION}; "
            "update hf_lohan"
        )
    return index

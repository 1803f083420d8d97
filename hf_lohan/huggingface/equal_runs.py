"""Checks that all ranks start a run with equal packages, arguments, configs of the model and checkpoint files."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from hf_lohan import __version__
from hf_lohan.huggingface.models.hub import weight_files
from hf_lohan.ranks import Links, check_equal

_PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl")
_LIBRARIES = ("transformers", "trl")
"""Only arguments that these libraries define are compared. Arguments of a user's subclass may differ."""
_LOCAL_ARGUMENTS = {
    *("debug", "disable_tqdm", "local_rank", "model_init_kwargs", "output_dir", "project", "push_to_hub", "report_to"),
    *("resume_from_checkpoint", "run_name", "skip_memory_metrics", "torch_empty_cache_steps", "dataset_num_proc"),
    *("dataloader_multiprocessing_context", "dataloader_num_workers", "dataloader_persistent_workers"),
    *("dataloader_pin_memory", "dataloader_prefetch_factor"),
}
"""Arguments that may differ between ranks. `check_equal_checkpoints` compares the result of `model_init_kwargs`."""
_LOCAL_PREFIXES = ("ddp_", "do_", "hub_", "log_", "trackio_", "vllm_")
_LOCAL_SUFFIXES = ("_dir", "_file", "_path")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")
_NUM_PAGES = 4096
"""Number of a checkpoint's pages to compare. At least one page of each tensor is compared."""
_PAGE_BYTES = 4096
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth")


def check_equal_packages(links: Links) -> None:
    """Raise RanksDisagreeError if ranks have different versions of packages that compute."""
    check_equal("the versions of packages", _versions, links, "install the same packages on all machines")


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"the version of hf_lohan": __version__}
    for package in _PACKAGES:
        try:
            versions[f"the version of {package}"] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[f"the version of {package}"] = None
    return versions


def check_equal_arguments(args: TrainingArguments, links: Links) -> None:
    """Raise RanksDisagreeError if ranks have different arguments that affect the results."""
    find = functools.partial(_argument_values, args)
    check_equal("the training arguments", find, links, "give all ranks the same training arguments")


def _argument_values(args: TrainingArguments) -> dict[str, Any]:
    own = {
        field.name
        for base in type(args).__mro__
        if base.__module__.partition(".")[0] in _LIBRARIES and dataclasses.is_dataclass(base)
        for field in dataclasses.fields(base)
    }
    return {name: _in_json(value) for name, value in args.to_dict().items() if name in own and not _is_local(name)}


def _is_local(argument: str) -> bool:
    is_named_so = argument.startswith(_LOCAL_PREFIXES) or argument.endswith(_LOCAL_SUFFIXES)
    return argument in _LOCAL_ARGUMENTS or is_named_so


def check_equal_configs(config: Any, links: Links) -> None:
    """Raise RanksDisagreeError if ranks have different configs of the model. A model without a config passes."""
    find = functools.partial(_config_values, config)
    check_equal("the model's config", find, links, "give all ranks the same model and attn_implementation")


def check_equal_checkpoints(path: str | os.PathLike[str], links: Links, config: Any = None) -> None:
    """Raise RanksDisagreeError if ranks would read different weights from ``path``, a folder or a file. ``config``: the
    config with which the weights are loaded.

    Compares sizes, the headers of safetensors files, and some pages of each tensor. Not all data are compared, because
    each rank reads only its own part of the weights.
    """
    advice = f"give all ranks the same files in {os.fspath(path)!r} (the same revision, or one copied folder)"
    check_equal(
        "the checkpoint that each rank reads",
        lambda: {**_config_values(config), **_content_values(Path(path))},
        links,
        advice,
    )


def _config_values(config: Any) -> dict[str, Any]:
    if not hasattr(config, "to_dict"):
        return {}
    values = {**config.to_dict(), **{name: getattr(config, f"_{name}", None) for name in _IMPLEMENTATIONS}}
    return {
        f"{name} of the config": _in_json(value)
        for name, value in values.items()
        if name != "transformers_version" and not name.startswith("_") and not name.endswith(_LOCAL_SUFFIXES)
    }


def _content_values(path: Path) -> dict[str, Any]:
    """Return the sizes of a checkpoint's files, and hashes of their headers and of pages of their tensors."""
    files = {file: _extents(file) for file in _files_of(path)}
    num_tensors = sum(len(extents) for extents in files.values())
    values: dict[str, Any] = {}
    for file, extents in files.items():
        name, size = file.relative_to(path if path.is_dir() else path.parent), file.stat().st_size
        values[f"the size of {name}"] = size
        with file.open("rb") as opened:
            data_start = min((start for start, _ in extents.values()), default=size)
            values[f"the head of {name}"] = _hash_of(opened.fileno(), [(0, data_start)])
            for tensor, extent in extents.items():
                pages = [*_pages_in(*extent, max(1, _NUM_PAGES // num_tensors))]
                values[f"{tensor} in {name}"] = _hash_of(opened.fileno(), pages)
    state = path / TRAINER_STATE_NAME
    if state.is_file():
        values[f"the content of {state.name}"] = hashlib.sha256(state.read_bytes()).hexdigest()[:16]
    return values


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    named = [path / name for name in weight_files(str(path)) if (path / name).is_file()]
    beside = [file for file in path.iterdir() if file.suffix in _WEIGHT_SUFFIXES and file.name != "training_args.bin"]
    return named or sorted(beside) or sorted(path.rglob("*.safetensors"))


def _extents(file: Path) -> dict[str, tuple[int, int]]:
    """Return a dict from tensor name to its range of bytes in a file. A file in a format other than safetensors counts
    as one tensor."""
    size = file.stat().st_size
    if file.suffix == ".safetensors":
        with file.open("rb") as opened:
            head_bytes = int.from_bytes(opened.read(8), "little")
            if head_bytes < size:
                try:
                    head = json.loads(opened.read(head_bytes))
                    begin = 8 + head_bytes
                    return {
                        name: (begin + tensor["data_offsets"][0], begin + tensor["data_offsets"][1])
                        for name, tensor in head.items()
                        if name != "__metadata__"
                    }
                except (ValueError, TypeError, KeyError, AttributeError):
                    pass  # the file is damaged, and the loader raises an error later
    return {"the content": (0, size)}


def _pages_in(start: int, stop: int, most: int) -> Iterator[tuple[int, int]]:
    """Yield the byte ranges of at most ``most`` pages that are spread evenly over a tensor."""
    if stop - start <= most * _PAGE_BYTES:
        yield start, stop
        return
    for number in range(most):
        first = start + (stop - start - _PAGE_BYTES) * (2 * number + 1) // (2 * most)
        yield first, first + _PAGE_BYTES


def _hash_of(descriptor: int, ranges: list[tuple[int, int]]) -> str:
    digest = hashlib.sha256()
    for start, stop in ranges:
        digest.update(os.pread(descriptor, stop - start, start))
    return digest.hexdigest()[:16]


def _in_json(value: Any) -> Any:
    """Convert a value to JSON types. Private keys of dicts are left out."""
    if isinstance(value, Mapping):
        return {str(name): _in_json(item) for name, item in value.items() if not str(name).startswith("_")}
    if isinstance(value, list | tuple | set):
        return [_in_json(item) for item in (sorted(value, key=str) if isinstance(value, set) else value)]
    return value if value is None or isinstance(value, str | int | float | bool) else _text_of(value)


def _text_of(value: Any) -> str:
    text = str(value)
    return type(value).__name__ if " at 0x" in text else text

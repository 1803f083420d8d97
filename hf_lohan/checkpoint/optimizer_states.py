"""Saves and loads optimizer states by parameter name. They do not depend on budgets, paths and pools.

`<checkpoint>/lohan/` has one safetensors file for each block and rank, with a flat tensor for each record kind. An
index names each parameter's file, and the offset of its elements in the tensors of that file.
"""

from __future__ import annotations

import errno
import json
import math
import shutil
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hf_lohan.checkpoint.safetensors_stream import DTYPE_NAMES, TensorSpec, write_safetensors
from hf_lohan.engine import OffloadEngine, ParameterAccess
from hf_lohan.files import StorageError
from hf_lohan.files.directories import make_folders
from hf_lohan.files.reflink import RecordCloner
from hf_lohan.model import Block, ParamSlice, dtype_name
from hf_lohan.optim import ADAMW, SCALE_BLOCK_NUMEL, TIE_CODES, TIE_RUN_NUMEL, MasterFormat
from hf_lohan.optim.precision import open_ties_
from hf_lohan.ranks import Ranks
from hf_lohan.wording import states_setting

FOLDER_NAME = "lohan"
INDEX_NAME = "optimizer_index.json"
_FORMAT_VERSION = 3
_WITHOUT_TIES = 2
"""Format version without tie codes. Older versions wrote it for bfloat16 weights too, and rounded half up."""


@dataclass(frozen=True, slots=True)
class _SavedPart:
    """The states of a parameter's elements [first, last). They are elements [start, stop) of each tensor in `file`. If
    a kind has fewer elements than the parameter, `MasterFormat.elements` converts the range."""

    file: str
    start: int
    shape: tuple[int, ...]
    num_updates: int
    first: int = 0
    last: int | None = None
    """None is the end of the parameter."""

    @property
    def numel(self) -> int:
        return (math.prod(self.shape) if self.last is None else self.last) - self.first

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def to_json(self) -> dict[str, Any]:
        """Return the part in JSON's types. A whole parameter has no range."""
        fields = asdict(self)
        if self.last is None:
            del fields["first"], fields["last"]
        return fields


class _Index(NamedTuple):
    folder: Path
    working_dtype: str
    other_dtypes: dict[str, str]
    """Maps names of parameters to their dtypes, if these differ from `working_dtype`."""
    optimizer_state_dtype: str
    optimizers: dict[str, str]
    """Maps names of parameters to their update rules, if AdamW does not update them."""
    parameters: dict[str, list[_SavedPart]]
    """Parts of each parameter, in order."""

    def by_file(self) -> dict[str, list[tuple[str, _SavedPart]]]:
        files: dict[str, list[tuple[str, _SavedPart]]] = {}
        for name, places in self.parameters.items():
            for place in places:
                files.setdefault(place.file, []).append((name, place))
        return files


# Saving.


def save_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Write moments, master residuals and step counts to `<checkpoint>/lohan/`. Records are cloned if the file system
    can share blocks between files. All ranks call this. Each rank writes its shards, and rank 0 writes the index.

    Raises `StorageError` if the disk has too little room, usually before anything is written.
    """
    folder, links = Path(checkpoint) / FOLDER_NAME, engine.links
    make_folders(folder)
    blocks = [block for block in engine.layout.blocks if block.trainable_slices]
    access = engine.parameters  # waits for running updates, which move extents
    _check_room(folder, blocks)
    saved_parts: dict[str, list[dict[str, Any]]] = {}
    with closing(RecordCloner()) as cloner:
        for number, block in enumerate(blocks):
            first, last = _shard_of_states(block, links.ranks)
            if first < last:
                file_name = f"optimizer-{number:05d}{links.ranks.file_suffix}.safetensors"
                _write_states(access, cloner, block, (first, last), folder / file_name)
                for name, part in _saved_parts(engine, block, (first, last), file_name):
                    saved_parts.setdefault(name, []).append(part.to_json())
            links.barrier(f"the states of {block.name} to be saved")  # in each block, so that no rank seems to hang
    all_parts: dict[str, list[dict[str, Any]]] = {}
    for packed in links.all_gather("the parts that each rank has saved", json.dumps(saved_parts).encode()):
        for name, parts in json.loads(packed).items():
            all_parts.setdefault(name, []).extend(parts)
    if links.ranks.rank == 0:
        _write_index(engine, folder, all_parts)


def _shard_of_states(block: Block, ranks: Ranks) -> tuple[int, int]:
    """Return this rank's elements [first, last) of the block's states."""
    first, last = block.rank_ranges[ranks.rank]
    return min(first, block.state_numel), min(last, block.state_numel)


def _write_states(
    access: ParameterAccess, cloner: RecordCloner, block: Block, shard: tuple[int, int], file: Path
) -> None:
    with ExitStack() as held:
        specs = []
        for kind in block.master.state_kinds:
            begin, end = block.master.elements(kind, *shard)
            pieces = _record_pieces(access, block, kind, shard)
            held.callback(pieces.close)  # returns its buffers even if writing fails
            sources = access.extents(block, kind)
            clone = None if sources is None else partial(cloner.clone, sources)
            specs.append(TensorSpec(kind, block.master.state_dtype(kind), end - begin, pieces, clone))
        if block.master.has_residual:
            codes = access.tie_codes(block, *shard)
            specs.append(TensorSpec(TIE_CODES, codes.dtype, codes.numel(), iter([codes])))
        write_safetensors(file, specs)


def _saved_parts(
    engine: OffloadEngine, block: Block, shard: tuple[int, int], file_name: str
) -> Iterator[tuple[str, _SavedPart]]:
    """Yield (parameter name, part) for each parameter with elements in the shard."""
    for part in block.trainable_slices:
        low, high = max(part.start, shard[0]), min(part.stop, shard[1])
        if low < high:
            saved = _SavedPart(file_name, low - shard[0], tuple(part.shape), engine.step_counts[part])
            first = part.first + low - part.start
            if not part.is_whole or high - low < part.numel:
                saved = replace(saved, first=first, last=first + high - low)
            yield part.name, saved


def _write_index(engine: OffloadEngine, folder: Path, parameters: Mapping[str, list[dict[str, Any]]]) -> None:
    """Write the index. ``parameters`` has the parts of each parameter, in any order."""
    for parts in parameters.values():
        parts.sort(key=lambda part: part.get("first", 0))
    has_ties = any(block.master.has_residual for block in engine.layout.blocks)
    index: dict[str, Any] = {
        "format_version": _FORMAT_VERSION if has_ties else _WITHOUT_TIES,
        "working_dtype": dtype_name(engine.layout.master.working_dtype),
        "optimizer_state_dtype": engine.layout.master.moment_dtype,
        "parameters": {name: parts if len(parts) > 1 else parts[0] for name, parts in parameters.items()},
    }
    if others := engine.layout.other_dtypes:
        index["other_dtypes"] = {name: dtype for name, dtype in others.items() if name in parameters}
    if rules := engine.layout.other_rules:
        index["optimizers"] = rules
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))


def _check_room(folder: Path, blocks: list[Block]) -> None:
    """Raise `StorageError` if the disk has too little free space. Clones are counted too, because they take space as
    soon as the store writes its next version."""
    needed_bytes = int(sum(block.state_numel * block.master.state_bytes_per_param for block in blocks))
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed_bytes:  # some network file systems report no sizes
        raise StorageError(
            "cannot save the optimizer states to",
            path=str(folder),
            errno=errno.ENOSPC,
            advice=f"they need {needed_bytes:,} bytes and {disk.free:,} are free; free space, or keep fewer "
            "checkpoints with save_total_limit",
        )


def _record_pieces(
    access: ParameterAccess, block: Block, kind: str, shard: tuple[int, int]
) -> Generator[Tensor, None, None]:
    """Yield the shard's elements of a record in order, padded with zeros. A piece is valid until the next is read."""
    dtype = block.master.state_dtype(kind)
    end, last = block.master.elements(kind, *shard)
    for part in sorted(block.trainable_slices, key=lambda part: part.start):
        low, high = max(part.start, shard[0]), min(part.stop, shard[1])
        if low < high:
            start, stop = block.master.elements(kind, low, high)
            yield torch.zeros(start - end, dtype=dtype)
            yield from (piece for _, piece in access.read_own(block, kind, start, stop))
            end = stop
    yield torch.zeros(last - end, dtype=dtype)


# Loading.


def load_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read the states that `save_optimizer_states` wrote. The weights must be loaded first. If the states are missing,
    damaged, of another model or of other dtypes, raises ValueError before anything is overwritten."""
    index = _read_index(checkpoint)
    trainable = _check_fits(engine, index)
    _load_kinds(engine, index)
    for name, saved_parts in index.parameters.items():
        for part in trainable[name]:
            engine.step_counts[part] = saved_parts[0].num_updates
    engine.forget_weights()


def load_master_residuals(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read only the master residuals. bfloat16 weights have them, and float32 weights do not."""
    has_states = (Path(checkpoint) / FOLDER_NAME / INDEX_NAME).is_file()
    if has_states and any(block.master.has_residual for block in engine.layout.blocks):
        index = _read_index(checkpoint)
        _check_fits(engine, index)
        _load_kinds(engine, index, ("master_residual",))


def _read_index(checkpoint: str | Path) -> _Index:
    folder = Path(checkpoint) / FOLDER_NAME
    path = folder / INDEX_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(checkpoint)!r} has no optimizer states of an offloaded run ({path.name} is missing); resume from a "
            "checkpoint of an offloaded run, or start a new run from its weights"
        )
    try:
        fields = json.loads(path.read_text())
        version = int(fields["format_version"])
        if version in (_WITHOUT_TIES, _FORMAT_VERSION):
            parameters = {
                name: [_parse_part(part) for part in (parts if isinstance(parts, list) else [parts])]
                for name, parts in fields["parameters"].items()
            }
            state_dtype = str(fields.get("optimizer_state_dtype", "float32"))  # missing in early versions
            other_dtypes = {str(name): str(dtype) for name, dtype in fields.get("other_dtypes", {}).items()}
            optimizers = {name: rule for rule, names in fields.get("optimizers", {}).items() for name in names}
            return _Index(folder, str(fields["working_dtype"]), other_dtypes, state_dtype, optimizers, parameters)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error!r}); resume from another checkpoint") from error
    advice = "update hf_lohan" if version > _FORMAT_VERSION else "start a new run from the checkpoint's weights"
    raise ValueError(f"{str(path)!r} has format {version}, and this version reads {_FORMAT_VERSION}; {advice}")


def _parse_part(fields: dict[str, Any]) -> _SavedPart:
    file, start, shape, num_updates = (fields[name] for name in ("file", "start", "shape", "num_updates"))
    if Path(file).name != file:
        raise ValueError(f"a file is outside the folder: {file!r}")
    first, last = fields.get("first", 0), fields.get("last")
    numbers = (start, num_updates, first, 0 if last is None else last, *shape)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"start, num_updates and shape must be whole numbers, not {numbers}")
    return _SavedPart(file, start, tuple(shape), num_updates, first, last)


def _check_fits(engine: OffloadEngine, index: _Index) -> dict[str, list[ParamSlice]]:
    """Return the trainable parameters by name. Raises ValueError unless the index has all states of every parameter."""
    trainable: dict[str, list[ParamSlice]] = {}
    for part in engine.parameter_slices:
        if part.trainable and part.numel:
            trainable.setdefault(part.name, []).append(part)
    if trainable.keys() != index.parameters.keys():
        difference = sorted(trainable.keys() ^ index.parameters.keys())
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} are for other trainable parameters ({len(difference)} "
            f"differ, such as {difference[0]}); resume with the same model and the same frozen weights"
        )
    for name, parts in index.parameters.items():
        shape = trainable[name][0].shape
        if any(part.shape != tuple(shape) for part in parts):
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} are for {name} of shape {list(parts[0].shape)}, and "
                f"here it has shape {list(shape)}; resume with the same model"
            )
        ends = [0, *(end for part in parts for end in (part.first, part.first + part.numel)), shape.numel()]
        if ends[::2] != ends[1::2]:
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} lack elements of {name}; resume from another checkpoint"
            )
    for name in trainable:
        saved_dtype = index.other_dtypes.get(name, index.working_dtype)
        dtype = dtype_name(_master_of(engine, name).working_dtype)
        if saved_dtype != dtype:
            raise ValueError(
                f"the checkpoint was trained with {saved_dtype} working weights, and this run uses {dtype} (for "
                f"{name}); set bf16 as in the saved run"
            )
        saved_rule, rule = index.optimizers.get(name, str(ADAMW)), str(_master_of(engine, name).rule)
        if saved_rule != rule:
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} are for {saved_rule}, and this run uses {rule} (for "
                f"{name}); use {saved_rule}, or start a new run from the checkpoint's weights"
            )
    moment_dtype = engine.layout.master.moment_dtype
    if index.optimizer_state_dtype != moment_dtype:
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} were saved with "
            f"{states_setting(index.optimizer_state_dtype)}, and this run has {states_setting(moment_dtype)}; use the "
            "setting of the saved run, or start a new run from the checkpoint's weights"
        )
    if moment_dtype != "float32" and any(
        part.start % SCALE_BLOCK_NUMEL or part.first % SCALE_BLOCK_NUMEL
        for parts in index.parameters.values()
        for part in parts
    ):
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} begin in the middle of a scale block; resume from "
            "another checkpoint"
        )
    _check_files(engine, index)
    return trainable


def _check_files(engine: OffloadEngine, index: _Index) -> None:
    for file_name, parts in index.by_file().items():
        master = _master_of(engine, parts[0][0])
        last = max(part.stop for _, part in parts)
        with _open_states(index, file_name) as file:
            stored_kinds = set(file.keys())
            for kind in master.state_kinds:
                needed_numel = master.numel(kind, last)
                dtype = DTYPE_NAMES[master.state_dtype(kind)]
                record = file.get_slice(kind) if kind in stored_kinds else None
                shape = record.get_shape() if record is not None and record.get_dtype() == dtype else []
                if len(shape) != 1 or shape[0] < needed_numel:
                    raise ValueError(
                        f"{str(index.folder / file_name)!r} is damaged: it has no flat tensor {kind} with at least "
                        f"{needed_numel} elements of {dtype}; resume from another checkpoint"
                    )
            num_runs = -(-last // TIE_RUN_NUMEL)
            if TIE_CODES in stored_kinds and file.get_slice(TIE_CODES).get_shape()[0] < num_runs:
                raise ValueError(
                    f"{str(index.folder / file_name)!r} is damaged: it has fewer than {num_runs} tie codes; "
                    "resume from another checkpoint"
                )


def _load_kinds(engine: OffloadEngine, index: _Index, only: tuple[str, ...] | None = None) -> None:
    access = engine.parameters
    for file_name, parts in index.by_file().items():
        master = _master_of(engine, parts[0][0])  # a file has one block, which has one dtype
        with _open_states(index, file_name) as file:
            stored_kinds = set(file.keys())
            for kind in [kind for kind in master.state_kinds if only is None or kind in only]:
                record = file.get_slice(kind)
                codes = file.get_tensor(TIE_CODES) if TIE_CODES in stored_kinds else None
                for name, part in parts:
                    start, _ = master.elements(kind, part.start, part.stop)
                    last = part.first + part.numel
                    if kind == "master_residual":
                        source = partial(_residuals, record, codes, start)
                        access.write_residuals(name, source, first=part.first, last=last)
                    else:
                        access.write_state(name, kind, _TensorTail(record, start), first=part.first, last=last)


def _residuals(record: Any, codes: Tensor | None, origin: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
    """Return elements [start, stop) of the residuals, and the indices of ties among them. The residuals begin at
    element ``origin`` of the tensor ``record`` in a file. ``codes`` has the tie codes of this tensor."""
    if codes is None:
        return record[origin + start : origin + stop], torch.empty(0, dtype=torch.int64)
    run = (origin + start) // TIE_RUN_NUMEL
    before = origin + start - run * TIE_RUN_NUMEL
    residual: Tensor = record[run * TIE_RUN_NUMEL : origin + stop].clone()  # it may share memory with the file
    ties = open_ties_(residual, codes[run : -((-origin - stop) // TIE_RUN_NUMEL)]) - before
    return residual[before:], ties[ties >= 0]


class _TensorTail:
    """The elements of a tensor in a file that begin at element `start`."""

    def __init__(self, record: Any, start: int) -> None:
        self._record = record
        self._start = start

    def __getitem__(self, part: slice, /) -> Tensor:
        piece: Tensor = self._record[self._start + part.start : self._start + part.stop]
        return piece


@contextmanager
def _open_states(index: _Index, file_name: str) -> Iterator[Any]:
    path = index.folder / file_name
    try:
        file = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{str(path)!r} is missing or damaged ({error}); resume from another checkpoint") from error
    with file:
        yield file


def _master_of(engine: OffloadEngine, name: str) -> MasterFormat:
    block, _ = engine.parameters.parts[name][0]
    return block.master

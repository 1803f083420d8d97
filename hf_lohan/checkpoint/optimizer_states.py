"""Optimizer states in a checkpoint: found by parameter name, in safetensors, independent of budgets, paths and pools.

`<checkpoint>/lohan/` has one file a block, or one a block and rank, with a flat tensor for each record kind, and an
index that says for each parameter in which file, and from which element of every tensor there, its own elements begin.
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
from hf_lohan.optim import ADAMW, SCALE_BLOCK_NUMEL, MasterFormat
from hf_lohan.ranks import Ranks

FOLDER_NAME = "lohan"
INDEX_NAME = "optimizer_index.json"
_FORMAT_VERSION = 2


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the states of a parameter's elements [first, last) are: elements [start, stop) of each tensor of `file`, or
    those that go with these (`MasterFormat.elements`)."""

    file: str
    start: int
    shape: tuple[int, ...]
    num_updates: int
    first: int = 0
    last: int | None = None
    """None: to the parameter's end."""

    @property
    def numel(self) -> int:
        return (math.prod(self.shape) if self.last is None else self.last) - self.first

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def to_json(self) -> dict[str, Any]:
        """A whole parameter's has no range."""
        fields = asdict(self)
        if self.last is None:
            del fields["first"], fields["last"]
        return fields


class _Index(NamedTuple):
    folder: Path
    working_dtype: str
    other_dtypes: dict[str, str]
    """By name, of parameters that have another one."""
    optimizer_state_dtype: str
    optimizers: dict[str, str]
    """By name, of parameters that have another one than AdamW."""
    parameters: dict[str, list[_Place]]
    """Each one's parts, in order."""

    def by_file(self) -> dict[str, list[tuple[str, _Place]]]:
        files: dict[str, list[tuple[str, _Place]]] = {}
        for name, places in self.parameters.items():
            for place in places:
                files.setdefault(place.file, []).append((name, place))
        return files


# Saving.


def save_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Write moments, master residuals and step counts to `<checkpoint>/lohan/`, streamed; where the file system can
    share blocks between files, records are cloned from the store. With several ranks all call this: each writes files
    with its part of the blocks, and rank 0 the index of them all.

    Raises `StorageError` if the disk is too full, mostly before anything is written.
    """
    folder, links = Path(checkpoint) / FOLDER_NAME, engine.links
    make_folders(folder)
    blocks = [block for block in engine.layout.blocks if block.trainable_slices]
    access = engine.parameters  # waits for updates that are still running, so before the extents are asked for
    _check_room(folder, blocks)
    parameters: dict[str, list[_Place]] = {}
    with closing(RecordCloner()) as cloner:
        for number, block in enumerate(blocks):
            first, last = _own_states(block, links.ranks)
            if first < last:
                file_name = f"optimizer-{number:05d}{links.ranks.file_suffix}.safetensors"
                _write_states(access, cloner, block, (first, last), folder / file_name)
                for name, place in _places(engine, block, (first, last), file_name):
                    parameters.setdefault(name, []).append(place)
            links.barrier(f"the states of {block.name} to be saved")  # no rank is silent for longer than that takes
    described = {name: [place.to_json() for place in places] for name, places in parameters.items()}
    joined: dict[str, list[dict[str, Any]]] = {}
    for packed in links.all_gather("where each rank has saved its states", json.dumps(described).encode()):
        for name, places in json.loads(packed).items():
            joined.setdefault(name, []).extend(places)
    if links.ranks.rank == 0:
        _write_index(engine, folder, joined)


def _own_states(block: Block, ranks: Ranks) -> tuple[int, int]:
    """Elements [first, last) of the block's records with states that this rank has."""
    first, last = block.rank_ranges[ranks.rank]
    return min(first, block.state_numel), min(last, block.state_numel)


def _write_states(
    access: ParameterAccess, cloner: RecordCloner, block: Block, own: tuple[int, int], file: Path
) -> None:
    with ExitStack() as held:
        specs = []
        for kind in block.master.state_kinds:
            begin, end = block.master.elements(kind, *own)
            pieces = _record_pieces(access, block, kind, own)
            held.callback(pieces.close)  # gives its buffers back, also if writing fails half-way
            sources = access.extents(block, kind)
            clone = None if sources is None else partial(cloner.clone, sources)
            specs.append(TensorSpec(kind, block.master.state_dtype(kind), end - begin, pieces, clone))
        write_safetensors(file, specs)


def _places(engine: OffloadEngine, block: Block, own: tuple[int, int], file_name: str) -> Iterator[tuple[str, _Place]]:
    """(name, where) for what of each parameter lies in a file with the elements of ``own``."""
    for part in block.trainable_slices:
        low, high = max(part.start, own[0]), min(part.stop, own[1])
        if low < high:
            place = _Place(file_name, low - own[0], tuple(part.shape), engine.step_counts[part])
            first = part.first + low - part.start
            if not part.is_whole or high - low < part.numel:
                place = replace(place, first=first, last=first + high - low)
            yield part.name, place


def _write_index(engine: OffloadEngine, folder: Path, parameters: Mapping[str, list[dict[str, Any]]]) -> None:
    """`parameters`: the places of each one's parts, in any order."""
    for places in parameters.values():
        places.sort(key=lambda place: place.get("first", 0))
    index: dict[str, Any] = {
        "format_version": _FORMAT_VERSION,
        "working_dtype": dtype_name(engine.layout.master.working_dtype),
        "optimizer_state_dtype": engine.layout.master.moment_dtype,
        "parameters": {name: places if len(places) > 1 else places[0] for name, places in parameters.items()},
    }
    if others := engine.layout.other_dtypes:
        index["other_dtypes"] = {name: dtype for name, dtype in others.items() if name in parameters}
    if rules := engine.layout.other_rules:
        index["optimizers"] = rules
    (folder / INDEX_NAME).write_text(json.dumps(index, indent=1))


def _check_room(folder: Path, blocks: list[Block]) -> None:
    """Clones take no room now, but the store does when it writes its next version: it must not find the disk full."""
    needed_bytes = int(sum(block.state_numel * block.master.state_bytes_per_param for block in blocks))
    disk = shutil.disk_usage(folder)
    if disk.total and disk.free < needed_bytes:  # some network file systems tell no sizes
        raise StorageError(
            "cannot save the optimizer states to",
            path=str(folder),
            errno=errno.ENOSPC,
            advice=f"they need {needed_bytes:,} bytes and {disk.free:,} are free; free space, or keep fewer "
            "checkpoints with save_total_limit",
        )


def _record_pieces(
    access: ParameterAccess, block: Block, kind: str, own: tuple[int, int]
) -> Generator[Tensor, None, None]:
    """What of a record belongs to the block's elements [first, last), in order, in pieces that are valid until the
    next; zeros where it only pads."""
    dtype = block.master.state_dtype(kind)
    end, last = block.master.elements(kind, *own)
    for part in sorted(block.trainable_slices, key=lambda part: part.start):
        low, high = max(part.start, own[0]), min(part.stop, own[1])
        if low < high:
            start, stop = block.master.elements(kind, low, high)
            yield torch.zeros(start - end, dtype=dtype)
            yield from (piece for _, piece in access.read_own(block, kind, start, stop))
            end = stop
    yield torch.zeros(last - end, dtype=dtype)


# Loading.


def load_optimizer_states(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read back what `save_optimizer_states` wrote, after the weights. Raises ValueError, before anything is
    overwritten, if it is not there, is damaged or of another model, or has other dtypes."""
    index = _read_index(checkpoint)
    trainable = _check_fits(engine, index)
    _load_kinds(engine, index)
    for name, places in index.parameters.items():
        for part in trainable[name]:
            engine.step_counts[part] = places[0].num_updates
    engine.forget_weights()


def load_master_residuals(engine: OffloadEngine, checkpoint: str | Path) -> None:
    """Read back the exact masters behind bfloat16 weights, and nothing else. float32 weights need nothing."""
    if any(block.master.has_residual for block in engine.layout.blocks) and has_optimizer_states(checkpoint):
        index = _read_index(checkpoint)
        _check_fits(engine, index)
        _load_kinds(engine, index, ("master_residual",))


def has_optimizer_states(checkpoint: str | Path) -> bool:
    """Whether a checkpoint was written under offload, with optimizer states."""
    return (Path(checkpoint) / FOLDER_NAME / INDEX_NAME).is_file()


def _read_index(checkpoint: str | Path) -> _Index:
    folder = Path(checkpoint) / FOLDER_NAME
    path = folder / INDEX_NAME
    if not path.is_file():
        raise ValueError(
            f"{str(checkpoint)!r} has no optimizer states of an offloaded run ({path.name} is missing in it); "
            "resume from a checkpoint saved under offload, or start anew from its weights"
        )
    try:
        fields = json.loads(path.read_text())
        version = int(fields["format_version"])
        if version == _FORMAT_VERSION:
            places = {
                name: [_place_from(place) for place in (found if isinstance(found, list) else [found])]
                for name, found in fields["parameters"].items()
            }
            state_dtype = str(fields.get("optimizer_state_dtype", "float32"))  # there was nothing else to say
            other_dtypes = {str(name): str(dtype) for name, dtype in fields.get("other_dtypes", {}).items()}
            optimizers = {name: rule for rule, names in fields.get("optimizers", {}).items() for name in names}
            return _Index(folder, str(fields["working_dtype"]), other_dtypes, state_dtype, optimizers, places)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{str(path)!r} is damaged ({error!r}); resume from another checkpoint") from error
    advice = "update hf_lohan" if version > _FORMAT_VERSION else "start anew from the checkpoint's weights"
    raise ValueError(f"{str(path)!r} has format {version}, this version reads {_FORMAT_VERSION}; {advice}")


def _place_from(fields: dict[str, Any]) -> _Place:
    file, start, shape, num_updates = (fields[name] for name in ("file", "start", "shape", "num_updates"))
    if Path(file).name != file:
        raise ValueError(f"names a file outside its folder: {file!r}")
    first, last = fields.get("first", 0), fields.get("last")
    numbers = (start, num_updates, first, 0 if last is None else last, *shape)
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"start, num_updates and shape must be whole numbers, not {numbers}")
    return _Place(file, start, tuple(shape), num_updates, first, last)


def _check_fits(engine: OffloadEngine, index: _Index) -> dict[str, list[ParamSlice]]:
    """The trainable parameters by name, once it is certain that every state of theirs is there and fits."""
    trainable: dict[str, list[ParamSlice]] = {}
    for part in engine.parameter_slices:
        if part.trainable:
            trainable.setdefault(part.name, []).append(part)
    if trainable.keys() != index.parameters.keys():
        difference = sorted(trainable.keys() ^ index.parameters.keys())
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} are for other trainable parameters ({len(difference)} "
            f"differ, such as {difference[0]}); resume with the same model and the same frozen weights"
        )
    for name, places in index.parameters.items():
        place, shape = places[0], trainable[name][0].shape
        ends = [0, *(end for each in places for end in (each.first, each.first + each.numel)), shape.numel()]
        if {each.shape for each in places} == {tuple(shape)} and ends[::2] != ends[1::2]:
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} are not for all of {name}; resume from another "
                "checkpoint"
            )
        if any(each.shape != tuple(shape) for each in places):
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} are for {name} of shape {list(place.shape)}, this "
                f"model's has {list(shape)}; resume with the same model"
            )
    for name in trainable:
        saved = index.other_dtypes.get(name, index.working_dtype)
        found = dtype_name(_master_of(engine, name).working_dtype)
        if saved != found:
            raise ValueError(
                f"the checkpoint was trained with {saved} working weights, this run uses {found} (for {name}); set "
                "bf16 as it was"
            )
        theirs, ours = index.optimizers.get(name, str(ADAMW)), str(_master_of(engine, name).rule)
        if theirs != ours:
            raise ValueError(
                f"the optimizer states in {str(index.folder)!r} are of {theirs}, this run has {ours} (for {name}); set "
                "that optimizer, or start anew from the checkpoint's weights"
            )
    moment_dtype = engine.layout.master.moment_dtype
    if index.optimizer_state_dtype != moment_dtype:
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} were saved with optimizer_state_dtype="
            f"{index.optimizer_state_dtype}, this run has {moment_dtype}; set it to {index.optimizer_state_dtype}, or "
            "start anew from the checkpoint's weights"
        )
    if moment_dtype != "float32" and any(
        place.start % SCALE_BLOCK_NUMEL or place.first % SCALE_BLOCK_NUMEL
        for places in index.parameters.values()
        for place in places
    ):
        raise ValueError(
            f"the optimizer states in {str(index.folder)!r} begin in the middle of a scale block, which none can; "
            "resume from another checkpoint"
        )
    _check_files(engine, index)
    return trainable


def _check_files(engine: OffloadEngine, index: _Index) -> None:
    for file_name, places in index.by_file().items():
        master = _master_of(engine, places[0][0])
        last = max(place.stop for _, place in places)
        with _open_states(index, file_name) as file:
            stored_kinds = set(file.keys())
            for kind in master.state_kinds:
                needed_numel = master.numel(kind, last)
                dtype = DTYPE_NAMES[master.state_dtype(kind)]
                record = file.get_slice(kind) if kind in stored_kinds else None
                shape = record.get_shape() if record is not None and record.get_dtype() == dtype else []
                if len(shape) != 1 or shape[0] < needed_numel:
                    raise ValueError(
                        f"{str(index.folder / file_name)!r} has no flat tensor {kind} of at least {needed_numel} "
                        f"{dtype}, which its index promises; resume from another checkpoint"
                    )


def _load_kinds(engine: OffloadEngine, index: _Index, only: tuple[str, ...] | None = None) -> None:
    access = engine.parameters
    for file_name, places in index.by_file().items():
        master = _master_of(engine, places[0][0])  # a file is of one block, and that of one dtype
        with _open_states(index, file_name) as file:
            for kind in [kind for kind in master.state_kinds if only is None or kind in only]:
                record = file.get_slice(kind)
                for name, place in places:
                    start, _ = master.elements(kind, place.start, place.stop)
                    source, last = _From(record, start), place.first + place.numel
                    access.write_state(name, kind, source, first=place.first, last=last)


class _From:
    """What lies behind element `start` of a file's tensor."""

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

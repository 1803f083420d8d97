"""Write a safetensors file piece by piece; the library's own writer wants every tensor in RAM at once."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor

from hf_lohan.files import StorageError
from hf_lohan.files.errors import NO_ROOM

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What safetensors calls them."""
DATA_ALIGN_BYTES = 4096
"""The data begin at a multiple of this in the file, so that whole blocks of a file system can be cloned into it."""

Clone = Callable[[int, int], bool]
"""Given the file's descriptor and an offset: puts a tensor's bytes there without moving them; False if it cannot."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to be written, flat [numel] or of the given shape. `pieces` are its parts in order, each read only when
    its turn comes, and none of them if `clone` could put the data in place."""

    name: str
    dtype: torch.dtype
    numel: int
    pieces: Iterable[Tensor]
    clone: Clone | None = None
    shape: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def write_safetensors(path: Path, tensors: Iterable[TensorSpec], metadata: Mapping[str, str] | None = None) -> None:
    """Write `tensors` to `path`: header length, JSON header, then the data from a multiple of `DATA_ALIGN_BYTES` on.
    ``metadata`` are the header's beside the format.

    The file is whole and on the medium when this returns. Raises `StorageError` with the bytes needed and free if the
    disk is full, ValueError if pieces do not add up to their tensor, or for a dtype that such files do not have here.
    """
    specs = list(tensors)
    header = _header_of(specs, metadata or {})
    try:
        with open(path, "wb") as file:
            file.write(header)
            offset = len(header)
            for spec in specs:
                _write_tensor(file, spec, offset)
                offset += spec.num_bytes
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        needed_bytes = len(header) + sum(spec.num_bytes for spec in specs)
        raise StorageError(
            "cannot write",
            path=str(path),
            errno=error.errno,
            advice=f"the file needs {needed_bytes:,} bytes and {shutil.disk_usage(path.parent).free:,} are left; free "
            "space on that disk or write to another",
        ) from error


def _header_of(specs: list[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt", **metadata}}
    offset = 0
    for spec in specs:
        end = offset + spec.num_bytes
        if spec.dtype not in DTYPE_NAMES:
            raise ValueError(f"{spec.name} is of {spec.dtype}, which cannot be written; convert it to another dtype")
        shape = [spec.numel] if spec.shape is None else list(spec.shape)
        entries[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, spec: TensorSpec, offset: int) -> None:
    if spec.clone is not None:
        file.flush()  # what Python still holds back must not land on top of the cloned blocks
        if spec.clone(file.fileno(), offset):
            file.seek(offset + spec.num_bytes)
            return
        file.seek(offset)
    for piece in spec.pieces:
        file.write(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    if file.tell() != offset + spec.num_bytes:
        raise ValueError(
            f"the pieces of {spec.name} have {file.tell() - offset} bytes, its header says {spec.num_bytes}; "
            "give pieces of numel elements in all"
        )

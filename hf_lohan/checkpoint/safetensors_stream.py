"""Writes a safetensors file one piece at a time, because the `safetensors` library needs all tensors in RAM."""

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
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Name of each dtype in a safetensors header."""
DATA_ALIGN_BYTES = 4096
"""The data begin at a multiple of this size, so that the file can share blocks with another file."""

Clone = Callable[[int, int], bool]
"""Clones a tensor's bytes to a file descriptor at an offset, or returns False if it cannot."""


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor to write. Its shape is [numel] unless `shape` is set. `pieces` yields its parts in order, one at a time.
    They are not read if `clone` succeeds."""

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
    """Write `tensors` and ``metadata`` to `path`. The data begin at a multiple of `DATA_ALIGN_BYTES`.

    The file is complete and durable when this returns. Raises `StorageError` if the disk is full, and ValueError if
    pieces have fewer or more bytes than their tensor, or for a dtype that is not in `DTYPE_NAMES`.
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
            raise ValueError(f"{spec.name} has dtype {spec.dtype}, which cannot be saved; convert it to another dtype")
        shape = [spec.numel] if spec.shape is None else list(spec.shape)
        entries[spec.name] = {"dtype": DTYPE_NAMES[spec.dtype], "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(entries).encode()
    text += b" " * (-(8 + len(text)) % DATA_ALIGN_BYTES)
    return len(text).to_bytes(8, "little") + text


def _write_tensor(file: BinaryIO, spec: TensorSpec, offset: int) -> None:
    if spec.clone is not None:
        file.flush()  # buffered bytes must not overwrite the cloned blocks
        if spec.clone(file.fileno(), offset):
            file.seek(offset + spec.num_bytes)
            return
        file.seek(offset)
    for piece in spec.pieces:
        file.write(piece.cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    if file.tell() != offset + spec.num_bytes:
        raise ValueError(
            f"the pieces of {spec.name} have {file.tell() - offset} bytes, and its header gives {spec.num_bytes}; give "
            "pieces with numel elements in total"
        )

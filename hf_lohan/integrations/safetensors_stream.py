"""Write a safetensors file piece by piece; the library's own writer wants every tensor in RAM at once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_DTYPE_NAMES = {
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
}
_HEADER_ALIGN_BYTES = 8


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A flat tensor [numel] to be written. `pieces` are its parts in order, each read only when its turn comes."""

    name: str
    dtype: torch.dtype
    numel: int
    pieces: Iterable[Tensor]


def write_safetensors(path: Path, tensors: Iterable[TensorSpec]) -> None:
    """Write `tensors` to `path`: header length, JSON header, then the data. The file is whole when this returns."""
    specs = list(tensors)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for spec in specs:
        end = offset + spec.numel * spec.dtype.itemsize
        header[spec.name] = {"dtype": _DTYPE_NAMES[spec.dtype], "shape": [spec.numel], "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % _HEADER_ALIGN_BYTES)
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for spec in specs:
            for piece in spec.pieces:
                file.write(piece.contiguous().view(torch.uint8).numpy().data)
        file.flush()
        os.fsync(file.fileno())

"""The content of a store and of its folders."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from hf_lohan.device import mapped_empty
from hf_lohan.files import StorePath
from hf_lohan.store import RecordSpec, Store

Values = Callable[[RecordSpec, int], torch.Tensor]
Records = tuple[RecordSpec, ...]
Paths = list[StorePath]
SCRATCH = (RecordSpec("layers.0", "gradient", "float32", 8192),)


def data_file_bytes(paths: Paths) -> int:
    return sum(os.stat(file).st_size for path in paths for file in Path(path.path).glob("*.bin"))


def names(path: StorePath) -> set[str]:
    return {entry.name for entry in Path(path.path).iterdir()}


def read_all(store: Store) -> torch.Tensor:
    """Every byte of every record."""
    parts = []
    for record in store.records:
        out = mapped_empty(record.num_bytes)
        store.read(record.block, record.kind, 0, out.view(getattr(torch, record.dtype))).wait()
        parts.append(out)
    return torch.cat(parts)

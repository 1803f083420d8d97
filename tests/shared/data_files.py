"""Data files, and transfers to and from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hf_lohan.files import DataFile, IoEngine, Transfer
from hf_lohan.files.data_file import sector_view

EngineFactory = Callable[..., IoEngine]


def new_file(engine: IoEngine, path: Path, num_bytes: int = 65536) -> DataFile:
    file = engine.open_file(str(path / "data.bin"), create=True)
    file.allocate(num_bytes)
    return file


def transfer(file: DataFile, offset: int, buffer: torch.Tensor) -> Transfer:
    return Transfer(file, offset, (sector_view(buffer),))

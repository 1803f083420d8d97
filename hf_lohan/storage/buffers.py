"""The only contract between host memory and O_DIRECT: whole sectors at sector-aligned addresses."""

from __future__ import annotations

import torch

SECTOR_BYTES = 4096
"""Alignment of every address, offset and length that meets a data file: no device in use asks for more."""


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor, whatever its dtype and shape, as uint8 ``[num_bytes]``."""
    assert tensor.device.type == "cpu" and tensor.is_contiguous(), "I/O needs contiguous CPU memory"
    return tensor.detach().reshape(-1).view(torch.uint8)


def sector_view(tensor: torch.Tensor) -> memoryview:
    """The memory of ``tensor`` as writable bytes, fit for O_DIRECT: aligned, and whole sectors of it."""
    flat = byte_tensor(tensor)
    assert flat.numel() % SECTOR_BYTES == 0, f"{flat.numel()} bytes are not whole {SECTOR_BYTES}-byte sectors"
    assert flat.data_ptr() % SECTOR_BYTES == 0 or not flat.numel(), (
        "the buffer's address is not sector-aligned"
    )
    return flat.numpy().data

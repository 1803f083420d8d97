"""The only contract between host memory and O_DIRECT: whole sectors at sector-aligned addresses."""

from __future__ import annotations

import torch

SECTOR_BYTES = 4096
"""Alignment of every address, offset and length that meets a data file: no device in use asks for more."""


def byte_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous CPU tensor, whatever its dtype and shape, as uint8 ``[num_bytes]``."""
    assert tensor.is_cpu and tensor.is_contiguous(), "I/O needs contiguous CPU memory"
    # Each call lets other threads have the interpreter, so none is made that is not needed.
    flat = tensor.detach() if tensor.requires_grad else tensor
    flat = flat if flat.dim() == 1 else flat.reshape(-1)
    return flat if flat.dtype is torch.uint8 else flat.view(torch.uint8)


def sector_view(tensor: torch.Tensor) -> memoryview:
    """The memory of ``tensor`` as writable bytes, fit for O_DIRECT: aligned, and whole sectors of it."""
    flat = byte_tensor(tensor)
    assert flat.numel() % SECTOR_BYTES == 0, f"{flat.numel()} bytes are not whole {SECTOR_BYTES}-byte sectors"
    assert flat.data_ptr() % SECTOR_BYTES == 0 or not flat.numel(), (
        "the buffer's address is not sector-aligned"
    )
    return flat.numpy().data

"""Compare tensors by name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, in which 0.0 differs from -0.0."""
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def assert_same_tensors(ours: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Check that names are equal, and tensors bit for bit."""
    assert ours.keys() == expected.keys()
    assert [name for name, tensor in expected.items() if not torch.equal(ours[name], tensor)] == []


def tensors_in(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of all safetensors files in a folder. No two files have the same."""
    found: dict[str, Tensor] = {}
    for path in folder.glob("*.safetensors"):
        part = load_file(path)
        assert not found.keys() & part.keys()
        found.update(part)
    return found

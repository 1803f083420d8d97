"""Keep autograd from keeping weights: a saved view of a slot becomes a handle, and a view again when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_lohan.runtime.block import Block
from hf_lohan.runtime.slot_ring import Slot, SlotRing


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Where a saved view lies within its block, independent of the slot that the block will be in."""

    block: Block
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


def saved_weight_hooks(ring: SlotRing, fetch: Callable[[Block], Slot]) -> saved_tensors_hooks:
    """A context for the forward. `fetch` must bring a block to the device, during backward.

    `.data` swapping alone would leak every weight: autograd saves views of them, and a view keeps no handle.
    """

    def pack(tensor: Tensor) -> Tensor | WeightHandle:
        slot = ring.slot_behind(tensor)
        if slot is None:
            return tensor
        assert slot.block is not None
        return WeightHandle(slot.block, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def unpack(saved: Tensor | WeightHandle) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        return torch.as_strided(fetch(saved.block).weights, saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)

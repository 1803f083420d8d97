"""Keep autograd from keeping weights: a saved view of a slot becomes a handle, and a view again when it is needed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_lohan.compat.torch_private import version_of, without_torch_function
from hf_lohan.model import Block
from hf_lohan.weights.absence import refusal
from hf_lohan.weights.absent_parameter import AbsentParameter, AbsentTensor
from hf_lohan.weights.slot_ring import Slot, SlotRing
from hf_lohan.weights.stand_ins import StandIn


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """Where a saved view lies within its block, independent of the slot that the block will be in."""

    block: Block
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ViewHandle:
    """A view of a weight that was saved while the weight was elsewhere."""

    stand_in: StandIn

    def of(self, weights: Tensor) -> Tensor:
        """The same view of a block's weights [numel]."""
        part = self.stand_in.part
        seen = weights[part.start : part.stop].view(part.shape)
        with torch.no_grad():
            for step in self.stand_in.steps:
                seen = step(seen)
        return seen


def _handle_of(stand_in: StandIn, tensor: Tensor) -> WeightHandle | ViewHandle:
    if not stand_in.is_copy:
        return ViewHandle(stand_in)
    start = stand_in.part.start + int(tensor.storage_offset())
    return WeightHandle(stand_in.block, tensor.size(), tensor.stride(), start)


@dataclass(frozen=True, slots=True)
class WatchedTensor:
    """A tensor that stays where it is, watched: autograd itself does not watch what goes through hooks.

    Without its graph: an operation's output that held the graph which saved it would never go, if there is no backward.
    """

    tensor: Tensor
    version: int

    @classmethod
    def of(cls, tensor: Tensor) -> WatchedTensor:
        return cls(tensor.detach(), version_of(tensor))

    def get(self) -> Tensor:
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "a tensor that backward needs was changed in place after the forward had used it: it is at version "
                f"{version_of(self.tensor)}, expected {self.version}; clone it before it is written to"
            )
        return self.tensor


class SavedActivations(Protocol):
    """Takes what is no weight: to keep it, or to swap it."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


def saved_weight_hooks(
    ring: SlotRing, fetch: Callable[[Block, int], Slot], activations: SavedActivations
) -> saved_tensors_hooks:
    """A context for the forward. `fetch` must bring a block to the device, during backward, for what begins at one of
    its elements.

    `.data` swapping alone would leak every weight: autograd saves views of them, and a view keeps no handle.
    """

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, AbsentTensor | AbsentParameter):
            with without_torch_function():
                stand_in = ring.stand_ins.behind(tensor)
            if stand_in is None:
                raise RuntimeError(refusal("an autograd function of another model's forward"))
            return ViewHandle(stand_in)
        slot = ring.slot_behind(tensor)
        if slot is not None:
            assert slot.block is not None
            return WeightHandle(slot.block, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        stand_in = ring.stand_ins.behind(tensor)
        if stand_in is not None:
            return _handle_of(stand_in, tensor)
        packed = activations.pack(tensor)
        return WatchedTensor.of(tensor) if packed is tensor else packed

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, WatchedTensor):
            return saved.get()
        if isinstance(saved, ViewHandle):
            return saved.of(fetch(saved.stand_in.block, saved.stand_in.part.start).weights)
        if not isinstance(saved, WeightHandle):
            return activations.unpack(saved)
        return torch.as_strided(fetch(saved.block, saved.offset).weights, saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)

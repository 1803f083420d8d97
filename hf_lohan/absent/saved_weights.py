"""Handles that autograd saves in place of weights. In the backward, a handle becomes a view of a slot again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hf_lohan.absent.absent_parameter import AbsentParameter, AbsentTensor
from hf_lohan.absent.stand_ins import StandIn, StandIns
from hf_lohan.absent.weight_provider import weight_refusal
from hf_lohan.compat.torch_private import version_of, without_torch_function
from hf_lohan.model import Block


@dataclass(frozen=True, slots=True)
class WeightHandle:
    """The offset, sizes and strides of a saved view within its block, which do not depend on the block's slot."""

    block: Block
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class ViewHandle:
    """A view of a weight that was saved while the weight was absent."""

    stand_in: StandIn

    def view_of(self, weights: Tensor) -> Tensor:
        """Return the same view of a block's ``weights`` [numel]."""
        part = self.stand_in.part
        view = weights[part.start : part.stop].view(part.shape)
        with torch.no_grad():
            for step in self.stand_in.steps:
                view = step(view)
        return view


def _handle_of(stand_in: StandIn, tensor: Tensor) -> WeightHandle | ViewHandle:
    if not stand_in.is_copy:
        return ViewHandle(stand_in)
    start = stand_in.part.start + int(tensor.storage_offset())
    return WeightHandle(stand_in.block, tensor.size(), tensor.stride(), start)


@dataclass(frozen=True, slots=True)
class WatchedTensor:
    """A tensor that stays on the device, and its version, because autograd does not check tensors that hooks return.

    The tensor is detached. Otherwise a graph that saves its own output would keep itself alive until a backward.
    """

    tensor: Tensor
    version: int

    @classmethod
    def watch(cls, tensor: Tensor) -> WatchedTensor:
        return cls(tensor.detach(), version_of(tensor))

    def unchanged(self) -> Tensor:
        """Return the tensor. Raises RuntimeError if it was changed in place."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "a tensor that backward needs was changed in place after the forward had used it: it is at version "
                f"{version_of(self.tensor)}, expected {self.version}; clone it before writing to it"
            )
        return self.tensor


class SavedActivations(Protocol):
    """Keeps or swaps saved tensors that are not weights."""

    def pack(self, tensor: Tensor) -> Any: ...

    def unpack(self, saved: Any) -> Tensor: ...


def saved_weight_hooks(
    stand_ins: StandIns,
    block_behind: Callable[[Tensor], Block | None],
    fetch_weights: Callable[[Block, int], Tensor],
    activations: SavedActivations,
) -> saved_tensors_hooks:
    """Return a context for the forward. ``block_behind`` returns the block that a view of a slot belongs to. In the
    backward, ``fetch_weights(block, element)`` loads the block for the view that begins at ``element``, and returns its
    weights [numel].

    Without handles a slot could not be reused, because autograd would save views of the slot.
    """

    def pack(tensor: Tensor) -> Any:
        if isinstance(tensor, AbsentTensor | AbsentParameter):
            with without_torch_function():
                stand_in = stand_ins.find_stand_in(tensor)
            if stand_in is None:
                raise RuntimeError(weight_refusal("an autograd function of another model's forward"))
            return ViewHandle(stand_in)
        block = block_behind(tensor)
        if block is not None:
            return WeightHandle(block, tensor.size(), tensor.stride(), int(tensor.storage_offset()))
        stand_in = stand_ins.find_stand_in(tensor)
        if stand_in is not None:
            return _handle_of(stand_in, tensor)
        packed = activations.pack(tensor)
        return WatchedTensor.watch(tensor) if packed is tensor else packed

    def unpack(saved: Any) -> Tensor:
        if isinstance(saved, WatchedTensor):
            return saved.unchanged()
        if isinstance(saved, ViewHandle):
            return saved.view_of(fetch_weights(saved.stand_in.block, saved.stand_in.part.start))
        if not isinstance(saved, WeightHandle):
            return activations.unpack(saved)
        return torch.as_strided(fetch_weights(saved.block, saved.offset), saved.size, saved.stride, saved.offset)

    return saved_tensors_hooks(pack, unpack)

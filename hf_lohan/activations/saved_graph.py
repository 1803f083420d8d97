"""The tensors that the graph of a compiled layer saves for its backward, except weights."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from hf_lohan.activations.layer_frame import LayerFrame, StoredTensor
from hf_lohan.activations.swapped_tensor import alias_of, is_swappable, storage_of
from hf_lohan.compat.torch_private import StorageWeakRef
from hf_lohan.costs import GRAPH, INPUT

_SMALL = 256
"""Tensors of less than 1 / `_SMALL` of the layer's input stay on the device, because each copy has a fixed cost."""


@dataclass(eq=False)
class _Memory:
    """Memory that was swapped out, and the saved tensors that are views of it."""

    frame: LayerFrame
    stored: StoredTensor
    num_views: int = 0
    num_loaded: int = 0
    landed: Tensor | None = None
    """The memory on the device, from the first loaded view to the last."""


@dataclass(frozen=True, slots=True)
class SavedView:
    """The object that autograd saves instead of a tensor."""

    memory: _Memory
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    def load(self) -> Tensor:
        """Return an equal tensor."""
        memory = self.memory
        landed = memory.frame.load_saved(memory.stored) if memory.landed is None else memory.landed
        memory.num_loaded = (memory.num_loaded + 1) % memory.num_views
        memory.landed = landed if memory.num_loaded else None
        return landed.as_strided(self.size, self.stride, self.offset)


class SavedGraph:
    """Swaps or keeps what one call of a compiled layer saves. Tensors that share memory are swapped once."""

    def __init__(self, frame: LayerFrame, hidden: Tensor | None, others: Iterable[Tensor]) -> None:
        """``hidden``: the layer's input. ``others``: masks, positions and buffers, which stay, because they exist for
        all layers."""
        self._frame = frame
        self._input = None if hidden is None else storage_of(hidden)
        self._least_bytes = 0 if hidden is None else hidden.nbytes // _SMALL
        self._others = {storage_of(tensor) for tensor in others}
        self._memories: dict[tuple[StorageWeakRef, torch.dtype], _Memory | None] = {}
        self.num_bytes = 0
        """Bytes of the saved tensors without the input."""

    def pack(self, tensor: Tensor) -> Tensor | SavedView:
        """Return the object to save instead of a tensor, or the tensor if it stays on the device."""
        whole = _whole_memory(tensor)
        if whole is None or (storage := storage_of(tensor)) in self._others or whole.nbytes < self._least_bytes:
            return tensor
        key = storage, tensor.dtype
        if key not in self._memories:
            is_input = storage == self._input
            self.num_bytes += 0 if is_input else whole.nbytes
            stored = self._frame.store_saved(whole, INPUT if is_input else GRAPH)
            self._memories[key] = None if isinstance(stored, Tensor) else _Memory(self._frame, stored)
        memory = self._memories[key]
        if memory is None:
            return tensor
        memory.num_views += 1
        return SavedView(memory, tensor.size(), tensor.stride(), int(tensor.storage_offset()))


def _whole_memory(tensor: Tensor) -> Tensor | None:
    """Return all elements of the tensor's memory. None for a tensor that is not plain memory."""
    if tensor.layout is not torch.strided or type(tensor) is not Tensor:
        return None
    numel, rest = divmod(tensor.untyped_storage().nbytes(), tensor.element_size())
    whole = alias_of(tensor).as_strided((numel,), (1,), 0)
    return whole if is_swappable(whole) and not rest else None

"""Finds the weight that a tensor stands for. The tensor is a placeholder, a view of a placeholder, or a copy."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef, storage_id
from hf_lohan.device import Device
from hf_lohan.model import Block, ParamSlice

_MIN_STORAGES = 4096
"""Number of storages to remember before freed storages are removed."""


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """A tensor that stands for a parameter, or for a view of a parameter. The parameter is in one block."""

    block: Block
    part: ParamSlice
    steps: tuple[Callable[[Any], Any], ...] = ()
    """Operations that make the view from the parameter."""
    is_copy: bool = False
    """Whether the tensor has the parameter's values, so that views of it have real sizes and strides."""


class StandIns:
    """The stand-ins of one model. Each has its own storage, by which its views are recognized."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placeholders: dict[int, Tensor] = {}
        self._known: dict[int, tuple[StorageWeakRef, StandIn]] = {}
        self._max_storages = _MIN_STORAGES

    def placeholder(self, block: Block, part: ParamSlice) -> Tensor:
        """Return one NaN, or one integer, expanded to the parameter's shape. No operation computes with it."""
        placeholder = self._placeholders.get(id(part))
        if placeholder is None:
            placeholder = self._one_nan(block.master.working_dtype).expand(part.shape)
            self._placeholders[id(part)] = placeholder
            if part.is_whole:  # a parameter in several blocks has no block with all weights that autograd needs
                self._add(placeholder, StandIn(block, part))
        return placeholder

    def _one_nan(self, dtype: torch.dtype) -> Tensor:
        return torch.full((), float("nan")).to(self._device.torch_device, dtype)

    def add_view(self, view: Tensor, block: Block, part: ParamSlice, steps: tuple[Callable[[Any], Any], ...]) -> None:
        """Give a view of a placeholder its own storage, and remember the parameter and ``steps``."""
        view.data = self._one_nan(view.dtype).expand(view.shape)
        self._add(view, StandIn(block, part, steps))

    def add_copy(self, copy: Tensor, block: Block, part: ParamSlice) -> None:
        """Remember ``copy``, which has the parameter's values and shape."""
        self._add(copy, StandIn(block, part, is_copy=True))

    def _add(self, tensor: Tensor, stand_in: StandIn) -> None:
        if len(self._known) > self._max_storages:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._max_storages = max(_MIN_STORAGES, 2 * len(self._known))
        self._known[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage()), stand_in

    def find_stand_in(self, tensor: Tensor) -> StandIn | None:
        """Return the stand-in that shares the tensor's storage, or None."""
        known = self._known.get(storage_id(tensor))
        return known[1] if known is not None and not known[0].expired() else None

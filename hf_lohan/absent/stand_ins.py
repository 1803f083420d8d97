"""Which weight a placeholder, a view of one, or a copy belongs to: autograd saves a handle in place of each."""

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
"""Storages to remember before freed ones are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """Stands for a parameter that lies whole in one block, or for a view of it."""

    block: Block
    part: ParamSlice
    steps: tuple[Callable[[Any], Any], ...] = ()
    """Operations from the parameter to the view."""
    is_copy: bool = False
    """Whether the tensor has the parameter's values. Views of it then have their own sizes and strides."""


class StandIns:
    """The stand-ins of one model. Each has a storage of its own, by which any view of it is recognized."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placeholders: dict[int, Tensor] = {}
        self._known: dict[int, tuple[StorageWeakRef, StandIn]] = {}
        self._max_storages = _MIN_STORAGES

    def placeholder(self, block: Block, part: ParamSlice) -> Tensor:
        """One NaN, expanded to the parameter's shape. No operation computes with it."""
        placeholder = self._placeholders.get(id(part))
        if placeholder is None:
            placeholder = self._one_nan(block.master.working_dtype).expand(part.shape)
            self._placeholders[id(part)] = placeholder
            if part.is_whole:  # else no single block has the weights that autograd would need
                self._add(placeholder, StandIn(block, part))
        return placeholder

    def _one_nan(self, dtype: torch.dtype) -> Tensor:
        return torch.full((), float("nan"), dtype=dtype, device=self._device.torch_device)

    def add_view(self, view: Tensor, block: Block, part: ParamSlice, steps: tuple[Callable[[Any], Any], ...]) -> None:
        """Give a view of a placeholder a storage of its own, and remember what it is a view of."""
        view.data = self._one_nan(view.dtype).expand(view.shape)
        self._add(view, StandIn(block, part, steps))

    def add_copy(self, copy: Tensor, block: Block, part: ParamSlice) -> None:
        """Remember ``copy`` [shape of the parameter], which has the parameter's values."""
        self._add(copy, StandIn(block, part, is_copy=True))

    def _add(self, tensor: Tensor, stand_in: StandIn) -> None:
        if len(self._known) > self._max_storages:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._max_storages = max(_MIN_STORAGES, 2 * len(self._known))
        self._known[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage()), stand_in

    def find_stand_in(self, tensor: Tensor) -> StandIn | None:
        """The stand-in that shares the tensor's storage, if there is one."""
        known = self._known.get(storage_id(tensor))
        return known[1] if known is not None and not known[0].expired() else None

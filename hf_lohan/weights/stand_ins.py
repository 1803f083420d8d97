"""What stands for weights that are elsewhere, or holds a copy of them: autograd saves a handle in place of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef, storage_id
from hf_lohan.device import Device
from hf_lohan.model import Block, ParamSlice

_FEW = 4096
"""Storages to remember before those that are gone are looked for."""


@dataclass(frozen=True, slots=True, eq=False)
class StandIn:
    """Stands for a parameter, which is whole in a block; or for a view of it."""

    block: Block
    part: ParamSlice
    steps: tuple[Callable[[Any], Any], ...] = ()
    """From the parameter to the view."""
    is_copy: bool = False
    """Whether it has the values: what is seen of it has the form that it has."""


class StandIns:
    """Of one model. Each has a storage of its own, by which it is known again in whatever autograd makes of it."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._placeholders: dict[int, Tensor] = {}
        self._known: dict[int, tuple[StorageWeakRef, StandIn]] = {}
        self._too_many = _FEW

    def placeholder(self, block: Block, part: ParamSlice) -> Tensor:
        """One NaN, expanded to the form of a parameter. Nobody is to see it."""
        found = self._placeholders.get(id(part))
        if found is None:
            found = self._one_nan(block.master.working_dtype).expand(part.shape)
            self._placeholders[id(part)] = found
            if part.is_whole:  # else there is no block whose weights autograd could have in its place
                self._note(found, StandIn(block, part))
        return found

    def _one_nan(self, dtype: torch.dtype) -> Tensor:
        return torch.full((), float("nan"), dtype=dtype, device=self._device.torch_device)

    def note_view(self, view: Tensor, block: Block, part: ParamSlice, steps: tuple[Callable[[Any], Any], ...]) -> None:
        """``view`` is one of a placeholder; it gets a storage of its own."""
        view.data = self._one_nan(view.dtype).expand(view.shape)
        self._note(view, StandIn(block, part, steps))

    def note_copy(self, copy: Tensor, block: Block, part: ParamSlice) -> None:
        """``copy`` [shape of the parameter] has the values of the weights."""
        self._note(copy, StandIn(block, part, is_copy=True))

    def _note(self, tensor: Tensor, stand_in: StandIn) -> None:
        if len(self._known) > self._too_many:
            self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
            self._too_many = max(_FEW, 2 * len(self._known))
        self._known[storage_id(tensor)] = StorageWeakRef(tensor.untyped_storage()), stand_in

    def behind(self, tensor: Tensor) -> StandIn | None:
        """What a tensor stands for, or is a view of a copy of."""
        known = self._known.get(storage_id(tensor))
        return known[1] if known is not None and not known[0].expired() else None

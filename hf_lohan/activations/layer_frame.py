"""What one run of a layer's forward leaves for its backward, beyond its weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor

from hf_lohan.activations import anchor_name
from hf_lohan.activations.swapped_tensor import SwappedTensor, alias_of, is_swappable, storage_of
from hf_lohan.activations.swapper import ActivationSwapper
from hf_lohan.compat.torch_private import (
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    schema_of,
    tree_leaves,
    tree_map,
    version_of,
)
from hf_lohan.device import Device
from hf_lohan.planner import INPUT, LayerPlacements, Placement


class KeptTensor:
    """A tensor that stays on the device."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = alias_of(tensor)
        self._version = version_of(tensor)

    @property
    def storage(self) -> StorageWeakRef:
        """Names its memory."""
        return storage_of(self._tensor)

    def detach_from_writes(self) -> None:
        """Somebody is about to write to it: keep what it was."""
        self._tensor = self._tensor.clone()
        self._version = version_of(self._tensor)

    def get(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "the output of a matrix product or attention was changed in place outside its layer, so its "
                "layer's backward would be wrong; set activations: recompute"
            )
        return alias_of(self._tensor)  # autograd will hang its graph on what it gets


Waiting: TypeAlias = "KeptTensor | SwappedTensor"


class FrameObserver(Protocol):
    """Who knows the frames of all layers."""

    def forward_begins(self, frame: LayerFrame) -> None:
        """The layer's inputs are saved; what comes now is the layer itself."""

    def saw(self, frame: LayerFrame, name: str, output: Any) -> None:
        """An anchor operation of the layer's forward ran."""

    def saw_again(self, frame: LayerFrame, name: str) -> None:
        """An anchor operation is about to run again. The last ones of a layer do not, where nothing needs them."""

    def backward_begins(self, frame: LayerFrame) -> None:
        """The frame is needed now."""


class LayerFrame:
    """One run of one layer: its input and the outputs that are not made again. It lives as long as autograd's graph."""

    def __init__(
        self,
        block_name: str,
        placements: LayerPlacements,
        swapper: ActivationSwapper,
        device: Device,
        *,
        observer: FrameObserver,
        forward_number: int = 0,
    ) -> None:
        """``forward_number``: which of the model's forwards it belongs to."""
        self.block_name = block_name
        self.forward_number = forward_number
        self._placements = placements
        self._swapper = swapper
        self._device = device
        self._observer = observer
        self.waiting: list[Waiting] = []
        """All that was put away, in the forward's order."""
        self._outputs: dict[str, Any] = {}
        self._rng_after: dict[str, Tensor] = {}
        self.is_expected_back = False
        """Whether what it put away is on its way back."""
        self.is_in_backward = False

    @property
    def swapped(self) -> list[SwappedTensor]:
        return [one for one in self.waiting if isinstance(one, SwappedTensor)]

    def contexts(self) -> tuple[TorchDispatchMode, TorchDispatchMode]:
        """Under which the layer's forward and its recomputation run, for torch's `checkpoint`."""
        return _Putting(self), _Getting(self)

    # Inputs, as autograd saves and restores them.

    def put_input(self, tensor: Tensor) -> Tensor | Waiting:
        """What to save instead of an input of the layer."""
        placement = self._placements.get(INPUT, Placement.GPU)
        if placement not in (Placement.CPU, Placement.SSD) or not is_swappable(tensor):
            return tensor
        swapped = self._swapper.swap_out(tensor, placement)
        if swapped is None:
            return tensor
        self.waiting.append(swapped)
        return swapped

    def get_input(self, saved: Tensor | Waiting) -> Tensor:
        self._observer.backward_begins(self)
        tensor: Tensor = self._get(saved)
        return tensor

    # Outputs of anchor operations.

    def put_output(self, name: str, operation: Any, output: Any) -> None:
        """The operation ran; put its output away if that is its placement."""
        self._observer.saw(self, name, output)
        placement = self._placements.get(name, Placement.RECOMPUTE)
        if placement is Placement.RECOMPUTE:
            return
        places: list[Waiting] = []

        def put(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            place = self._put(leaf, placement)
            if place is not None:
                places.append(place)
            return place

        stored = tree_map(put, output)
        if any(leaf is None and isinstance(value, Tensor) for leaf, value in _leaves(stored, output)):
            return  # no room for all of it: it is made again
        self.waiting += places
        self._outputs[name] = stored
        if _is_random(operation):
            self._rng_after[name] = self._device.rng_state()

    def _put(self, tensor: Tensor, placement: Placement) -> Waiting | None:
        # A generator's seed, as attention returns it, may be on the host already.
        if placement is Placement.GPU or not is_swappable(tensor) or tensor.device != self._device.torch_device:
            return KeptTensor(tensor)
        return self._swapper.swap_out(tensor, placement)

    def protect(self, tensors: Iterable[Tensor]) -> None:
        """Somebody is about to write to them: what was put away must stay what it was."""
        for tensor in tensors:
            storage = storage_of(tensor)
            for one in self.waiting:
                if one.storage != storage:
                    continue
                if isinstance(one, KeptTensor):
                    one.detach_from_writes()
                else:
                    self._swapper.wait_until_stored(one)

    def finish_storing(self, tensors: Iterable[Tensor]) -> None:
        """They leave the layer: what of their memory is on its way out must be stored before anybody writes to it."""
        storages = {storage_of(tensor) for tensor in tensors}
        for one in self.swapped:
            if one.storage in storages:
                self._swapper.wait_until_stored(one)

    def has(self, name: str) -> bool:
        """Whether an operation's output was put away. If not, it is about to be made again."""
        if name in self._outputs:
            return True
        self._observer.saw_again(self, name)
        return False

    def get_output(self, name: str) -> Any:
        """The output as it was; the generator stands where it stood behind the operation."""
        if name in self._rng_after:
            self._device.set_rng_state(self._rng_after[name])
        return tree_map(self._get, self._outputs[name])

    def _get(self, place: Any) -> Any:
        if isinstance(place, KeptTensor):
            return place.get()
        if isinstance(place, SwappedTensor):
            return self._swapper.bring_back(place)
        return place

    def begin_forward(self) -> None:
        """The inputs are saved; what comes now is the layer itself."""
        self._observer.forward_begins(self)

    def begin_backward(self) -> None:
        """The recomputation begins."""
        self._observer.backward_begins(self)


class _Putting(TorchDispatchMode):
    """Sees each operation of the forward."""

    supports_higher_order_operators = True

    def __init__(self, frame: LayerFrame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frame = frame
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> _Putting:
        self._frame.begin_forward()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._frame.waiting and _is_mutable(func):
            self._frame.protect(_written_tensors(func, args, kwargs))
        output = func(*args, **kwargs)
        kind = anchor_name(func)
        if kind is not None:
            self._frame.put_output(f"{kind}#{self._counts[kind]}", func, output)
            self._counts[kind] += 1
        return output


class _Getting(TorchDispatchMode):
    """Runs the forward again, but for what was put away."""

    supports_higher_order_operators = True

    def __init__(self, frame: LayerFrame) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frame = frame
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> _Getting:
        self._counts.clear()  # a graph that is kept may be walked twice
        self._frame.begin_backward()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._frame.waiting and _is_mutable(func):  # for a second backward over the same graph
            self._frame.protect(_written_tensors(func, args, kwargs))
        kind = anchor_name(func)
        if kind is not None:
            name = f"{kind}#{self._counts[kind]}"
            self._counts[kind] += 1
            if self._frame.has(name):
                return self._frame.get_output(name)
        return func(*args, **kwargs)


def _leaves(stored: Any, output: Any) -> list[tuple[Any, Any]]:
    """Pairs of what was stored and what it stands for."""
    if isinstance(output, tuple | list):
        return [pair for a, b in zip(stored, output, strict=True) for pair in _leaves(a, b)]
    return [(stored, output)]


@cache
def _is_mutable(operation: Any) -> bool:
    """Whether it writes to some of its arguments."""
    return isinstance(operation, OpOverload) and bool(schema_of(operation).is_mutable)


@cache
def _is_random(operation: Any) -> bool:
    """Whether it may draw from the generator."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """The arguments that a mutable operation writes to."""
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

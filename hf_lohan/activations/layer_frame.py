"""One forward of a layer, and the tensors that it stores for its backward."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hf_lohan.activations.kernel_names import anchor_name
from hf_lohan.activations.swapped_tensor import SwappedTensor, alias_of, is_swappable, storage_of
from hf_lohan.activations.swapper import ActivationSwapper
from hf_lohan.activations.trace import LayerTrace
from hf_lohan.compat.torch_private import (
    OpOverload,
    StorageWeakRef,
    TorchDispatchMode,
    schema_of,
    tree_leaves,
    tree_map,
    version_of,
    with_sums,
)
from hf_lohan.costs import INPUT, LayerPlacements, Placement
from hf_lohan.device import Device


class KeptTensor:
    """A tensor that stays on the device. Writes to it are detected."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = alias_of(tensor)
        self._version = version_of(tensor)

    @property
    def storage(self) -> StorageWeakRef:
        """Identity of the tensor's memory."""
        return storage_of(self._tensor)

    def detach_from_writes(self) -> None:
        """Copy the tensor before an operation overwrites its memory."""
        self._tensor = self._tensor.clone()
        self._version = version_of(self._tensor)

    def tensor(self) -> Tensor:
        if version_of(self._tensor) != self._version:
            raise RuntimeError(
                "the output of a matrix product or attention was changed in place outside its layer, so its "
                "layer's backward would be wrong; set activations: recompute"
            )
        return alias_of(self._tensor)  # autograd attaches its graph to this object


StoredTensor: TypeAlias = "KeptTensor | SwappedTensor"


class LayerFrame:
    """One forward of a layer, its input and the outputs that are not recomputed. Lives as long as autograd's graph."""

    def __init__(
        self,
        block_name: str,
        placements: LayerPlacements,
        swapper: ActivationSwapper,
        device: Device,
        *,
        on_forward: Callable[[], None],
        on_backward: Callable[[LayerFrame], None],
        trace: LayerTrace | None = None,
        forward_number: int = 0,
    ) -> None:
        """``on_forward`` is called when the layer's inputs are saved and its operations begin, and ``on_backward`` when
        its backward begins. ``trace`` records the anchor operations. ``forward_number``: the forward's number."""
        self.block_name = block_name
        self.forward_number = forward_number
        self._placements = placements
        self._swapper = swapper
        self._device = device
        self.begin_forward = on_forward
        self._on_backward = on_backward
        self._trace = trace
        self.stored: list[StoredTensor] = []
        """All stored tensors, in the forward's order."""
        self._outputs: dict[str, Any] = {}
        self._rng_after: dict[str, Tensor] = {}
        self.is_prefetched = False
        """Whether the frame's tensors are being swapped in."""
        self.is_in_backward = False

    @property
    def swapped(self) -> list[SwappedTensor]:
        return [stored for stored in self.stored if isinstance(stored, SwappedTensor)]

    def contexts(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return the contexts of the layer's forward and of its recomputation, for torch's `checkpoint`."""
        return _FrameMode(self, recomputes=False), _FrameMode(self, recomputes=True)

    def contexts_of_whole(self) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """Return contexts that see no operations. Only the layer's input is stored."""
        return _calling(self.begin_forward), _calling(self.begin_backward)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Run the forward again in this context, and leave the random generator as it was."""
        before = self._device.rng_state() if self._rng_after else None
        try:
            with _FrameMode(self, recomputes=True):
                yield
        finally:
            if before is not None:
                self._device.set_rng_state(before)

    # Inputs and tensors of a compiled layer, as autograd saves and restores them.

    def store_saved(self, tensor: Tensor, name: str = INPUT) -> Tensor | StoredTensor:
        """Return the object that autograd saves instead of a tensor with the placement of ``name``."""
        placement = self._placements.get(name, Placement.GPU)
        if placement not in (Placement.CPU, Placement.SSD) or not self._may_swap(tensor):
            return tensor
        swapped = self._swapper.swap_out(tensor, placement)
        if swapped is None:
            return tensor
        self.stored.append(swapped)
        return swapped

    def load_saved(self, saved: Tensor | StoredTensor) -> Tensor:
        self.begin_backward()
        tensor: Tensor = self._load(saved)
        return tensor

    # Outputs of anchor operations.

    def store_output(self, name: str, operation: Any, output: Any) -> None:
        """Store an operation's output, unless it will be recomputed."""
        if self._trace is not None:
            self._trace.add_operation(name, output)
        placement = self._placements.get(name, Placement.RECOMPUTE)
        if placement is Placement.RECOMPUTE:
            return
        tensors: list[StoredTensor] = []

        def store(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            stored = self._store(leaf, placement)
            if stored is not None:
                tensors.append(stored)
            return stored

        stored_output = tree_map(store, output)
        if any(leaf is None and isinstance(value, Tensor) for leaf, value in _leaves(stored_output, output)):
            return  # without room for the whole output, it is recomputed
        self.stored += tensors
        self._outputs[name] = stored_output
        if is_random(operation):
            self._rng_after[name] = self._device.rng_state()

    def _store(self, tensor: Tensor, placement: Placement) -> StoredTensor | None:
        if placement is Placement.GPU or not self._may_swap(tensor):
            return KeptTensor(tensor)
        return self._swapper.swap_out(tensor, placement)

    def _may_swap(self, tensor: Tensor) -> bool:
        # Attention returns a generator's seed, which may be on the host.
        return is_swappable(tensor) and tensor.device == self._device.torch_device

    def protect(self, tensors: Iterable[Tensor]) -> None:
        """Preserve the stored tensors among ``tensors`` before an operation overwrites them."""
        for tensor in tensors:
            storage = storage_of(tensor)
            for stored in self.stored:
                if stored.storage != storage:
                    continue
                if isinstance(stored, KeptTensor):
                    stored.detach_from_writes()
                else:
                    self._swapper.wait_until_stored(stored)

    def finish_storing(self, tensors: Iterable[Tensor]) -> None:
        """Wait until these outputs of the layer are stored, because the model may write to them."""
        storages = {storage_of(tensor) for tensor in tensors}
        for stored in self.swapped:
            if stored.storage in storages:
                self._swapper.wait_until_stored(stored)

    def has_output(self, name: str) -> bool:
        """Return whether an operation's output is stored. If not, the operation is about to run again. The last
        operations of a layer run again only if a backward needs their output."""
        if name in self._outputs:
            return True
        if self._trace is not None:
            self._trace.recomputed.add(name)
        return False

    def load_output(self, name: str) -> Any:
        """Return the stored output, and set the random generator to its state after the operation."""
        if name in self._rng_after:
            self._device.set_rng_state(self._rng_after[name])
        return tree_map(self._load, self._outputs[name])

    def _load(self, stored: Any) -> Any:
        if isinstance(stored, KeptTensor):
            return stored.tensor()
        if isinstance(stored, SwappedTensor):
            return self._swapper.swap_in(stored)
        return stored

    def begin_backward(self) -> None:
        self._on_backward(self)


@contextlib.contextmanager
def _calling(function: Callable[[], None]) -> Iterator[None]:
    function()
    yield


class _FrameMode(TorchDispatchMode):
    """Sees the operations of a frame's layer: stores outputs in the forward, and returns them in the recomputation."""

    supports_higher_order_operators = True

    def __init__(self, frame: LayerFrame, *, recomputes: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._frame = frame
        self._recomputes = recomputes
        self._counts: Counter[str] = Counter()

    def __enter__(self) -> _FrameMode:
        self._counts.clear()  # a second backward (retain_graph) counts from zero
        (self._frame.begin_backward if self._recomputes else self._frame.begin_forward)()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, frame, kind = kwargs or {}, self._frame, anchor_name(func)
        if frame.stored and _writes_arguments(func):  # also in the recomputation, for a second backward
            frame.protect(_written_tensors(func, args, kwargs))
        name = f"{kind}#{self._counts[kind]}" if kind is not None else ""
        if kind is not None:
            self._counts[kind] += 1
        if self._recomputes:
            return frame.load_output(name) if name and frame.has_output(name) else func(*args, **kwargs)
        output = func(*with_sums(func, args), **kwargs)
        if name:
            frame.store_output(name, func, output)
        return output


def _leaves(stored: Any, output: Any) -> list[tuple[Any, Any]]:
    """Return pairs of a stored leaf and the leaf of the output that it replaces."""
    if isinstance(output, tuple | list):
        return [pair for a, b in zip(stored, output, strict=True) for pair in _leaves(a, b)]
    return [(stored, output)]


@cache
def _writes_arguments(operation: Any) -> bool:
    """Return whether the operation writes to some of its arguments."""
    return isinstance(operation, OpOverload) and bool(schema_of(operation).is_mutable)


@cache
def is_random(operation: Any) -> bool:
    """Return whether the operation may draw random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(operation, "tags", ())


def _written_tensors(operation: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Tensor]:
    """Yield the arguments that a mutable operation writes to."""
    for position, argument in enumerate(schema_of(operation).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = kwargs.get(argument.name, args[position] if position < len(args) else None)
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor))

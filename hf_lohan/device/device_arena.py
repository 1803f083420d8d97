"""Device memory for the tensors that this library allocates itself: swapped tensors that come back, what layers in
chunks write to, their keys and values, and sums of gradients.

Passes repeat. The arena notes when each tensor of a pass is allocated and freed. In the next equal pass it takes one
block of memory for all tensors that the pass frees, and each gets its planned offset (`planner.address_plan`). So these
tensors leave no holes between those of PyTorch's kernels.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef
from hf_lohan.planner.address_plan import aligned, plan_addresses

if TYPE_CHECKING:
    from hf_lohan.device.base import Device, Event, Lane

_MOST_PLANS = 16
"""Plans of passes that are remembered, such as those of batches of different lengths."""


@dataclass(eq=False, slots=True)
class _ArenaTensor:
    """A tensor of a pass. Times are numbers of allocations."""

    num_bytes: int
    born: int
    memory: StorageWeakRef | None = None
    died: int | None = None
    start: int | None = None
    """The offset in the block. None for a tensor from PyTorch's allocator."""
    block: Tensor | None = None
    copies: dict[Lane, Event] = field(default_factory=dict)
    """The last copy to or from the tensor, by lane. The tensor may be freed while it runs."""

    @property
    def is_vacated(self) -> bool:
        """Whether nothing uses the memory but the lane COMPUTE."""
        return self.died is not None and all(event.is_reached() for event in self.copies.values())


@dataclass(frozen=True, slots=True)
class _PassPlan:
    """What an equal pass will allocate."""

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    """None for a tensor that is alive when the pass ends, which would keep the block."""
    num_bytes: int


class DeviceArena:
    """Allocates tensors at planned offsets, in a block of memory that exists for one pass.

    Work on COMPUTE is in order. A place is given again only when all copies to and from it are done. A tensor for which
    there is no place, or that was not planned, comes from PyTorch's allocator.
    """

    def __init__(self, device: Device) -> None:
        self._device_of_arena = weakref.ref(device)  # the device has the arena
        self._lock = threading.Lock()
        self._plans: dict[Hashable, _PassPlan] = {}
        """By pass and size of its first tensor, the latest last."""
        self._name: Hashable | None = None
        """The pass. None between passes."""
        self._plan: _PassPlan | None = None
        self._block: Tensor | None = None
        self._lane: object = None
        """The lane COMPUTE of the block."""
        self._of_pass: list[_ArenaTensor] = []
        self._alive: list[_ArenaTensor] = []
        """Pieces of this pass and earlier ones that are in use."""
        self._placed: dict[int, _ArenaTensor] = {}
        """Those of them that are in a block, by address."""
        self.num_placed = 0
        """Tensors that got a planned offset, since the start."""
        self.num_unplaced = 0
        """Other tensors."""

    @property
    def _device(self) -> Device:
        device = self._device_of_arena()
        assert device is not None
        return device

    @property
    def block_bytes(self) -> int:
        """Bytes of the block of the present pass."""
        return 0 if self._block is None else self._block.numel()

    def begin_pass(self, name: Hashable | None) -> None:
        """End the present pass and begin another one. None begins none, and so does a device without planned
        addresses."""
        if not self._device.plans_addresses:
            return
        with self._lock:
            self._note_deaths()
            if self._name is not None and self._of_pass:
                self._learn()
            self._name, self._plan, self._block, self._of_pass = name, None, None, []

    def empty(self, size: Sequence[int], dtype: torch.dtype, *, stride: Sequence[int] | None = None) -> Tensor:
        """Allocate a tensor on the device, without gaps between its elements. It is contiguous unless ``stride`` is
        given."""
        form: Any = {"dtype": dtype, "device": self._device.torch_device}
        strides = _contiguous(size) if stride is None else tuple(stride)
        with self._lock:
            self._note_deaths()
            if self._name is None:
                self.num_unplaced += 1
                return torch.empty_strided(tuple(size), strides, **form)
            piece = _ArenaTensor(math.prod(size) * dtype.itemsize, len(self._of_pass))
            self._of_pass.append(piece)
            memory = self._place(piece) if piece.num_bytes else None
            if memory is None:
                self.num_unplaced += 1
                tensor = torch.empty_strided(tuple(size), strides, **form)
            else:
                self.num_placed += 1
                self._placed[memory.data_ptr()] = piece
                # A view of the memory would not do, because autograd restricts writes to views.
                with torch.no_grad():
                    tensor = torch.empty(0, **form).set_(memory.untyped_storage(), 0, tuple(size), strides)
            piece.memory = StorageWeakRef(tensor.untyped_storage())
            self._alive.append(piece)
            return tensor

    def note_copy(self, lane: Lane, *tensors: Tensor) -> None:
        """Note that a copy lane uses these tensors. Called when the copy is enqueued."""
        if not self._placed:
            return
        with self._lock:
            used = [
                piece
                for tensor in tensors
                if (piece := self._placed.get(tensor.untyped_storage().data_ptr())) is not None
            ]
            if used:
                event = self._device.record(lane)
                for piece in used:
                    piece.copies[lane] = event

    def _note_deaths(self) -> None:
        """Note which tensors have been freed, and forget those whose copies are done."""
        for piece in self._alive:
            if piece.died is None and piece.memory is not None and piece.memory.expired():
                piece.died = len(self._of_pass)
        for address in [address for address, piece in self._placed.items() if piece.is_vacated]:
            del self._placed[address]
        self._alive = [piece for piece in self._alive if not piece.is_vacated]

    def _place(self, piece: _ArenaTensor) -> Tensor | None:
        """Return the piece's planned memory, or None if it has none or it is in use."""
        number = piece.born
        if number == 0:
            self._plan = self._plans.get((self._name, piece.num_bytes))
        plan = self._plan
        if plan is None:
            return None
        if number >= len(plan.sizes) or plan.sizes[number] != piece.num_bytes:
            self._plan = None  # another pass than the planned one
            return None
        start = plan.offsets[number]
        if start is None:
            return None
        if self._block is None:
            try:
                self._block = self._device.empty(plan.num_bytes)
            except torch.OutOfMemoryError:  # smaller tensors may find room
                self._plan = None
                return None
            self._lane = self._device.compute_lane()
        if self._lane != self._device.compute_lane():
            return None
        stop = start + aligned(piece.num_bytes)
        for other in self._placed.values():
            if other.block is not self._block or other.start is None:
                continue
            if other.start < stop and start < other.start + aligned(other.num_bytes):
                return None
        piece.start, piece.block = start, self._block
        return self._device.span(self._block, start, piece.num_bytes)

    def _learn(self) -> None:
        """Plan the addresses of the next equal pass."""
        sizes = tuple(piece.num_bytes for piece in self._of_pass)
        key = self._name, sizes[0]
        known = self._plans.pop(key, None)
        if known is None or known.sizes != sizes:
            freed = [piece for piece in self._of_pass if piece.died is not None and piece.num_bytes]
            planned = plan_addresses([_Life(piece.num_bytes, piece.born, piece.died or 0) for piece in freed])
            offsets = dict(zip(map(id, freed), planned.offsets, strict=True))
            known = _PassPlan(sizes, tuple(offsets.get(id(piece)) for piece in self._of_pass), planned.num_bytes)
        self._plans[key] = known
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]


@dataclass(frozen=True, slots=True)
class _Life:
    num_bytes: int
    born: int
    died: int


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, length) for length in size[number + 1 :]) for number in range(len(size)))

"""Device memory for tensors that this library allocates itself: returning swapped tensors; outputs, keys and values of
layers that run in chunks; and sums of gradients.

Passes repeat. The arena records when each tensor of a pass is allocated and freed. In the next equal pass, tensors that
are freed before its end get planned addresses (`costs.address_plan`). Tensors that share addresses are in one block of
memory, which exists from the first of these tensors to the last. So they leave no holes between other tensors.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hf_lohan.compat.torch_private import StorageWeakRef
from hf_lohan.costs.address_plan import Life, aligned, plan_addresses
from hf_lohan.device.lanes import DeviceMemory, Event, Lane

_MOST_PLANS = 64
"""Number of plans that are remembered. Passes of batches of different lengths have different plans."""


@dataclass(eq=False, slots=True)
class _ArenaTensor:
    """A tensor of a pass. `born` and `died` are the numbers of earlier allocations of the pass."""

    num_bytes: int
    born: int
    memory: StorageWeakRef | None = None
    died: int | None = None
    start: int = 0
    """The offset in the block."""
    block: Tensor | None = None
    """None for a tensor from PyTorch's allocator, and once the tensor is vacated."""
    copies: dict[Lane, Event] = field(default_factory=dict)
    """The last copy to or from the tensor on each lane. The tensor may be freed while a copy runs."""

    @property
    def is_vacated(self) -> bool:
        """Whether the tensor is freed and its copies are done. Only the lane COMPUTE may still use the memory."""
        return self.died is not None and all(event.is_reached() for event in self.copies.values())


@dataclass(frozen=True, slots=True)
class _Block:
    """Memory for several tensors, which use it at the same time or one after the other."""

    start: int
    num_bytes: int
    last: int
    """The number of the last tensor that is placed here."""


@dataclass(frozen=True, slots=True)
class _PassPlan:
    """The allocations of a pass that will be repeated."""

    sizes: tuple[int, ...]
    offsets: tuple[int | None, ...]
    """None for a tensor that is alive when the pass ends, because it would keep its block alive."""
    blocks: tuple[_Block | None, ...]
    """The block of each tensor."""


class DeviceArena:
    """Allocates tensors at planned addresses, in blocks of memory that exist during one pass.

    Work on COMPUTE is in order. An address is used again only when all copies to and from it are done. A tensor that
    has no planned address, or whose address is in use, is allocated by PyTorch.
    """

    def __init__(self, device: DeviceMemory) -> None:
        self._device_of_arena = weakref.ref(device)  # the device refers to the arena
        self._lock = threading.Lock()
        self._plans: dict[Hashable, _PassPlan] = {}
        """Maps (pass, bytes of its first tensor) to a plan. The latest plan is last."""
        self._name: Hashable | None = None
        """The name of the current pass. None between passes."""
        self._plan: _PassPlan | None = None
        self._blocks: dict[_Block, Tensor] = {}
        """Blocks of the current pass whose last tensor has not been placed."""
        self._lane: object = None
        """The lane COMPUTE on which the blocks are allocated."""
        self.block_bytes = 0
        """Bytes of all blocks of the current pass so far."""
        self._of_pass: list[_ArenaTensor] = []
        self._alive: list[_ArenaTensor] = []
        """Tensors of this pass and earlier passes that are in use."""
        self._placed: dict[int, _ArenaTensor] = {}
        """Maps addresses to the tensors that are in a block."""
        self.num_placed = 0
        """Number of tensors that got a planned offset, since the start."""
        self.num_unplaced = 0
        """Number of tensors from PyTorch's allocator."""

    @property
    def _device(self) -> DeviceMemory:
        device = self._device_of_arena()
        assert device is not None
        return device

    def begin_pass(self, name: Hashable | None) -> None:
        """End the current pass and begin another one. With None, or without planned addresses, no pass begins."""
        if not self._device.plans_addresses:
            return
        with self._lock:
            self._note_deaths()
            if self._name is not None and self._of_pass:
                self._learn()
            self._name, self._plan, self._blocks, self._of_pass = name, None, {}, []
            self._lane, self.block_bytes = None, 0

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
                # The tensor is not a view of the memory, because autograd restricts writes to views.
                with torch.no_grad():
                    tensor = torch.empty(0, **form).set_(memory.untyped_storage(), 0, tuple(size), strides)
            piece.memory = StorageWeakRef(tensor.untyped_storage())
            self._alive.append(piece)
            return tensor

    def free_blocks(self) -> None:
        """Free the blocks that no tensor uses or will use. Other methods free them too."""
        with self._lock:
            self._note_deaths()

    def note_copy(self, lane: Lane, *tensors: Tensor) -> None:
        """Record that a copy lane uses these tensors. Called when the copy is enqueued."""
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
        """Record which tensors have been freed, and forget the freed tensors whose copies are done."""
        for piece in self._alive:
            if piece.died is None and piece.memory is not None and piece.memory.expired():
                piece.died = len(self._of_pass)
        for address in [address for address, piece in self._placed.items() if piece.is_vacated]:
            del self._placed[address]
        alive = []
        for piece in self._alive:
            if piece.is_vacated:
                piece.block = None  # its memory is free once no other tensor uses or will use the block
            else:
                alive.append(piece)
        self._alive = alive

    def _place(self, piece: _ArenaTensor) -> Tensor | None:
        """Return the planned memory of ``piece``. None if it has no plan, or if that memory is in use."""
        number = piece.born
        if number == 0:
            self._plan = self._plans.get((self._name, piece.num_bytes))
        plan = self._plan
        if plan is None:
            return None
        if number >= len(plan.sizes) or plan.sizes[number] != piece.num_bytes:
            self._plan, self._blocks = None, {}  # a pass other than the planned one
            return None
        start, place = plan.offsets[number], plan.blocks[number]
        if start is None or place is None:
            return None
        lane = self._device.compute_lane()
        self._lane = lane if self._lane is None else self._lane
        block = self._blocks.get(place)
        if block is None and lane == self._lane:
            try:
                block = self._blocks[place] = self._device.empty(place.num_bytes)
            except torch.OutOfMemoryError:  # smaller tensors may find room
                self._plan, self._blocks = None, {}
                return None
            self.block_bytes += place.num_bytes
        if number == place.last:
            self._blocks.pop(place, None)
        if block is None or lane != self._lane:
            return None
        start -= place.start
        stop = start + aligned(piece.num_bytes)
        for other in self._placed.values():
            if other.block is block and other.start < stop and start < other.start + aligned(other.num_bytes):
                return None
        piece.start, piece.block = start, block
        return self._device.span(block, start, piece.num_bytes)

    def _learn(self) -> None:
        """Plan the addresses of the next equal pass."""
        sizes = tuple(piece.num_bytes for piece in self._of_pass)
        key = self._name, sizes[0]
        known = self._plans.pop(key, None)
        if known is None or known.sizes != sizes:
            freed = [piece for piece in self._of_pass if piece.died is not None and piece.num_bytes]
            planned = plan_addresses([Life(piece.num_bytes, piece.born, piece.died or 0) for piece in freed])
            offsets = dict(zip((piece.born for piece in freed), planned.offsets, strict=True))
            blocks = _blocks_of([(offsets[piece.born], piece.num_bytes, piece.born) for piece in freed])
            numbers = range(len(sizes))
            known = _PassPlan(sizes, tuple(map(offsets.get, numbers)), tuple(map(blocks.get, numbers)))
        self._plans[key] = known
        if len(self._plans) > _MOST_PLANS:
            del self._plans[next(iter(self._plans))]


def _blocks_of(placed: Sequence[tuple[int, int, int]]) -> dict[int, _Block]:
    """Return the block of each tensor. ``placed``: (offset, bytes, number) of the tensors."""
    groups: list[list[int]] = []
    start = stop = -1
    spans: list[tuple[int, int]] = []
    for offset, num_bytes, number in sorted(placed):
        if offset >= stop:
            groups.append([])
            start = offset
            spans.append((start, stop))
        groups[-1].append(number)
        stop = max(stop, offset + aligned(num_bytes))
        spans[-1] = start, stop
    blocks: dict[int, _Block] = {}
    for numbers, (first, last) in zip(groups, spans, strict=True):
        block = _Block(first, last - first, max(numbers))
        blocks.update(dict.fromkeys(numbers, block))
    return blocks


def _contiguous(size: Sequence[int]) -> tuple[int, ...]:
    return tuple(math.prod(max(1, length) for length in size[number + 1 :]) for number in range(len(size)))

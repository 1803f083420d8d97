"""Gives tensors addresses in one piece of memory by the times at which they exist, and models PyTorch's caching
allocator, which gives an address without knowing the future.

As in MEMO, addresses are planned for a known step. Best fit by size takes the place of MEMO's mixed integer program,
because in all traced steps it needs no more than the tensors that exist at one time.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import numpy as np

ALIGN_BYTES = 512
"""Addresses and sizes are multiples of this, as those of PyTorch's allocator are."""
_MIB = 1 << 20
_PART = 32
"""Allocations in a part of the time."""
_Life: TypeAlias = tuple[int, int, int]
"""Aligned bytes of a tensor, and its times ``born`` and ``died``."""


class Allocation(Protocol):
    """Memory that is in use from time ``born`` to time ``died``, which it does not reach."""

    @property
    def num_bytes(self) -> int: ...

    @property
    def born(self) -> int: ...

    @property
    def died(self) -> int: ...


@dataclass(frozen=True, slots=True)
class AddressPlan:
    """Offsets of tensors in one piece of memory, none of which overlap while both tensors exist."""

    offsets: tuple[int, ...]
    """By tensor, in bytes."""
    num_bytes: int
    """Bytes of the memory."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """The device memory that the tensors of a step take, by how they get their addresses."""

    live_bytes: int
    """The most bytes that exist at one time. No addresses need less."""
    planned_bytes: int
    """With addresses that are planned for all tensors together."""
    caching_bytes: int
    """Memory that PyTorch's caching allocator reserves."""
    expandable_bytes: int
    """The same with `expandable_segments:True`."""


def aligned(num_bytes: int) -> int:
    """Return the bytes that a tensor takes, at least one unit."""
    return max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)


def compare_addresses(tensors: Sequence[Allocation]) -> Addresses:
    """Return the memory that tensors take with each kind of addresses."""
    return Addresses(
        live_bytes=live_bytes(tensors),
        planned_bytes=plan_addresses(tensors).num_bytes,
        caching_bytes=_reserved_bytes(tensors, is_expandable=False),
        expandable_bytes=_reserved_bytes(tensors, is_expandable=True),
    )


def live_bytes(tensors: Sequence[Allocation]) -> int:
    """Return the most bytes that exist at one time."""
    changes = np.zeros(max((tensor.died for tensor in tensors), default=0) + 1, dtype=np.int64)
    for tensor in tensors:
        changes[tensor.born] += aligned(tensor.num_bytes)
        changes[tensor.died] -= aligned(tensor.num_bytes)
    return int(np.cumsum(changes).max(initial=0))


def plan_addresses(tensors: Sequence[Allocation]) -> AddressPlan:
    """Return addresses that need hardly more memory than the tensors that exist at one time.

    Tensors are placed one after the other, each into the smallest gap that is free during its life. The largest are
    placed first. If that needs more than `live_bytes`, other orders are tried too, and the best is returned.
    """
    least_bytes, lives = live_bytes(tensors), [(aligned(one.num_bytes), one.born, one.died) for one in tensors]
    best = AddressPlan((0,) * len(lives), 1 + sum(num_bytes for num_bytes, _, _ in lives))
    for order in _ORDERS:
        best = _place(lives, order, below_bytes=best.num_bytes) or best
        if best.num_bytes <= least_bytes:
            break
    return best


_ORDERS: tuple[Callable[[int, int, int], tuple[int, ...]], ...] = (
    lambda num_bytes, born, died: (-num_bytes, born),
    lambda num_bytes, born, died: (-num_bytes * (died - born), born),
    lambda num_bytes, born, died: (born - died, -num_bytes),
    lambda num_bytes, born, died: (born, -num_bytes),
)
"""Sort keys: by size, by size times life, by life, by birth."""


def _place(
    lives: Sequence[_Life], order: Callable[[int, int, int], tuple[int, ...]], below_bytes: int
) -> AddressPlan | None:
    """Place tensors in an order, each at the best fit. Returns None if that does not need less than ``below_bytes``."""
    offsets, num_bytes = [0] * len(lives), 0
    placed: list[list[tuple[int, int, int, int]]] = [
        [] for _ in range(max((d for *_, d in lives), default=0) // _PART + 1)
    ]
    """By part of the time, (start, stop, born, died) of the tensors that exist in it. A tensor meets few others, so it
    is not compared with all."""
    for number in sorted(range(len(lives)), key=lambda n: order(*lives[n])):
        size, born, died = lives[number]
        first, last = born // _PART, max(born, died - 1) // _PART
        beside = [other for other in placed[first] if other[2] < died and other[3] > born]
        for part in range(first + 1, last + 1):
            start = part * _PART
            beside += [other for other in placed[part] if start <= other[2] < died]
        offset = _best_fit(beside, size)
        if offset + size >= below_bytes:
            return None
        life = (offset, offset + size, born, died)
        for part in range(first, last + 1):
            placed[part].append(life)
        offsets[number], num_bytes = offset, max(num_bytes, offset + size)
    return AddressPlan(tuple(offsets), num_bytes)


def _best_fit(beside: list[tuple[int, int, int, int]], num_bytes: int) -> int:
    """Return the start of the smallest gap between intervals (start, stop, ...) that has ``num_bytes``, or the end of
    all intervals."""
    beside.sort()
    reached, best, least = 0, -1, 0
    for start, stop, _, _ in beside:
        gap = start - reached
        if gap >= num_bytes and (best < 0 or gap < least):
            best, least = reached, gap
        if stop > reached:
            reached = stop
    return best if best >= 0 else reached


# PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), with one stream and memory that never runs out.


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment. A segment's blocks are a list in the order of their addresses."""

    address: int
    num_bytes: int
    is_small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    is_free: bool = True


class CachingAllocator:
    """Allocates as PyTorch's caching allocator for CUDA does. Sizes of at most 1 MiB come from segments of 2 MiB, those
    below 10 MiB from segments of 20 MiB, and larger ones have segments of their own, in which smaller ones may be
    allocated later. A free block is the best fit, and is split. Segments are kept.

    With expandable segments there are two, one for sizes of at most 1 MiB, which grow by 2 MiB and 20 MiB at a time.
    """

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.reserved_bytes = 0
        self._is_expandable = is_expandable
        self._next_address = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """For small sizes and for others, (size, address) of each free block in ascending order."""
        self._block_at: dict[int, MemoryBlock] = {}
        """Free blocks by address."""
        self._last: dict[bool, MemoryBlock | None] = {True: None, False: None}
        """The last blocks of the expandable segments."""

    def allocate(self, num_bytes: int) -> MemoryBlock:
        """Return a block of at least ``num_bytes``."""
        size = aligned(num_bytes)
        is_small = size <= _MIB
        block = self._find(size, is_small)
        if block is None:
            block = self._grow(size, is_small) if self._is_expandable else self._new_segment(size, is_small)
        rest = block.num_bytes - size
        if rest >= ALIGN_BYTES if is_small or self._is_expandable else rest > _MIB:
            after = MemoryBlock(block.address + size, rest, is_small, block, block.after)
            if block.after is not None:
                block.after.before = after
            block.after, block.num_bytes = after, size
            if self._last[is_small] is block:
                self._last[is_small] = after
            self._put(after)
        block.is_free = False
        return block

    def free(self, block: MemoryBlock) -> None:
        """Free a block, and merge it with free blocks beside it."""
        block.is_free = True
        for first, second in ((block, block.after), (block.before, block)):
            if first is None or second is None or not (first.is_free and second.is_free):
                continue
            for other in (first, second):
                if other is not block:
                    self._take(other)
            first.num_bytes += second.num_bytes
            first.after = second.after
            if first.after is not None:
                first.after.before = first
            if self._last[first.is_small] is second:
                self._last[first.is_small] = first
            block = first
        self._put(block)

    def _find(self, size: int, is_small: bool) -> MemoryBlock | None:
        """Return the smallest free block that is large enough, and take it. The end of an expandable segment counts as
        endless."""
        free = self._free[is_small]
        index = bisect_left(free, (size, -1))
        if index == len(free):
            return None
        block = self._block_at[free[index][1]]
        if block is self._last[is_small] and index + 1 < len(free):
            block = self._block_at[free[index + 1][1]]
        return self._take(block)

    def _new_segment(self, size: int, is_small: bool) -> MemoryBlock:
        num_bytes = 2 * _MIB if is_small else 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
        block = MemoryBlock(self._next_address, num_bytes, is_small)
        self._next_address += num_bytes
        self.reserved_bytes += num_bytes
        return block

    def _grow(self, size: int, is_small: bool) -> MemoryBlock:
        page_bytes = 2 * _MIB if is_small else 20 * _MIB
        last = self._last[is_small]
        at_end = last if last is not None and last.is_free else None
        missing = size - (at_end.num_bytes if at_end is not None else 0)
        grown = -(-missing // page_bytes) * page_bytes
        self.reserved_bytes += grown
        if at_end is not None:
            self._take(at_end)
            at_end.num_bytes += grown
            return at_end
        base = 0 if is_small else 1 << 60
        address = base if last is None else last.address + last.num_bytes
        block = MemoryBlock(address, grown, is_small, last)
        if last is not None:
            last.after = block
        self._last[is_small] = block
        return block

    def _put(self, block: MemoryBlock) -> None:
        insort(self._free[block.is_small], (block.num_bytes, block.address))
        self._block_at[block.address] = block

    def _take(self, block: MemoryBlock) -> MemoryBlock:
        free = self._free[block.is_small]
        del free[bisect_left(free, (block.num_bytes, block.address))]
        return self._block_at.pop(block.address)


def _reserved_bytes(tensors: Sequence[Allocation], *, is_expandable: bool, num_steps: int = 2) -> int:
    """Return the bytes that the caching allocator reserves for ``num_steps`` equal steps."""
    changes = [(tensor.born, 1, number) for number, tensor in enumerate(tensors)]
    changes += [(tensor.died, 0, number) for number, tensor in enumerate(tensors)]
    changes.sort()
    allocator = CachingAllocator(is_expandable=is_expandable)
    blocks: dict[int, MemoryBlock] = {}
    for _ in range(num_steps):
        for _, is_birth, number in changes:
            if is_birth:
                blocks[number] = allocator.allocate(tensors[number].num_bytes)
            else:
                allocator.free(blocks.pop(number))
    return allocator.reserved_bytes

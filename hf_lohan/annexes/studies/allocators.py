"""Compares the memory of planned addresses with the memory of PyTorch's caching allocator, which does not know later
allocations."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from hf_lohan.costs.address_plan import ALIGN_BYTES, Life, aligned, live_bytes, plan_addresses

_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Addresses:
    """The device memory that the tensors of a step take, with several ways to assign addresses."""

    live_bytes: int
    """Peak of the bytes of all tensors that exist at the same time. No allocator needs less."""
    planned_bytes: int
    """Memory if addresses are planned for all tensors together."""
    caching_bytes: int
    """Memory that PyTorch's caching allocator reserves."""
    expandable_bytes: int
    """Memory that PyTorch's caching allocator reserves with `expandable_segments:True`."""


def compare_addresses(tensors: Sequence[Life]) -> Addresses:
    """Return the memory that tensors take with each way to assign addresses."""
    return Addresses(
        live_bytes=live_bytes(tensors),
        planned_bytes=plan_addresses(tensors).num_bytes,
        caching_bytes=_reserved_bytes(tensors, is_expandable=False),
        expandable_bytes=_reserved_bytes(tensors, is_expandable=True),
    )


# Models PyTorch's caching allocator (c10/cuda/CUDACachingAllocator.cpp), with one stream and unlimited memory.


@dataclass(eq=False, slots=True)
class MemoryBlock:
    """A part of a segment. The blocks of a segment are a linked list, in the order of their addresses."""

    address: int
    num_bytes: int
    is_small: bool
    before: MemoryBlock | None = None
    after: MemoryBlock | None = None
    is_free: bool = True


class CachingAllocator:
    """Allocates as PyTorch's caching allocator for CUDA does. Sizes of at most 1 MiB come from segments of 2 MiB, and
    sizes below 10 MiB from segments of 20 MiB. A larger size gets its own segment, which smaller sizes may use later.
    An allocation takes the smallest free block that fits, and splits it. Segments are never freed.

    Of two expandable segments, one is for sizes of at most 1 MiB and grows by 2 MiB at a time, the other by 20 MiB.
    """

    def __init__(self, *, is_expandable: bool = False) -> None:
        self.reserved_bytes = 0
        self._is_expandable = is_expandable
        self._next_address = 0
        self._free: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        """(size, address) of each free block, in ascending order. Key: whether the blocks are for small sizes."""
        self._block_at: dict[int, MemoryBlock] = {}
        """Maps addresses to free blocks."""
        self._last: dict[bool, MemoryBlock | None] = {True: None, False: None}
        """The last block of each expandable segment. Key: whether the segment is for small sizes."""

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
        """Free a block, and merge it with adjacent free blocks."""
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
        """Return the smallest free block that is large enough, and remove it from the free blocks. The last block of an
        expandable segment counts as infinitely large."""
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


def _reserved_bytes(tensors: Sequence[Life], *, is_expandable: bool) -> int:
    """Return the bytes that the caching allocator reserves for two equal steps."""
    changes = [(tensor.born, 1, number) for number, tensor in enumerate(tensors)]
    changes += [(tensor.died, 0, number) for number, tensor in enumerate(tensors)]
    changes.sort()
    allocator = CachingAllocator(is_expandable=is_expandable)
    blocks: dict[int, MemoryBlock] = {}
    for _ in range(2):
        for _, is_birth, number in changes:
            if is_birth:
                blocks[number] = allocator.allocate(tensors[number].num_bytes)
            else:
                allocator.free(blocks.pop(number))
    return allocator.reserved_bytes

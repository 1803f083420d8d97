"""The blocks that compute uses: pinned in their slots, with present parameters."""

from __future__ import annotations

from collections.abc import Callable

from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.weights.block_loader import Loads
from hf_lohan.weights.slot_ring import Slot, SlotRing


class BlocksInUse:
    """Forward reports when it has finished with a block. Backward does not: there, a block is finished when the next
    one of its size class is requested, since autograd runs one node after another."""

    def __init__(self, ring: SlotRing, prefetcher: Loads) -> None:
        self._ring = ring
        self._prefetcher = prefetcher
        self._blocks: dict[SizeClass, list[Block]] = {size_class: [] for size_class in SizeClass}

    def enter(self, block: Block, *, for_operation: bool = False) -> None:
        """A module that owns the block, or an operation that reads a weight of it, is about to run."""
        self._prefetcher.acquire(block, for_operation=for_operation)
        in_use = self._blocks[block.size_class]
        if block not in in_use:  # otherwise an outer module uses it, too
            self._ring.show(block)
        in_use.append(block)

    def leave(self, block: Block) -> None:
        """The module has run."""
        in_use = self._blocks[block.size_class]
        in_use.remove(block)
        if block not in in_use:  # otherwise an outer module still uses it
            self._ring.hide(block)
        self._ring.unpin(block)

    def enter_for_many(self, block: Block, *, is_idle: Callable[[Block], bool]) -> Slot:
        """A module that owns the block is about to run, perhaps not for the last time. The block stays until another
        one of its size class is requested and it is idle."""
        if block not in self._blocks[block.size_class]:
            self.leave_idle(block.size_class, is_idle)
            self.enter(block)
        return self._ring.slot_of(block)

    def leave_idle(self, size_class: SizeClass, is_idle: Callable[[Block], bool]) -> None:
        """Release blocks of this class that stayed and are idle."""
        for block in list(self._blocks[size_class]):
            if is_idle(block):
                self.leave(block)

    def fetch_in_backward(self, block: Block, done_with: Callable[[Block], None] = lambda _block: None) -> Slot:
        """Bring a block for its backward. ``done_with`` is called for each block that makes room for it."""
        in_use = self._blocks[block.size_class]
        if block not in in_use:
            # Resident blocks have slots of their own and make no room.
            for other in list(in_use) if block.size_class is not SizeClass.RESIDENT else ():
                done_with(other)
                self.leave(other)
            self.enter(block)
        return self._ring.slot_of(block)

    def release_all(self) -> None:
        """The pass has ended."""
        for blocks in self._blocks.values():
            for block in blocks:
                self._ring.hide(block)
            blocks.clear()
        self._ring.unpin_all()

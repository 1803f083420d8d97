"""Which blocks compute works on right now: pinned in their slots, their parameters shown."""

from __future__ import annotations

from collections.abc import Callable

from hf_lohan.model import Block
from hf_lohan.planner import SizeClass
from hf_lohan.weights.block_loader import Loads
from hf_lohan.weights.slot_ring import Slot, SlotRing


class BlocksInUse:
    """Forward says when it is done with a block. Backward does not: there a block is done with when the next one of
    its size class is asked for, since autograd runs one node after another."""

    def __init__(self, ring: SlotRing, prefetcher: Loads) -> None:
        self._ring = ring
        self._prefetcher = prefetcher
        self._blocks: dict[SizeClass, list[Block]] = {size_class: [] for size_class in SizeClass}

    def enter(self, block: Block, *, for_operation: bool = False) -> None:
        """A module that needs the block is about to run; or an operation that reads a weight of it."""
        self._prefetcher.acquire(block, for_operation=for_operation)
        in_use = self._blocks[block.size_class]
        if block not in in_use:  # else an outer module uses it, too
            self._ring.show(block)
        in_use.append(block)

    def leave(self, block: Block) -> None:
        """That module has run."""
        in_use = self._blocks[block.size_class]
        in_use.remove(block)
        if block not in in_use:  # else an outer module is still in the middle of using it
            self._ring.hide(block)
        self._ring.unpin(block)

    def enter_for_many(self, block: Block, *, is_idle: Callable[[Block], bool]) -> Slot:
        """A module that needs the block is about to run, maybe not for the last time: it stays, until another one of
        its size class comes and it is idle."""
        if block not in self._blocks[block.size_class]:
            self.leave_idle(block.size_class, is_idle)
            self.enter(block)
        return self._ring.slot_of(block)

    def leave_idle(self, size_class: SizeClass, is_idle: Callable[[Block], bool]) -> None:
        """Blocks of this class that stayed are not needed for now."""
        for block in list(self._blocks[size_class]):
            if is_idle(block):
                self.leave(block)

    def fetch_in_backward(self, block: Block, done_with: Callable[[Block], None] = lambda _block: None) -> Slot:
        """Bring the block here for its backward. ``done_with`` is told of each block that makes room for it."""
        in_use = self._blocks[block.size_class]
        if block not in in_use:
            # Those that have slots of their own make room for nobody.
            for other in list(in_use) if block.size_class is not SizeClass.RESIDENT else ():
                done_with(other)
                self.leave(other)
            self.enter(block)
        return self._ring.slot_of(block)

    def release_all(self) -> None:
        """The pass is over, or broke off."""
        for blocks in self._blocks.values():
            for block in blocks:
                self._ring.hide(block)
            blocks.clear()
        self._ring.unpin_all()

"""Keeps the blocks that compute uses pinned in their slots, with present parameters."""

from __future__ import annotations

from collections.abc import Callable

from hf_lohan.costs import SizeClass
from hf_lohan.model import Block, WrittenWeightError
from hf_lohan.weights.block_loader import BlockLoader
from hf_lohan.weights.slot_ring import Slot, SlotRing


class BlocksInUse:
    """The blocks that compute uses. A forward reports when it has finished with a block. A backward does not. In a
    backward a block is finished when the next block of its size class is requested, because autograd runs one node
    after another."""

    def __init__(self, ring: SlotRing, prefetcher: BlockLoader) -> None:
        self._ring = ring
        self._prefetcher = prefetcher
        self._used: set[Block] = set()
        self._blocks: dict[SizeClass, list[Block]] = {size_class: [] for size_class in SizeClass}

    def collect_uses(self, used: set[Block]) -> None:
        """Add the blocks that are used from now on to this set."""
        self._used = used

    def note_use(self, block: Block) -> None:
        """Record that weights of a block are used."""
        self._used.add(block)

    def enter(self, block: Block, *, for_operation: bool = False) -> None:
        """Acquire a block before a module that owns it runs, or an operation that reads one of its weights."""
        self._prefetcher.acquire(block, for_operation=for_operation)
        self.note_use(block)
        in_use = self._blocks[block.size_class]
        if block not in in_use:  # an outer module does not use it already
            self._ring.show(block)
        in_use.append(block)

    def leave(self, block: Block, on_views: Callable[[Block], None] = lambda _block: None) -> None:
        """Release a block after its module has run. ``on_views`` is called before the release if views of the block's
        weights are left."""
        in_use = self._blocks[block.size_class]
        in_use.remove(block)
        if block not in in_use and self._ring.hide(block):  # no outer module still uses it
            on_views(block)
        self._ring.unpin(block)

    def enter_for_many(self, block: Block, *, is_idle: Callable[[Block], bool]) -> Slot:
        """Acquire a block before a module that owns it runs, perhaps several times. The block stays until it is idle
        and another block of its size class is requested."""
        if block not in self._blocks[block.size_class]:
            self.leave_idle(block.size_class, is_idle)
            self.enter(block)
        return self._ring.slot_of(block)

    def leave_idle(self, size_class: SizeClass, is_idle: Callable[[Block], bool]) -> None:
        """Release the idle blocks of this class."""
        for block in list(self._blocks[size_class]):
            if is_idle(block):
                self.leave(block)

    def fetch_in_backward(self, block: Block, done_with: Callable[[Block], None] = lambda _block: None) -> Slot:
        """Acquire a block for its backward. ``done_with`` is called for each block that is released to make room."""
        in_use = self._blocks[block.size_class]
        if block not in in_use:
            # Resident blocks have their own slots and make no room for others.
            for other in list(in_use) if block.size_class is not SizeClass.RESIDENT else ():
                done_with(other)
                self.leave(other)
            self.enter(block)
        return self._ring.slot_of(block)

    def release_all(self) -> None:
        """Release all blocks at the end of a pass. Raises WrittenWeightError if the pass has changed a weight."""
        written: WrittenWeightError | None = None
        for blocks in self._blocks.values():
            for block in blocks:
                try:
                    self._ring.hide(block)
                except WrittenWeightError as error:
                    written = written or error
            blocks.clear()
        self._ring.unpin_all()
        if written is not None:
            raise written

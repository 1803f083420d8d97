"""The blocks that the step in progress updates on a guess."""

from __future__ import annotations

from threading import Lock

from hf_lohan.model import Block
from hf_lohan.threads import Command, WorkThread


class GuessedBlocks:
    """From when the update is ordered of the thread that does it. Whoever sees a block here, on whatever thread, comes
    behind the order: what he has the thread run then finds the guess made."""

    def __init__(self, thread: WorkThread) -> None:
        self.are_wanted = False
        """Whether the steps from the next one on are to guess, if they can."""
        self._thread = thread
        self._blocks: set[Block] = set()
        self._lock = Lock()

    def __contains__(self, block: Block) -> bool:
        return block in self._blocks

    def order(self, block: Block, command: Command) -> None:
        """Have the thread run `command`, which may guess about the block."""
        with self._lock:
            self._blocks.add(block)
            self._thread.put(command)

    def undo(self, command: Command) -> set[Block]:
        """If there are any, have the thread run `command`, which undoes them all, and wait for it. Returns them; no
        more are wanted then."""
        with self._lock:
            blocks = set(self._blocks)
            if not blocks:
                return blocks
            self.are_wanted = False
            self._thread.put(command)
        self._thread.barrier()
        with self._lock:  # not before: whoever else reads these blocks has to wait as well
            self._blocks -= blocks
        return blocks

    def forget(self) -> None:
        """They are no guesses any more."""
        with self._lock:
            self._blocks = set()

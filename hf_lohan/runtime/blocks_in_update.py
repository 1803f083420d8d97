"""Which blocks' records a finished step is still changing."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from hf_lohan.runtime.block import Block, Chunk


class BlocksInUpdate:
    """Chunks whose update is outstanding, by block. Whoever reads a block waits here first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._chunks: dict[Block, set[Chunk]] = {}
        self._cause: BaseException | None = None

    def add(self, chunks: Iterable[Chunk]) -> None:
        with self._changed:
            for chunk in chunks:
                self._chunks.setdefault(chunk.block, set()).add(chunk)

    def discard(self, chunk: Chunk) -> None:
        """The chunk's new version is in the store."""
        with self._changed:
            remaining = self._chunks.get(chunk.block)
            if remaining is None:
                return
            remaining.discard(chunk)
            if not remaining:
                del self._chunks[chunk.block]
                self._changed.notify_all()

    def clear(self) -> None:
        """No update is outstanding any more."""
        with self._changed:
            self._chunks.clear()
            self._changed.notify_all()

    def wait_for(self, block: Block) -> None:
        """Return when the block is current. Raises what made that impossible."""
        with self._changed:
            self._changed.wait_for(lambda: block not in self._chunks or self._cause is not None)
            if self._cause is not None:
                raise self._cause

    def abort(self, cause: BaseException) -> None:
        """The updates will never be finished."""
        with self._changed:
            self._cause = cause
            self._changed.notify_all()

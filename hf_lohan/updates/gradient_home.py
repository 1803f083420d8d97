"""Where gradients wait for the end of their step: in RAM, or spilled to the SSD."""

from __future__ import annotations

from dataclasses import dataclass

from hf_lohan.device import BufferPool
from hf_lohan.store import RecordRead
from hf_lohan.updates.state_update import ChunkGradient, RecordStore


@dataclass(frozen=True, slots=True)
class GradientHome:
    """RAM for some blocks, `spill` on the SSD for the others. Which is fixed before the first step."""

    recall: BufferPool
    """Buffers for spilled gradients that come back. The pipeline must never wait for a buffer of the pool in which
    gradients arrive: it is who empties that one."""
    spilled_blocks: frozenset[str]
    spill: RecordStore | None

    def park(self, gradient: ChunkGradient) -> None:
        """Let it wait. What is spilled gives its buffer back when it is written."""
        chunk = gradient.chunk
        if chunk.block.name not in self.spilled_blocks:
            return
        assert self.spill is not None and gradient.buffer is not None
        buffer = gradient.buffer
        gradient.spill_write = self.spill.write(chunk.block.name, "gradient", chunk.start, gradient.values)
        gradient.spill_write.add_done_callback(lambda request: buffer.release())
        gradient.buffer = None

    def can_bring_back(self, gradient: ChunkGradient) -> bool:
        """Whether `bring_back` finds a buffer free."""
        return gradient.buffer is not None or self.recall.num_free > 0

    def bring_back(self, gradient: ChunkGradient) -> list[RecordRead]:
        """Reads that must be done, and verified, before its values are in its buffer again."""
        if gradient.buffer is not None:
            return []
        assert self.spill is not None and gradient.spill_write is not None
        gradient.spill_write.wait()
        gradient.buffer = self.recall.acquire()
        chunk = gradient.chunk
        return [self.spill.read(chunk.block.name, "gradient", chunk.start, gradient.values)]

    def forget(self, gradient: ChunkGradient) -> None:
        """It is not wanted any more."""
        if gradient.buffer is not None:
            gradient.buffer.release()
        elif gradient.spill_write is not None:
            gradient.spill_write.wait()

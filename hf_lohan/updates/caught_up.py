"""Records as the last step left them, for whoever reads a store in which some are steps behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from threading import RLock

import torch
from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.files import Extent
from hf_lohan.model import Block, Chunk, round_up
from hf_lohan.optim import replay_, within
from hf_lohan.store import RecordRead, Store, StoreLayout
from hf_lohan.updates.missed_steps import MissedSteps

PIECE_NUMEL = 1 << 16
"""What is caught up at once for a reader: it fits a core's cache. A granule, where that is larger."""


class CaughtUpRecords:
    """Reads as `Store` does, and has what is behind take its missed steps on the way: in memory of its own, for the
    pools' buffers are those of who may wait for the reader. The store stays as it is, so that no step that reads it is
    harder to undo.

    Reading is for any thread; writing for who has waited for all updates.
    """

    def __init__(self, store: Store, blocks: Sequence[Block], missed: MissedSteps) -> None:
        self._store = store
        self.missed = missed
        """Which are behind."""
        self._block = {block.name: block for block in blocks}
        self._lock = RLock()
        """Of the memory."""
        self._rows: list[Tensor] = []

    @property
    def layout(self) -> StoreLayout:
        """That of the store."""
        return self._store.layout

    def extents(self, block: str, kind: str) -> list[tuple[str, Extent]] | None:
        """See `RecordFiles.extents`; None also where the files are behind."""
        return None if self._is_behind(block) else self._store.extents(block, kind)

    def read(self, block: str, kind: str, start_numel: int, out: Tensor, *, is_urgent: bool = False) -> RecordRead:
        """See `RecordFiles.read`. What is behind is there when this returns."""
        if not self._is_behind(block):
            return self._store.read(block, kind, start_numel, out, is_urgent=is_urgent)
        self._fill(block, kind, start_numel, out, is_urgent=is_urgent)
        return RecordRead.of_memory()

    def read_unaligned(self, block: str, kind: str, start_numel: int, out: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.read_unaligned`."""
        if self._is_behind(block):
            self._fill(block, kind, start_numel, out)
        else:
            self._store.read_unaligned(block, kind, start_numel, out, bounce)

    def write_unaligned(self, block: str, kind: str, start_numel: int, source: Tensor, bounce: Tensor) -> None:
        """See `RecordFiles.write_unaligned`. A block that is behind takes its missed steps first, for good: they are of
        what it was before."""
        if self._is_behind(block):
            self._catch_up(self._block[block])
        self._store.write_unaligned(block, kind, start_numel, source, bounce)

    def _is_behind(self, block: str) -> bool:
        return self.missed.behind(self._block[block])

    def _fill(self, name: str, kind: str, start: int, out: Tensor, *, is_urgent: bool = False) -> None:
        block = self._block[name]
        form = block.master
        ratio = form.params_per_element(kind)
        first, last = start * ratio, (start + out.numel()) * ratio
        with self._lock:
            for chunk, low, high in self._pieces(block, kind, first, last):
                records = self._caught_up(block, chunk, (kind,), low, high, is_urgent=is_urgent)
                begin, end = max(low, first), min(high, last)
                source = slice((begin - low) // ratio, (end - low) // ratio)
                out[(begin - first) // ratio : (end - first) // ratio].copy_(records[kind][source])

    def _pieces(self, block: Block, kind: str, first: int, last: int) -> Iterator[tuple[Chunk | None, int, int]]:
        """(chunk, start, stop) of whole granules that cover parameters [first, last) of the block. What is in no chunk
        has no states."""
        granule = block.granule_numel
        step = max(PIECE_NUMEL, granule) // granule * granule
        chunks = sorted(self.missed.chunks(block), key=lambda chunk: chunk.start)
        edge = chunks[-1].stop if chunks else 0
        record = self._store.layout.record(block.name, kind)
        end = (record.first + record.numel) * block.master.params_per_element(kind)
        rest: list[tuple[Chunk | None, int, int]] = [(None, edge, end)]
        for chunk, start, stop in [*((chunk, chunk.start, chunk.stop) for chunk in chunks), *rest]:
            low = max(start, first // granule * granule)
            high = min(stop, round_up(last, granule))
            while low < high:
                yield chunk, low, min(low + step, high)
                low += step

    def _caught_up(
        self, block: Block, chunk: Chunk | None, kinds: Sequence[str], start: int, stop: int, *, is_urgent: bool = False
    ) -> dict[str, Tensor]:
        """Records, of ``kinds`` or more, of parameters [start, stop), which are the chunk's. Valid until the next."""
        form = block.master
        missed = self.missed.steps(chunk) if chunk is not None else []
        wanted = ("param", *form.state_kinds) if missed else kinds
        rows = self._memory(block)
        records: dict[str, Tensor] = {}
        reads: list[RecordRead] = []
        try:
            for row, kind in zip(rows, wanted, strict=False):
                first, last = form.elements(kind, start, stop)
                dtype = form.state_dtype(kind)
                records[kind] = row[: (last - first) * dtype.itemsize].view(dtype)
                reads.append(self._store.read(block.name, kind, first, records[kind], is_urgent=is_urgent))
            for read in reads:
                read.wait()
        except BaseException:
            for read in reads:  # the others still write into the memory
                with suppress(Exception):
                    read.arrive()
            raise
        if chunk is not None and missed:
            own = [within(step, start - chunk.start, stop - chunk.start) for step in missed]
            replay_(records, own, form, position=start, private=rows[len(wanted) :][: form.num_private_buffers])
        return records

    def _memory(self, block: Block) -> list[Tensor]:
        """A row of uint8 for each kind and each private buffer of a piece."""
        form = block.master
        num_rows = 1 + len(form.state_kinds) + form.num_private_buffers
        num_bytes = torch.float32.itemsize * max(PIECE_NUMEL, block.granule_numel)
        if len(self._rows) < num_rows or self._rows[0].numel() < num_bytes:
            self._rows = [mapped_empty(num_bytes) for _ in range(num_rows)]
        return self._rows

    def _catch_up(self, block: Block) -> None:
        with self._lock:
            for chunk, low, high in self._pieces(block, "param", 0, block.state_numel):
                if chunk is None or not self.missed.is_behind(chunk):
                    continue
                records = self._caught_up(block, chunk, (), low, high)
                for kind, values in records.items():
                    first, _ = block.master.elements(kind, low, high)
                    self._store.write(block.name, kind, first, values).wait()
            self.missed.forget(block)

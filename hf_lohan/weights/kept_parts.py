"""Where a rank keeps parts of blocks that came from other boxes: in RAM, or on the SSD, where it may be more."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Protocol

from torch import Tensor

from hf_lohan.device import mapped_empty
from hf_lohan.model import Block, ranges
from hf_lohan.planning import kept_ranks, kept_record_name, part_bytes
from hf_lohan.ranks import Ranks
from hf_lohan.store import RecordFiles, RecordRead


class KeptParts(Protocol):
    """By block and rank. Two calls for one part are never under way together."""

    def begin_read(self, block: Block, rank: int, out: Tensor, piece_numel: int) -> list[RecordRead]:
        """Fill ``out`` with a part, by reads of so many elements that may go on; none where it is there at once."""

    def read(self, block: Block, rank: int, out: Tensor) -> None:
        """Fill ``out`` with a part. Raises StorageError."""

    def values(self, block: Block, rank: int) -> Tensor:
        """A part, not to be changed. Raises StorageError."""

    def write(self, block: Block, rank: int, part: Tensor) -> None:
        """Keep a part in place of the one before. Raises StorageError."""


class KeptInRam:
    """`KeptParts` in one piece of memory."""

    def __init__(self, memory: Tensor, blocks: Sequence[Block], ranks: Ranks, *, keeps_own: bool) -> None:
        """``memory``: uint8, as large as `planning` says."""
        names = [(block, rank) for block in blocks for rank in kept_ranks(ranks, keeps_own=keeps_own)]
        ends = accumulate((part_bytes(block, rank) for block, rank in names), initial=0)
        self._parts = {
            (block, rank): memory[first:last].view(block.master.working_dtype)
            for (block, rank), (first, last) in zip(names, pairwise(ends), strict=True)
        }

    def begin_read(self, block: Block, rank: int, out: Tensor, piece_numel: int) -> list[RecordRead]:
        """See `KeptParts`."""
        self.read(block, rank, out)
        return []

    def read(self, block: Block, rank: int, out: Tensor) -> None:
        """See `KeptParts`."""
        out.copy_(self._parts[block, rank])

    def values(self, block: Block, rank: int) -> Tensor:
        """See `KeptParts`."""
        return self._parts[block, rank]

    def write(self, block: Block, rank: int, part: Tensor) -> None:
        """See `KeptParts`."""
        self._parts[block, rank].copy_(part)


class KeptOnSsd:
    """`KeptParts` in a scratch file. Parts are read and written where they lie in whole blocks."""

    def __init__(self, files: RecordFiles) -> None:
        self._files = files

    def begin_read(self, block: Block, rank: int, out: Tensor, piece_numel: int) -> list[RecordRead]:
        """See `KeptParts`."""
        name, first = kept_record_name(block, rank), block.rank_ranges[rank][0]
        return [
            self._files.read(name, "param", first + start, out[start:stop], is_urgent=True)
            for start, stop in ranges(out.numel(), piece_numel)
        ]

    def read(self, block: Block, rank: int, out: Tensor) -> None:
        """See `KeptParts`."""
        for read in self.begin_read(block, rank, out, max(1, out.numel())):
            read.wait()

    def values(self, block: Block, rank: int) -> Tensor:
        """See `KeptParts`."""
        found = mapped_empty(max(1, part_bytes(block, rank)))[: part_bytes(block, rank)]
        values = found.view(block.master.working_dtype)
        self.read(block, rank, values)
        return values

    def write(self, block: Block, rank: int, part: Tensor) -> None:
        """See `KeptParts`."""
        if part.numel():
            first = block.rank_ranges[rank][0]
            self._files.write(kept_record_name(block, rank), "param", first, part).wait()

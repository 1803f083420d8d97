"""Keeps shards of blocks from other nodes in RAM, or in a scratch file on the SSD."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import TypeAlias

import torch
from torch import Tensor

from hf_lohan.config import Collectives
from hf_lohan.device import mapped_empty
from hf_lohan.model import Block, ranges
from hf_lohan.planning import kept_ranks, kept_record_name, part_bytes
from hf_lohan.ranks import Ranks
from hf_lohan.store import RecordFiles, RecordRead


class RamPeerWeights:
    """Keeps shards in one piece of memory. Calls for one shard never overlap."""

    def __init__(self, memory: Tensor, blocks: Sequence[Block], ranks: Ranks, way: Collectives) -> None:
        """``memory``: uint8 tensor with the number of bytes that `planning` computes. ``way``: how nodes exchange
        weights, which decides which shards a rank keeps (`kept_ranks`)."""
        names = [(block, rank) for block in blocks for rank in kept_ranks(ranks, way)]
        self.way = way
        ends = accumulate((part_bytes(block, rank) for block, rank in names), initial=0)
        self._parts = {
            (block, rank): memory[first:last].view(block.master.working_dtype)
            for (block, rank), (first, last) in zip(names, pairwise(ends), strict=True)
        }

    def begin_read(self, block: Block, rank: int, out: Tensor, piece_numel: int) -> list[RecordRead]:
        """Begin to fill ``out`` with a shard. Returns the reads, of ``piece_numel`` elements each; empty if ``out`` is
        already filled."""
        self.read(block, rank, out)
        return []

    def read(self, block: Block, rank: int, out: Tensor) -> None:
        out.copy_(self._parts[block, rank])

    def values(self, block: Block, rank: int) -> Tensor:
        """Return a read-only shard."""
        return self._parts[block, rank]

    def write(self, block: Block, rank: int, part: Tensor) -> None:
        self._parts[block, rank].copy_(part)


class SsdPeerWeights:
    """Keeps shards in a scratch file, as bytes. Its methods are those of `RamPeerWeights`, and raise StorageError."""

    def __init__(self, files: RecordFiles, way: Collectives) -> None:
        self._files = files
        self.way = way

    def begin_read(self, block: Block, rank: int, out: Tensor, piece_numel: int) -> list[RecordRead]:
        name, content = kept_record_name(block, rank), out.view(torch.uint8)
        return [
            self._files.read(name, "param", start, content[start:stop], is_urgent=True)
            for start, stop in ranges(content.numel(), piece_numel * out.itemsize)
        ]

    def read(self, block: Block, rank: int, out: Tensor) -> None:
        for read in self.begin_read(block, rank, out, max(1, out.numel())):
            read.wait()

    def values(self, block: Block, rank: int) -> Tensor:
        found = mapped_empty(max(1, part_bytes(block, rank)))[: part_bytes(block, rank)]
        values = found.view(block.master.working_dtype)
        self.read(block, rank, values)
        return values

    def write(self, block: Block, rank: int, part: Tensor) -> None:
        if part.numel():
            self._files.write(kept_record_name(block, rank), "param", 0, part.view(torch.uint8)).wait()


PeerWeightCache: TypeAlias = RamPeerWeights | SsdPeerWeights

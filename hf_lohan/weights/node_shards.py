"""How a rank's shard of a block goes to other nodes, and which shards of other nodes this node keeps.

A shard is sent unchanged, or rounded by a codec. Then all ranks compute with the rounded weights, also those of its own
node, and only the store has the exact ones. One rank of each node receives a shard and may keep it, so that it need not
be sent again until an update changes the block. Of a kept shard, only the changes of a step are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_lohan.model import Block, ranges
from hf_lohan.planning import part_bytes
from hf_lohan.ranks import CodedTraffic, MeasuredCodec, PayloadReader, Ranks, StepDelta
from hf_lohan.store import RecordRead
from hf_lohan.weights.peer_weights import PeerWeightCache

_CODED_PIECE_NUMEL = 256 * 1024
"""Elements coded at a time: whole blocks of the codec."""
_RAW, _CODED, _CHANGES = range(3)
"""The forms of a shard's payload."""
_DELTA = StepDelta()
_DELTA_DTYPES = (torch.bfloat16, torch.float16)


def has_part(block: Block, rank: int) -> bool:
    first, last = block.rank_ranges[rank]
    return first < last


def part_of(block: Block, rank: int, entry: Tensor) -> Tensor:
    first, last = block.rank_ranges[rank]
    return entry[first:last]


class NodeShards:
    """The shards that one rank sends and receives. Loads begin on one thread, `receive_shard` is called on others."""

    def __init__(
        self,
        ranks: Ranks,
        blocks: Sequence[Block],
        *,
        coded: MeasuredCodec | None = None,
        changes: CodedTraffic | None = None,
        kept: PeerWeightCache | None = None,
        version_of: Callable[[Block], int] = lambda block: 0,
    ) -> None:
        """``coded``: the codec that rounds shards. ``changes``: send only what changed in a block that was sent before,
        and count that traffic here. ``kept``: room for the shards of `kept_ranks`. ``version_of``: how often a block
        was changed, equal on all ranks."""
        assert changes is None or kept is not None, "changes need a kept shard"
        self._ranks = ranks
        self._coded = coded
        self._changes = changes
        self._version_of = version_of
        self._versions: dict[Block, int] = {}
        """The versions that are kept or being received."""
        self._kept = kept
        self.keeps = kept is not None
        """Whether an unchanged block need not be sent again."""
        self._first_kept_load = 0
        self._sent: set[Block] = set()
        """Blocks of which other nodes have the same shard of this rank as `kept`."""

    def keep_weights(self, first_load: int, kept: PeerWeightCache, changes: CodedTraffic | None) -> None:
        """From load ``first_load`` on, keep shards in ``kept``, and with ``changes`` send only what changed. All ranks
        give the same number."""
        self._kept, self._changes = kept, changes
        self._first_kept_load, self.keeps = first_load, True

    def keeps_load(self, number: int) -> bool:
        """Whether the shards of this load are kept."""
        return self.keeps and number >= self._first_kept_load

    def senders(self, block: Block) -> set[int]:
        """Ranks of other nodes that send their shards to this rank."""
        return {rank for rank in self._ranks.counterparts if has_part(block, rank)}

    def recipients(self, block: Block) -> list[int]:
        """Ranks of other nodes that receive this rank's shard."""
        return self._ranks.counterparts if has_part(block, self._ranks.rank) else []

    def is_kept(self, block: Block, version: int, number: int = 0) -> bool:
        """Whether this node keeps that version when load ``number`` begins; then all nodes do. If not, all ranks send
        their shards, and it will be kept."""
        if not self.keeps_load(number):
            return False
        is_kept = self._versions.get(block) == version
        self._versions[block] = version
        return is_kept

    def begin_read(self, block: Block, entry: Tensor, piece_numel: int) -> list[RecordRead]:
        """Begin to put the kept shards of other nodes into a whole block. Returns the reads."""
        reads: list[RecordRead] = []
        for rank in self.senders(block):
            assert self._kept is not None
            reads += self._kept.begin_read(block, rank, part_of(block, rank, entry), piece_numel)
        return reads

    def matters(self, block: Block, version: int) -> bool:
        """Whether a later load may use what is received now of that version."""
        return self.keeps and self._version_of(block) == version

    # This rank's shard.

    def make_own(self, block: Block, entry: Tensor, *, sends: bool, keeps: bool = True) -> tuple[int, Tensor]:
        """Make this rank's shard in ``entry`` what all ranks compute with. Returns the form and the payload to send.
        ``keeps``: see `keeps_load`."""
        part = part_of(block, self._ranks.rank, entry)
        if self._coded is not None:
            return _CODED, self._round(part, self._coded)
        if not sends or not keeps or self._changes is None or self._kept is None:
            return _RAW, part
        form, message = _RAW, part
        if block in self._sent and part.dtype in _DELTA_DTYPES:
            old = self._kept.values(block, self._ranks.rank)
            message = torch.empty(_DELTA.max_bytes(part.numel()), dtype=torch.uint8)
            form, message = _CHANGES, message[: _DELTA.encode(old, part, message)]
        self._kept.write(block, self._ranks.rank, part)
        self._sent.add(block)
        return form, message

    def count(self, block: Block, message: Tensor) -> None:
        """The shard was sent to another node as ``message``."""
        for counted in (self._coded, self._changes):
            if counted is not None:
                counted.count(part_bytes(block, self._ranks.rank), message.nbytes)

    @staticmethod
    def _round(part: Tensor, coded: MeasuredCodec) -> Tensor:
        """The coded payload of a shard. The shard becomes what the payload decodes to."""
        message = torch.empty(coded.codec.message_bytes(part.numel()), dtype=torch.uint8)
        for piece, place in _pieces(part, coded):
            coded.codec.decode(coded.encode(piece, message[place]), piece)
        return message

    # Shards of other nodes.

    def receive(
        self, block: Block, rank: int, form: int, payload: PayloadReader, entry: Tensor, *, keeps: bool = True
    ) -> None:
        """Put a shard from another node into ``entry``. ``keeps``: see `keeps_load`."""
        part = part_of(block, rank, entry)
        if form == _CHANGES:
            assert self._kept is not None
            message = torch.empty(payload.num_bytes, dtype=torch.uint8)
            payload.read_into(message)
            self._kept.read(block, rank, part)
            _DELTA.apply_(part, message)
        elif form == _CODED:
            assert self._coded is not None
            max_bytes = self._coded.codec.message_bytes(min(_CODED_PIECE_NUMEL, part.numel()))
            scratch = torch.empty(max_bytes, dtype=torch.uint8)
            for piece, place in _pieces(part, self._coded):
                message = scratch[: place.stop - place.start]
                payload.read_into(message)
                self._coded.codec.decode(message, piece)
        else:
            payload.read_into(part)
        if keeps and self._kept is not None:
            self._kept.write(block, rank, part)


def _pieces(part: Tensor, coded: MeasuredCodec) -> Iterator[tuple[Tensor, slice]]:
    """The pieces of a shard, each with its slice of the coded payload."""
    end = 0
    for start, stop in ranges(part.numel(), _CODED_PIECE_NUMEL):
        begin, end = end, end + coded.codec.message_bytes(stop - start)
        yield part[start:stop], slice(begin, end)

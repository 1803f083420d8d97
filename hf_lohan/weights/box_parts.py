"""How a rank's part of a block goes to other boxes, and what this box keeps of theirs.

A part goes as it is, or rounded by a codec: then all ranks compute with the rounded weights, those of its own box as
well, and only the store has the exact ones. Each part passes through one rank of a box, which may keep it: as long as
no update has changed the block it need not come again. What is kept over a step is changed by what the step changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from hf_lohan.model import Block, ranges
from hf_lohan.planning import part_bytes
from hf_lohan.ranks import CodedTraffic, MeasuredCodec, PayloadReader, Ranks, StepDelta
from hf_lohan.store import RecordRead
from hf_lohan.weights.kept_parts import KeptParts

PIECE_NUMEL = 256 * 1024
"""Coded at a time: whole blocks of the codec."""
_RAW, _CODED, _CHANGES = range(3)
"""What a message of a part is."""
_DELTA = StepDelta()
_DELTA_DTYPES = (torch.bfloat16, torch.float16)


def has_part(block: Block, rank: int) -> bool:
    first, last = block.rank_ranges[rank]
    return first < last


def part_of(block: Block, rank: int, entry: Tensor) -> Tensor:
    first, last = block.rank_ranges[rank]
    return entry[first:last]


class BoxParts:
    """Of one rank. Loads begin on one thread, `receive` is called on others."""

    def __init__(
        self,
        ranks: Ranks,
        blocks: Sequence[Block],
        *,
        coded: MeasuredCodec | None = None,
        changes: CodedTraffic | None = None,
        kept: KeptParts | None = None,
        version_of: Callable[[Block], int] = lambda block: 0,
    ) -> None:
        """``coded``: parts are rounded by it. ``changes``: of a block that was sent before, what changed is sent, and
        counted there. ``kept``: room for the parts of `kept_ranks`. ``version_of`` says how often a block was
        changed, as all ranks count."""
        assert changes is None or kept is not None, "changes are of what was kept"
        self._ranks = ranks
        self._coded = coded
        self._changes = changes
        self._version_of = version_of
        self._versions: dict[Block, int] = {}
        """What is kept of, or comes."""
        self._kept = kept
        self.keeps = kept is not None
        """Whether a block need not come again that nobody changed."""
        self._sent: set[Block] = set()
        """Of which the other boxes have what `kept` has of this rank's part."""

    def senders(self, block: Block) -> set[int]:
        """Ranks of other boxes whose parts come to this one."""
        return {rank for rank in self._ranks.counterparts if has_part(block, rank)}

    def recipients(self, block: Block) -> list[int]:
        """Ranks of other boxes to which this one's part goes."""
        return self._ranks.counterparts if has_part(block, self._ranks.rank) else []

    def is_kept(self, block: Block, version: int) -> bool:
        """Whether this box has that version, as then all boxes have. If not, all send theirs, and it will be kept."""
        is_kept = self.keeps and self._versions.get(block) == version
        self._versions[block] = version
        return is_kept

    def begin_read(self, block: Block, entry: Tensor, piece_numel: int) -> list[RecordRead]:
        """Put what is kept of other boxes into a whole block, by reads that may go on."""
        reads: list[RecordRead] = []
        for rank in self.senders(block):
            assert self._kept is not None
            reads += self._kept.begin_read(block, rank, part_of(block, rank, entry), piece_numel)
        return reads

    def matters(self, block: Block, version: int) -> bool:
        """Whether another load may take what comes now of that version."""
        return self.keeps and self._version_of(block) == version

    # This rank's part.

    def make_own(self, block: Block, entry: Tensor, *, sends: bool) -> tuple[int, Tensor]:
        """Make this rank's part in ``entry`` what all ranks compute with. Returns the form in which it is sent, and
        what is sent."""
        part = part_of(block, self._ranks.rank, entry)
        if self._coded is not None:
            return _CODED, self._round(part, self._coded)
        if not sends or self._changes is None or self._kept is None:
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
        """The part went to another box as ``message``."""
        for counted in (self._coded, self._changes):
            if counted is not None:
                counted.count(part_bytes(block, self._ranks.rank), message.nbytes)

    @staticmethod
    def _round(part: Tensor, coded: MeasuredCodec) -> Tensor:
        """The message of a part, piece by piece. The part becomes what it brings."""
        message = torch.empty(coded.codec.message_bytes(part.numel()), dtype=torch.uint8)
        for piece, place in _pieces(part, coded):
            coded.codec.decode(coded.encode(piece, message[place]), piece)
        return message

    # The parts of others.

    def receive(self, block: Block, rank: int, form: int, payload: PayloadReader, entry: Tensor) -> None:
        """Put a part that comes from another box into ``entry``."""
        part = part_of(block, rank, entry)
        if form == _CHANGES:
            assert self._kept is not None
            message = torch.empty(payload.num_bytes, dtype=torch.uint8)
            payload.read_into(message)
            self._kept.read(block, rank, part)
            _DELTA.apply_(part, message)
        elif form == _CODED:
            assert self._coded is not None
            scratch = torch.empty(self._coded.codec.message_bytes(min(PIECE_NUMEL, part.numel())), dtype=torch.uint8)
            for piece, place in _pieces(part, self._coded):
                message = scratch[: place.stop - place.start]
                payload.read_into(message)
                self._coded.codec.decode(message, piece)
        else:
            payload.read_into(part)
        if self._kept is not None:
            self._kept.write(block, rank, part)


def _pieces(part: Tensor, coded: MeasuredCodec) -> Iterator[tuple[Tensor, slice]]:
    """Of a part, and where the message of each lies in that of the part."""
    end = 0
    for start, stop in ranges(part.numel(), PIECE_NUMEL):
        begin, end = end, end + coded.codec.message_bytes(stop - start)
        yield part[start:stop], slice(begin, end)

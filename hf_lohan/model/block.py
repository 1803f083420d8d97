"""Blocks, which are parameters that stream together, and the parameters' offsets in the flat records of a block."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise

import torch
from torch import nn

from hf_lohan.costs import MIN_CHUNK_NUMEL, BlockShape, SizeClass, cut_for_ranks, cut_units, units_between
from hf_lohan.costs.record_traffic import FETCHED_KINDS, PARAM
from hf_lohan.files import SECTOR_BYTES
from hf_lohan.optim import TIE_RUN_NUMEL, MasterFormat, master_format
from hf_lohan.quantize import PackedForm
from hf_lohan.store import GRANULE_NUMEL, MAX_GRANULE_NUMEL, RECORD_ALIGN_NUMEL

assert MIN_CHUNK_NUMEL % GRANULE_NUMEL == 0, "chunks are cut between granules"

PARAM_ALIGN_NUMEL = 32
"""Alignment of parameters, to 64 bytes for vector loads and grouped matmuls. A large parameter starts at a granule, so
that a chunk can begin with it. A small parameter lies within one granule."""

SECTION_BYTES = 64
"""Alignment of a parameter's codes and scales in their records."""

MIN_GRANULES = 64
_MAX_PADDING = 0.01
_FLOAT32 = master_format(torch.float32)


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(eq=False)
class ParamSlice:
    """A parameter, or a part of one, in a block: elements [start, start + numel) of each record."""

    name: str
    parameter: nn.Parameter
    shape: torch.Size
    start: int
    trainable: bool
    first: int = 0
    """First element of the part in the flattened parameter."""
    last: int = -1
    """End of the part in the flattened parameter. The default is the parameter's end."""
    packed: PackedForm | None = None
    """The form in which the store packs the parameter. None if the store has it in the working dtype."""
    codes_start: int = 0
    scales_start: int = 0
    """Offsets in bytes in the block's records of codes and of scales, if the parameter is packed."""

    def __post_init__(self) -> None:
        if self.last < 0:
            self.last = self.shape.numel()
        assert 0 <= self.first < self.last <= self.shape.numel() or self.is_whole, f"{self.name} has no such part"
        assert self.first % PARAM_ALIGN_NUMEL == 0, f"a part of {self.name} begins in the middle of a scale block"

    @property
    def numel(self) -> int:
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Whether this is the whole parameter."""
        return self.numel == self.shape.numel()

    @property
    def stop(self) -> int:
        return self.start + self.numel

    @property
    def codes_stop(self) -> int:
        return self.codes_start + (self.packed.codes_bytes(self.numel) if self.packed else 0)

    @property
    def scales_stop(self) -> int:
        return self.scales_start + (self.packed.scales_bytes(self.numel) if self.packed else 0)


@dataclass(frozen=True, slots=True, eq=False)
class ChunkPiece:
    """The part of a slice that lies in one chunk, with its offsets in the chunk and in the slice."""

    chunk: Chunk
    param_slice: ParamSlice
    start_in_chunk: int
    start_in_slice: int
    numel: int

    @property
    def stop_in_chunk(self) -> int:
        return self.start_in_chunk + self.numel


@dataclass(eq=False)
class Chunk:
    """Elements [start, stop) of a block's records. A host buffer holds one chunk."""

    block: Block
    index: int
    start: int
    stop: int
    pieces: list[ChunkPiece] = field(default_factory=list, repr=False)
    owner: int = 0
    """The rank that stores the chunk."""

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @cached_property
    def gaps(self) -> list[tuple[int, int]]:
        """[start, stop) ranges of padding, relative to the chunk's start."""
        inner = (edge for piece in self.pieces for edge in (piece.start_in_chunk, piece.stop_in_chunk))
        edges = [0, *inner, self.numel]
        return [(start, stop) for start, stop in zip(edges[::2], edges[1::2], strict=True) if start < stop]

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"chunk {self.index} of {self.block.name}"


@dataclass(frozen=True, slots=True)
class FetchedPart:
    """A part of a block's fetched elements that lies within one record."""

    kind: str
    first: int
    last: int
    """The part has the fetched elements [first, last) (`Block.fetched_numel`)."""
    start: int
    stop: int
    """These are the elements [start, stop) of the record, or the bytes if it has packed weights."""


@dataclass(eq=False)
class Block:
    """The parameters that stream together, of one decoder layer or of one module outside the layers.

    Trainable parameters are first, with matrices before vectors, so that weight-decay groups form long runs. Frozen
    parameters follow and have no optimizer state, and packed parameters are last. The `param` record has `stored_numel`
    elements, and records with states have `state_numel` elements. Packed parameters have their bytes in the records
    `codes` and `scales` instead.
    """

    name: str
    size_class: SizeClass
    slices: list[ParamSlice]
    master: MasterFormat = _FLOAT32
    """The format of the weights, which have one dtype."""
    granule_numel: int = GRANULE_NUMEL
    """Number of elements in a granule of the records."""
    rank_edges: tuple[int, ...] = ()
    """Rank r has the fetched elements [rank_edges[r], rank_edges[r + 1]). Empty for one rank."""
    owner: int | None = None
    """The rank that stores the whole block and alone computes with it. None if all ranks compute with the block."""

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"Block({self.name!r})"

    @cached_property
    def numel(self) -> int:
        return round_up(max(self.state_numel, *(part.stop for part in self.slices)), self._align_numel)

    @property
    def packed_slices(self) -> list[ParamSlice]:
        return [part for part in self.slices if part.packed is not None]

    @cached_property
    def stored_numel(self) -> int:
        """Number of elements of the `param` record."""
        if not self.packed_slices:
            return self.numel
        stops = (part.stop for part in self.slices if part.packed is None)
        return round_up(max(self.state_numel, *stops, 0), self._align_numel)

    @property
    def _align_numel(self) -> int:
        """Records of weights have a multiple of this number of elements, which is whole sectors."""
        return max(RECORD_ALIGN_NUMEL, SECTOR_BYTES // self.master.working_dtype.itemsize)

    @cached_property
    def codes_bytes(self) -> int:
        """Size of the `codes` record."""
        return round_up(max((part.codes_stop for part in self.slices), default=0), SECTOR_BYTES)

    @cached_property
    def scales_bytes(self) -> int:
        """Size of the `scales` record."""
        return round_up(max((part.scales_stop for part in self.slices), default=0), SECTOR_BYTES)

    @property
    def packed_numel(self) -> int:
        """Number of elements that a pass decodes."""
        return sum(part.numel for part in self.packed_slices)

    @property
    def packed_granule_bytes(self) -> int:
        """Bytes in a granule of the records of codes and scales."""
        return self.granule_numel // 2

    @cached_property
    def _fetched_sizes(self) -> dict[str, int]:
        """Sizes of the records that a pass reads, in elements of the working dtype."""
        itemsize = self.master.working_dtype.itemsize
        packed = {"scales": self.scales_bytes, "codes": self.codes_bytes} if self.packed_slices else {}
        return {PARAM: self.stored_numel, **{kind: num_bytes // itemsize for kind, num_bytes in packed.items()}}

    @property
    def fetched_numel(self) -> int:
        """Size of the records that a pass reads, one after the other: `param`, `scales`, `codes`. It is in elements of
        the working dtype, even for bytes of packed weights. Without packed weights it is `numel`."""
        return sum(self._fetched_sizes.values())

    @property
    def fetched_bytes(self) -> int:
        return self.fetched_numel * self.master.working_dtype.itemsize

    def fetched_parts(self, first: int, last: int) -> Iterator[FetchedPart]:
        """Yield the parts of the fetched elements [first, last) in each record."""
        edges = pairwise(accumulate(self._fetched_sizes.values(), initial=0))
        for kind, (begin, end) in zip(self._fetched_sizes, edges, strict=True):
            low, high = max(first, begin), min(last, end)
            if low < high:
                unit = 1 if kind == PARAM else self.master.working_dtype.itemsize
                yield FetchedPart(kind, low, high, (low - begin) * unit, (high - begin) * unit)

    def record_ranges(self, kind: str) -> list[tuple[int, int]]:
        """Return the elements [start, stop) of a fetched record that each rank has, or the bytes of packed weights."""
        return [
            next(((part.start, part.stop) for part in self.fetched_parts(*of_rank) if part.kind == kind), (0, 0))
            for of_rank in self.rank_ranges
        ]

    @cached_property
    def state_numel(self) -> int:
        trained = max((part.stop for part in self.trainable_slices), default=0)
        # Frozen weights share no granule with trainable weights, because no step writes them.
        whole = self.granule_numel if len(self.trainable_slices) < len(self.slices) else RECORD_ALIGN_NUMEL
        return round_up(trained, max(whole, self.master.align_numel))

    @property
    def trainable_slices(self) -> list[ParamSlice]:
        return [part for part in self.slices if part.trainable]

    @property
    def unit_numels(self) -> tuple[int, ...]:
        """Sizes of the units of records with states, in whole granules (`cut_units`)."""
        starts = [part.start for part in self.trainable_slices if part.start % self.granule_numel == 0]
        return tuple(stop - start for start, stop in zip(starts, [*starts[1:], self.state_numel], strict=False))

    @property
    def least_buffer_numel(self) -> int:
        """Size of a buffer for one granule of the block's weights, in float32 elements."""
        return self.granule_numel * max(1, self.master.working_dtype.itemsize // torch.float32.itemsize)

    @property
    def needs_whole(self) -> bool:
        """Whether the update rule needs whole parameters, so that each must lie in one chunk."""
        return bool(self.state_numel) and self.master.rule.needs_whole

    @property
    def param_bytes(self) -> int:
        """Size of the block's weights in a slot."""
        return self.numel * self.master.working_dtype.itemsize

    def cut_for_ranks(self, num_ranks: int) -> None:
        """Assign a shard of the block's records to each rank."""
        param_numel, *packed_numels = self._fetched_sizes.values()
        packed_granule = self.packed_granule_bytes // self.master.working_dtype.itemsize
        self.rank_edges = cut_for_ranks(
            self.unit_numels,
            param_numel,
            num_ranks,
            granule_numel=self.granule_numel,
            keeps_units=self.needs_whole,
            packed_numels=packed_numels,
            packed_granule_numel=packed_granule,
        )

    def give_to_rank(self, owner: int, num_ranks: int) -> None:
        """Assign the whole block to one rank."""
        self.owner = owner
        self.rank_edges = tuple(self.fetched_numel if rank > owner else 0 for rank in range(num_ranks + 1))

    @property
    def rank_ranges(self) -> list[tuple[int, int]]:
        """Fetched elements [start, stop) of each rank. A range may be empty."""
        return list(pairwise(self.rank_edges)) if self.rank_edges else [(0, self.fetched_numel)]

    def shape(self, rank: int | None = None) -> BlockShape:
        """Return the sizes that planning needs, of the whole block or of a rank's shard."""
        start, stop = self.rank_ranges[rank] if rank is not None else (0, self.fetched_numel)
        itemsize = self.master.working_dtype.itemsize
        sizes = dict.fromkeys(FETCHED_KINDS, 0) | {
            part.kind: (part.last - part.first) * itemsize for part in self.fetched_parts(start, stop)
        }
        return BlockShape(
            name=self.name,
            size_class=self.size_class,
            param_bytes=(stop - start) * itemsize if rank is not None else self.param_bytes,
            unit_numels=units_between(self.unit_numels, start, stop) if rank is not None else self.unit_numels,
            num_trainable_params=len(self.trainable_slices),
            cuts=self.rank_edges[1:-1] if rank is None else (),
            codes_bytes=sizes["codes"],
            scales_bytes=sizes["scales"],
            stored_param_bytes=sizes[PARAM] if self.packed_slices else None,
        )

    def cut(self, chunk_numel: int) -> list[Chunk]:
        """Cut the records with states into chunks, and the trainable parameters into the chunks' pieces."""
        chunks: list[Chunk] = []
        for owner, (first, last) in enumerate(self.rank_ranges):
            units = units_between(self.unit_numels, first, last)
            chunks += [
                Chunk(self, len(chunks) + index, first + start, first + stop, owner=owner)
                for index, (start, stop) in enumerate(cut_units(units, chunk_numel))
            ]
        for part in self.trainable_slices:
            for chunk in chunks:
                first, last = max(part.start, chunk.start), min(part.stop, chunk.stop)
                if first < last:
                    chunk.pieces.append(ChunkPiece(chunk, part, first - chunk.start, first - part.start, last - first))
        return chunks


def ranges(numel: int, step: int) -> Iterator[tuple[int, int]]:
    """Yield [start, stop) pairs of at most ``step`` elements that cover `numel`."""
    for start in range(0, numel, step):
        yield start, min(start + step, numel)


def lay_out_block(
    name: str,
    size_class: SizeClass,
    named_parameters: dict[str, nn.Parameter],
    master: MasterFormat = _FLOAT32,
    granule_numel: int = GRANULE_NUMEL,
    parts: Mapping[str, tuple[int, int]] | None = None,
    packed: Mapping[str, PackedForm] | None = None,
) -> Block:
    """Assign offsets to the parameters of a block. The same model and frozen weights always give the same order.
    ``parts`` has the elements [first, last) of parameters that belong to the block only in part. ``packed`` has the
    form of packed parameters."""
    assert master.align_numel in (1, GRANULE_NUMEL) and granule_numel % GRANULE_NUMEL == 0
    assert GRANULE_NUMEL == TIE_RUN_NUMEL, "the store has a tie code for each run"
    packed = packed or {}
    order = sorted(
        named_parameters.items(),
        # A stable sort keeps the model's order.
        key=lambda item: (not item[1].requires_grad, item[0] in packed, item[1].dim() < 2),
    )
    slices: list[ParamSlice] = []
    start = codes_start = scales_start = 0
    was_trainable, was_packed = True, False
    for param_name, parameter in order:
        form = packed.get(param_name)
        room_numel = -start % granule_numel
        first, last = (parts or {}).get(param_name, (0, parameter.numel()))
        begins_part = (was_trainable and not parameter.requires_grad) or (form is not None and not was_packed)
        if last - first > room_numel or begins_part:
            start += room_numel
        was_trainable, was_packed = parameter.requires_grad, form is not None
        part = ParamSlice(param_name, parameter, parameter.shape, start, parameter.requires_grad, first, last, form)
        if form is not None:
            part.codes_start = round_up(codes_start, max(form.cut_bytes, SECTION_BYTES))
            part.scales_start = scales_start
            codes_start, scales_start = part.codes_stop, round_up(part.scales_stop, SECTION_BYTES)
        slices.append(part)
        start = round_up(start + last - first, PARAM_ALIGN_NUMEL)
    return Block(name, size_class, slices, master, granule_numel)


def with_large_granules(blocks: Sequence[Block]) -> list[Block]:
    """Lay out the blocks again with the largest granules within two limits: the largest block has at least
    `MIN_GRANULES`, and padding before parameters is at most a hundredth."""
    largest_numel = max(block.numel for block in blocks)
    num_parameters = sum(part.numel for block in blocks for part in block.slices)
    granule_numel = MAX_GRANULE_NUMEL
    while granule_numel > GRANULE_NUMEL:
        if largest_numel >= MIN_GRANULES * granule_numel:
            laid_out = [_with_granules(block, granule_numel) for block in blocks]
            if sum(block.numel for block in laid_out) <= num_parameters * (1 + _MAX_PADDING):
                return laid_out
        granule_numel //= 2
    return list(blocks)


def _with_granules(block: Block, granule_numel: int) -> Block:
    parameters = {part.name: part.parameter for part in block.slices}
    parts = {part.name: (part.first, part.last) for part in block.slices}
    packed = {part.name: part.packed for part in block.slices if part.packed is not None}
    return lay_out_block(block.name, block.size_class, parameters, block.master, granule_numel, parts, packed)
